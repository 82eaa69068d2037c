"""Reads a checkpoint's chat templates, and the special tokens that templates refer to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ModelInvalid
from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.header import GgufFile
from services.engine.checkpoint.gguf.vocabulary import unsaid_id
from services.engine.checkpoint.placeholders import HEAD_BYTES, refuse_placeholder

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_OLDER_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_BYTES = 1 << 20

#: Template names: the default, and the one for prompts with tools in models that have both.
DEFAULT, TOOL_USE = "default", "tool_use"

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: A token's name in templates -> its key in a GGUF file, without tokenizer.ggml. and _token_id.
_GGUF_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator"} | {
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


@dataclass(frozen=True, slots=True)
class ChatSource:
    """Templates by name, as found in ``file``; ``special`` maps the name of each special token to its text."""

    file: str
    templates: Mapping[str, str]
    special: Mapping[str, str]


def of_folder(folder: Path) -> ChatSource | None:
    """Read the templates of a Hugging Face folder, from ``chat_template.jinja`` or else ``tokenizer_config.json``.

    Returns None when it has none. Raises ``ModelInvalid`` naming the file and what is wrong with it.
    """
    config_file, template_file = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
    config = Fields.of(config_file) if config_file.exists() else Fields(config_file, {})
    if template_file.exists():
        file, templates = template_file, {DEFAULT: _read(template_file)}
    elif config.has("chat_template"):
        file, templates = config_file, _named(config)
    else:
        return None
    older_file = folder / _OLDER_TOKENS_FILE
    older = Fields.of(older_file) if older_file.exists() else Fields(older_file, {})
    special = {}
    for name in _TOKENS:
        keys = config if config.has(name) else older
        if (text := _text_of(keys, name)) is not None:
            special[name] = text
    return ChatSource(str(file), templates, special)


def of_gguf(file: GgufFile) -> ChatSource | None:
    """Read the templates of a GGUF file; None when it has none. Raises ``ModelInvalid`` naming the file and key."""
    keys = Fields(file.path, file.metadata)
    named = {DEFAULT: "tokenizer.chat_template", TOOL_USE: "tokenizer.chat_template.tool_use"}
    templates = {name: _template(keys, key) for name, key in named.items() if keys.has(key)}
    if DEFAULT not in templates:
        return None
    tokens = keys.values.get("tokenizer.ggml.tokens")
    special = {}
    for name, key in _GGUF_TOKENS.items():
        number = keys.values.get(f"tokenizer.ggml.{key}_token_id", unsaid_id(keys, key))
        if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
            special[name] = str(tokens[number])
    return ChatSource(f"{file.path}: {named[DEFAULT]}", templates, special)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelInvalid(f"{file} is larger than {MAX_TEMPLATE_BYTES} bytes")
        raw = file.read_bytes()
        refuse_placeholder(file, raw[:HEAD_BYTES])
        return raw.decode("utf-8")
    except OSError as error:
        raise ModelInvalid(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeError as error:
        raise ModelInvalid(f"{file} is not UTF-8") from error


def _named(config: Fields) -> dict[str, str]:
    """Reads a single template, or a list of named ones including ``default``."""
    value = config.values["chat_template"]
    if isinstance(value, str):
        return {DEFAULT: value}
    found: dict[str, str] = {}
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            found[entry["name"]] = entry["template"]
    if DEFAULT not in found:
        config.refuse("chat_template", f"it must be a string, or a list of named templates with one named {DEFAULT}")
    return {name: found[name] for name in (DEFAULT, TOOL_USE) if name in found}


def _template(keys: Fields, key: str) -> str:
    value = keys.values[key]
    if not isinstance(value, str) or len(value) > MAX_TEMPLATE_BYTES:
        keys.refuse(key, f"it must be a string of at most {MAX_TEMPLATE_BYTES} characters")
    return value


def _text_of(keys: Fields, name: str) -> str | None:
    """Reads a token given as a string, or as an object with the string as ``content``."""
    value: Any = keys.values.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        keys.refuse(name, "it must be a string, or an object with the string as content")
    return value
