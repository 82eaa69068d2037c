"""Messages as a line of JSON has them, in OpenAI's shape, and as a request carries them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format

from rocmforge.engine.v1 import engine_pb2 as pb

#: What a line of JSON may say of a conversation. ``chat`` and ``system`` make one of a prompt that is text.
NAMES = (
    *("messages", "chat", "system", "tools", "template_arguments"),
    *("add_generation_prompt", "continue_final_message"),
)
_SWITCHES = ("add_generation_prompt", "continue_final_message")


class Unheard(ValueError):
    """Something that is no conversation; says what."""


def of(values: Mapping[str, Any]) -> pb.Messages:
    """The conversation of values by NAMES. Raises Unheard and UnicodeError."""
    made = pb.Messages()
    if values.get("messages") is not None:
        if values.get("prompt") is not None:
            raise Unheard("prompt and messages are both given; a request has one of them")
        if not isinstance(values["messages"], list):
            raise Unheard("messages is a list of objects with role and content")
        for at, one in enumerate(values["messages"]):
            made.items.append(message(one, f"messages[{at}]"))
        if not made.items:
            raise Unheard("messages is empty")
    else:
        made.items.add(role="user", content=values["prompt"])
    system = values.get("system")
    if system is not None and not (made.items and made.items[0].role == "system"):
        if not isinstance(system, str):
            raise Unheard("system is a text")
        made.items.insert(0, pb.Message(role="system", content=system))
    for name in _SWITCHES:
        if (value := values.get(name)) is not None:
            if not isinstance(value, bool):
                raise Unheard(f"{name} is true or false")
            setattr(made, name, value)
    tools = values["tools"] if values.get("tools") is not None else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unheard("tools is a list of objects")
    made.tools.extend(json.dumps(tool, ensure_ascii=False) for tool in tools)
    arguments = values["template_arguments"] if values.get("template_arguments") is not None else {}
    if not isinstance(arguments, dict):
        raise Unheard("template_arguments is an object")
    try:
        json_format.ParseDict(arguments, made.template_arguments)
    except json_format.ParseError as error:
        raise Unheard(f"template_arguments: {error}") from error
    return made


def message(value: Any, name: str) -> pb.Message:
    """One message of an object with ``role``, ``content`` and whatever else a template reads. Raises Unheard."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Unheard(f"{name} is an object with role and content")
    made = pb.Message(role=value["role"], content=_content(value.get("content"), f"{name}.content"))
    told = value.get("name")
    if told is not None:
        if not isinstance(told, str):
            raise Unheard(f"{name}.name is a text")
        made.name = told
    other = {key: inner for key, inner in value.items() if key not in ("role", "content", "name")}
    if other:
        made.other = json.dumps(other, ensure_ascii=False)
    return made


def _content(value: Any, name: str) -> str:
    """Text, or a list of texts as ``{"type": "text", "text": "..."}``; null is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    texts = [one.get("text", "") for one in parts if isinstance(one, dict) and one.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise Unheard(f"{name} is a text, or a list of parts that are text")
    return "".join(texts)


def arguments_of(words: Iterable[str]) -> dict[str, Any]:
    """Names and values of words as ``enable_thinking=false``: JSON, or else text. Raises ValueError."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"{word}: want NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
