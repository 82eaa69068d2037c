"""A conversation as a prompt: checked, written by the model's chat template, and read as tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from services.common.errors import FieldInvalid, ModelInvalid, PromptTooLong
from services.engine.text.chat_files import DEFAULT, TOOL_USE, ChatSource
from services.engine.text.chat_template import ChatTemplate, TemplateUnfit
from services.engine.text.special_tokens import RESERVED, SpecialTokens
from services.engine.text.tokenizer import Tokenizer

MAX_MESSAGES = 16384
MAX_ROLE = 128

#: Names that are said in fields of their own.
_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
#: Up to here a double holds every whole number.
_EXACT = 1 << 53
_KEYS = ("role", "content", "name")


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template made of messages, and its token ids."""

    text: str
    token_ids: tuple[int, ...]


class Chat:
    """The chat of one model: what its template makes of messages. Any thread may use it.

    A model without a template has one, too, which refuses messages; ``error`` says why if there was a template.
    """

    def __init__(self, templates: Mapping[str, ChatTemplate], tokenizer: Tokenizer, error: str = "") -> None:
        self.error = error
        self._templates = dict(templates)
        self._special = SpecialTokens(tokenizer)

    @classmethod
    def of(cls, source: ChatSource | None, tokenizer: Tokenizer) -> Chat:
        """Take what a checkpoint has. Raises ``ModelInvalid`` for a template that does not parse, naming its file."""
        if source is None:
            return cls({}, tokenizer)
        templates = {}
        for name, text in source.templates.items():
            try:
                templates[name] = ChatTemplate(text, source.special)
            except TemplateUnfit as unfit:
                raise ModelInvalid(f"{source.file}: the chat template {name} does not parse: {unfit}") from unfit
        return cls(templates, tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether prompts may be messages."""
        return bool(self._templates)

    async def read(self, message: Any, size: int) -> Rendered:
        """Write and read a Messages, in a thread of its own; neither it nor its text may have more than ``size`` bytes.

        Raises FieldInvalid and PromptTooLong, naming the field from ``messages`` on.
        """
        if not self._templates:
            why = f": {self.error}" if self.error else ""
            raise FieldInvalid(f"the model has no chat template{why}; give text or tokens", field="messages")
        if (given := message.ByteSize()) > size:
            raise PromptTooLong(f"messages has {given} bytes; it may have {size}", field="messages", limit=size)
        return await asyncio.to_thread(self._read, message, size)

    def _read(self, message: Any, size: int) -> Rendered:
        count = len(message.items)
        if not 1 <= count <= MAX_MESSAGES:
            raise FieldInvalid(
                f"messages.items has {count} messages; it must have 1 to {MAX_MESSAGES}",
                field="messages.items",
                limit=MAX_MESSAGES,
            )
        going_on = message.continue_final_message
        asking = message.add_generation_prompt if message.HasField("add_generation_prompt") else not going_on
        if going_on and asking:
            raise FieldInvalid(
                "add_generation_prompt begins a new message, continue_final_message goes on with one: set one of them",
                field="messages.continue_final_message",
            )
        messages = [self._message(one, f"messages.items[{at}]") for at, one in enumerate(message.items)]
        arguments = self._arguments(message.template_arguments)
        for name in _FIELDS:
            if name in arguments:
                raise FieldInvalid(
                    f"template_arguments has {name}, which is a field of its own", field="messages.template_arguments"
                )
        tools = [self._object(tool, f"messages.tools[{at}]") for at, tool in enumerate(message.tools)]
        template = self._templates.get(TOOL_USE if tools else DEFAULT, self._templates[DEFAULT])
        text = template.render(
            messages,
            size=size,
            tools=tools or None,
            arguments=arguments,
            add_generation_prompt=asking,
            continue_final_message=going_on,
        )
        plain = self._special.plain(text)
        if len(plain.encode()) > size:
            raise PromptTooLong(
                f"the chat template makes {len(plain.encode())} bytes of messages; it may make {size}",
                field="messages",
                limit=size,
            )
        ids = self._special.encode(text)
        if not ids:
            raise FieldInvalid("the chat template makes nothing of messages", field="messages")
        return Rendered(plain, tuple(ids))

    def _message(self, message: Any, field: str) -> dict[str, Any]:
        """A message as a template sees it."""
        if not 1 <= len(message.role) <= MAX_ROLE:
            raise FieldInvalid(
                f"{field}.role has {len(message.role)} characters; it must have 1 to {MAX_ROLE}", field=f"{field}.role"
            )
        told = {
            "role": self._text(message.role, f"{field}.role"),
            "content": self._text(message.content, f"{field}.content"),
        }
        if message.name:
            told["name"] = self._text(message.name, f"{field}.name")
        other = self._object(message.other, f"{field}.other") if message.other else {}
        for key in _KEYS:
            if key in other:
                raise FieldInvalid(f"{field}.other has {key}, which is a field of its own", field=f"{field}.other")
        return told | other

    def _arguments(self, message: Any) -> Any:
        """A Struct as a template sees it. Its numbers are doubles: those that are whole count as whole numbers."""
        field = "messages.template_arguments"
        try:
            value = json_format.MessageToDict(message)
        except (ValueError, json_format.Error) as error:  # what JSON cannot say: NaN, infinity, a value that is unset
            raise FieldInvalid(f"{field} is not JSON: {error}", field=field) from error
        return self._guarded(_whole(value), field)

    def _object(self, text: str, field: str) -> Any:
        """An object of JSON as a template sees it."""
        try:
            value = self._guarded(json.loads(text, parse_constant=_no_number), field)
        except (ValueError, RecursionError) as error:
            raise FieldInvalid(f"{field} is not JSON: {error}", field=field) from error
        if not isinstance(value, dict):
            raise FieldInvalid(f"{field} is not a JSON object", field=field)
        return value

    def _guarded(self, value: Any, field: str) -> Any:
        match value:
            case str():
                return self._text(value, field)
            case dict():
                return {self._text(key, field): self._guarded(inner, field) for key, inner in value.items()}
            case list():
                return [self._guarded(inner, field) for inner in value]
        return value

    def _text(self, text: str, field: str) -> str:
        try:
            text.encode()
        except UnicodeError as error:  # JSON can spell a lone surrogate
            raise FieldInvalid(f"{field} holds half a character", field=field) from error
        for character in RESERVED:
            if character in text:
                raise FieldInvalid(f"{field} holds U+{ord(character):04X}, which is no character", field=field)
        return self._special.guard(text)


def _no_number(name: str) -> None:
    raise ValueError(f"there is no {name} in JSON")


def _whole(value: Any) -> Any:
    """A value of a Struct with whole numbers as such."""
    match value:
        case dict():
            return {key: _whole(inner) for key, inner in value.items()}
        case list():
            return [_whole(inner) for inner in value]
        case float() if value.is_integer() and abs(value) < _EXACT:
            return int(value)
    return value
