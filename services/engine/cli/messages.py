"""Chat messages: from OpenAI-style JSON to the protobuf of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format

from rocmforge.engine.v1 import engine_pb2 as pb

#: The JSON fields of a conversation. ``chat`` and ``system`` turn a text prompt into one.
NAMES = (
    *("messages", "chat", "system", "tools", "template_arguments"),
    *("add_generation_prompt", "continue_final_message"),
)
_SWITCHES = ("add_generation_prompt", "continue_final_message")


class Unheard(ValueError):
    """The values do not form a valid conversation; the message says why."""


def of(values: Mapping[str, Any]) -> pb.Messages:
    """Build the conversation from values keyed by NAMES. Raises Unheard and UnicodeError."""
    made = pb.Messages()
    if values.get("messages") is not None:
        if values.get("prompt") is not None:
            raise Unheard("prompt and messages are mutually exclusive")
        if not isinstance(values["messages"], list):
            raise Unheard("messages must be a list of objects with role and content")
        for at, one in enumerate(values["messages"]):
            made.items.append(message(one, f"messages[{at}]"))
        if not made.items:
            raise Unheard("messages is empty")
    else:
        made.items.add(role="user", content=values["prompt"])
    system = values.get("system")
    if system is not None and not (made.items and made.items[0].role == "system"):
        if not isinstance(system, str):
            raise Unheard("system must be a string")
        made.items.insert(0, pb.Message(role="system", content=system))
    for name in _SWITCHES:
        if (value := values.get(name)) is not None:
            if not isinstance(value, bool):
                raise Unheard(f"{name} must be a boolean")
            setattr(made, name, value)
    tools = values["tools"] if values.get("tools") is not None else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unheard("tools must be a list of objects")
    made.tools.extend(json.dumps(tool, ensure_ascii=False) for tool in tools)
    arguments = values["template_arguments"] if values.get("template_arguments") is not None else {}
    if not isinstance(arguments, dict):
        raise Unheard("template_arguments must be an object")
    try:
        json_format.ParseDict(arguments, made.template_arguments)
    except json_format.ParseError as error:
        raise Unheard(f"template_arguments: {error}") from error
    return made


def message(value: Any, name: str) -> pb.Message:
    """Build a message from an object with ``role``, ``content`` and other fields for the template. Raises Unheard."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Unheard(f"{name} must be an object with role and content")
    made = pb.Message(role=value["role"], content=_content(value.get("content"), f"{name}.content"))
    given = value.get("name")
    if given is not None:
        if not isinstance(given, str):
            raise Unheard(f"{name}.name must be a string")
        made.name = given
    other = {key: inner for key, inner in value.items() if key not in ("role", "content", "name")}
    if other:
        made.other = json.dumps(other, ensure_ascii=False)
    return made


def _content(value: Any, name: str) -> str:
    """The text of a string, or of a list of parts ``{"type": "text", "text": "..."}``; null is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    texts = [one.get("text", "") for one in parts if isinstance(one, dict) and one.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise Unheard(f"{name} must be a string or a list of text parts")
    return "".join(texts)


def arguments_of(words: Iterable[str]) -> dict[str, Any]:
    """Parse words such as ``enable_thinking=false``; a value that is not JSON is a string. Raises ValueError."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"{word}: expected NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
