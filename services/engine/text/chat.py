"""Converts a conversation to a prompt: validates it, renders the model's chat template, and tokenizes the text."""

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
#: Of JSON that callers send: far below what any Python parses.
MAX_DEPTH = 100

#: Template variables that have message fields of their own.
_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
#: Doubles represent every integer below this exactly.
_EXACT = 1 << 53
_KEYS = ("role", "content", "name")


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text rendered from messages, and its token ids."""

    text: str
    token_ids: tuple[int, ...]


class Chat:
    """Renders messages with a model's chat templates. Thread-safe.

    Without a template it rejects messages; ``error`` says why when the model has one that cannot be used.
    """

    def __init__(self, templates: Mapping[str, ChatTemplate], tokenizer: Tokenizer, error: str = "") -> None:
        self.error = error
        self._templates = dict(templates)
        self._special = SpecialTokens(tokenizer)

    @classmethod
    def of(cls, source: ChatSource | None, tokenizer: Tokenizer) -> Chat:
        """Parse a checkpoint's templates. Raises ``ModelInvalid`` naming the file of a template that does not parse."""
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
        """Render and tokenize a Messages, in a thread. Both the message and its text may have at most ``size`` bytes.

        Raises FieldInvalid and PromptTooLong, naming the field from ``messages`` on.
        """
        if not self._templates:
            why = f": {self.error}" if self.error else ""
            raise FieldInvalid(f"the model has no chat template{why}; give text or tokens", field="messages")
        if (given := message.ByteSize()) > size:
            raise PromptTooLong(f"messages has {given} bytes; at most {size}", field="messages", limit=size)
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
                "add_generation_prompt and continue_final_message cannot both be set",
                field="messages.continue_final_message",
            )
        messages = [self._message(one, f"messages.items[{at}]") for at, one in enumerate(message.items)]
        arguments = self._arguments(message.template_arguments)
        for name in _FIELDS:
            if name in arguments:
                raise FieldInvalid(
                    f"template_arguments has {name}; set the field {name} instead", field="messages.template_arguments"
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
                f"the chat template renders {len(plain.encode())} bytes of messages; at most {size}",
                field="messages",
                limit=size,
            )
        try:
            ids = self._special.encode(text)
        except FieldInvalid as error:
            error.field = "messages"
            raise
        if not ids:
            raise FieldInvalid("the chat template renders messages to an empty text", field="messages")
        return Rendered(plain, tuple(ids))

    def _message(self, message: Any, field: str) -> dict[str, Any]:
        """Converts a message to what a template sees."""
        if not 1 <= len(message.role) <= MAX_ROLE:
            raise FieldInvalid(
                f"{field}.role has {len(message.role)} characters; it must have 1 to {MAX_ROLE}", field=f"{field}.role"
            )
        rendered = {
            "role": self._text(message.role, f"{field}.role"),
            "content": self._text(message.content, f"{field}.content"),
        }
        if message.name:
            rendered["name"] = self._text(message.name, f"{field}.name")
        other = self._object(message.other, f"{field}.other") if message.other else {}
        for key in _KEYS:
            if key in other:
                raise FieldInvalid(f"{field}.other has {key}; set the field {key} instead", field=f"{field}.other")
        return rendered | other

    def _arguments(self, message: Any) -> Any:
        """Converts a Struct to what a template sees. Its numbers are doubles; integral ones become integers."""
        field = "messages.template_arguments"
        try:
            value = json_format.MessageToDict(message)
        except (ValueError, json_format.Error) as error:  # not expressible in JSON: NaN, infinity, an unset value
            raise FieldInvalid(f"{field} is not JSON: {error}", field=field) from error
        return self._guarded(_whole(value), field)

    def _object(self, text: str, field: str) -> Any:
        """Parses a JSON object to what a template sees."""
        try:
            value = self._guarded(json.loads(text, parse_constant=_no_number), field)
        except (ValueError, RecursionError) as error:
            raise FieldInvalid(f"{field} is not JSON: {error}", field=field) from error
        if not isinstance(value, dict):
            raise FieldInvalid(f"{field} is not a JSON object", field=field)
        return value

    def _guarded(self, value: Any, field: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise FieldInvalid(f"{field} is nested more than {MAX_DEPTH} levels deep", field=field, limit=MAX_DEPTH)
        match value:
            case str():
                return self._text(value, field)
            case dict():
                return {self._text(key, field): self._guarded(one, field, depth + 1) for key, one in value.items()}
            case list():
                return [self._guarded(one, field, depth + 1) for one in value]
        return value

    def _text(self, text: str, field: str) -> str:
        try:
            text.encode()
        except UnicodeError as error:  # JSON can escape a lone surrogate
            raise FieldInvalid(f"{field} contains a lone surrogate", field=field) from error
        for character in RESERVED:
            if character in text:
                raise FieldInvalid(f"{field} contains the noncharacter U+{ord(character):04X}", field=field)
        return self._special.guard(text)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _whole(value: Any) -> Any:
    """Returns a Struct's value with integral doubles as integers."""
    match value:
        case dict():
            return {key: _whole(inner) for key, inner in value.items()}
        case list():
            return [_whole(inner) for inner in value]
        case float() if value.is_integer() and abs(value) < _EXACT:
            return int(value)
    return value
