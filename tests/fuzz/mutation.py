"""Mutations that preserve the form of an input, so that the code after its parser is reached.

JSON stays JSON and messages stay messages, but for those that are changed byte by byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from tests.fuzz.seeds import SESSION, TIME, methods, record, records

#: ``(data, most bytes) -> data``: what changes bytes.
Bytes = Callable[[bytes, int], bytes]
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 64, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 70), 10**400),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), "", "a", "\0", "\ud800", "F32", "BF16", "x" * 300),
    *([], {}, [[]], [0], [0, 8], [1 << 62, 1 << 62], {"": 0}, {"type": "x"}),
)
_NAMES = ("a", "b", "pool", "two", SESSION, "", "x" * 129)
_SERVICES = {"kvcache": (kvcache_pb2, "KvCacheService"), "engine": (engine_pb2, "EngineService")}


def mutated(target: str, data: bytes, most: int, seed: int, mutate: Bytes) -> bytes:
    """Another input of the target, of at most so many bytes; now and then just other bytes."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return mutate(data, most)
    try:
        if target in _SERVICES:
            changed = _messages(target, data, draw, mutate)
        elif target == "safetensors":
            length = int.from_bytes(data[:8], "little")
            header = _json(data[8 : 8 + length], draw)
            changed = len(header).to_bytes(8, "little") + header + data[8 + length :]
        elif target in ("config", "tokenizer"):
            parts = data.split(b"\0\0")
            at = draw.randrange(len(parts))
            parts[at] = _json(parts[at], draw)
            changed = b"\0\0".join(parts)
        else:
            return mutate(data, most)
    except (ValueError, RecursionError, DecodeError):
        return mutate(data, most)
    return changed if len(changed) <= most else mutate(data, most)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json(text: bytes, draw: random.Random) -> bytes:
    root = [json.loads(text)]
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                todo.append(node[key])
    node, key = draw.choice(places)
    what = draw.randrange(5)
    if what == 0 and node is not root:
        del node[key]
    elif what == 1 and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] += draw.choice((-1, 1, 8, -8))
    elif what == 2:
        other, place = draw.choice(places)
        node[key] = json.loads(json.dumps(other[place]))
    elif what == 3 and isinstance(node, dict):
        node[draw.choice(("", "x", *node))] = node[key]
    else:
        node[key] = draw.choice(_VALUES)
    return json.dumps(root[0]).encode()


# --- messages ---------------------------------------------------------------------------------------------------------


def _messages(target: str, data: bytes, draw: random.Random, mutate: Bytes) -> bytes:
    module, service = _SERVICES[target]
    names = methods(module, service)
    told = list(records(data)) or [(0, b"")]
    at = draw.randrange(len(told))
    number, payload = told[at]
    match draw.randrange(6):
        case 0:
            told.insert(draw.randrange(len(told) + 1), told[at])
        case 1 if len(told) > 1:
            del told[at]
        case 2:
            other = draw.randrange(len(told))
            told[at], told[other] = told[other], told[at]
        case 3:
            told[at] = (number, mutate(payload, 1 << 12))
        case 4 if target == "kvcache":
            told.insert(at, (TIME, bytes([draw.randrange(256)])))
        case _:
            if number != TIME:
                message = getattr(module, f"{names[number % len(names)]}Request").FromString(payload)
                _change(message, draw)
                told[at] = (number, message.SerializeToString())
    return b"".join(record(one, body[: (1 << 16) - 1]) for one, body in told)


def _change(message: Message, draw: random.Random) -> None:
    """Change one field of it, or of a message within."""
    fields: Any = message.DESCRIPTOR.fields
    if not fields:
        return
    field = draw.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.message_type is not None:
        inner = getattr(message, field.name)
        if not field.is_repeated:
            inner.SetInParent()
        else:
            inner = draw.choice(inner) if len(inner) and draw.random() < 0.8 else inner.add()
        _change(inner, draw)
    elif field.is_repeated:
        values = getattr(message, field.name)
        values.extend([_value(field, draw)] * draw.choice((1, 1, 1, 9)))
    elif draw.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, draw))


def _value(field: FieldDescriptor, draw: random.Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        name = draw.choice(_NAMES)
        return name.encode() if field.type == FieldDescriptor.TYPE_BYTES else name
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw.choice((0.0, 1.0, -1.0, 0.5, 1e30, float("inf"), float("nan")))
    bits = 64 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    signed = field.cpp_type in (
        *(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_ENUM),
    )
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice((0, 1, 2, 4, 99, -1))
    if signed:
        return draw.choice((0, 1, -1, 7, (1 << bits - 1) - 1, -(1 << bits - 1)))
    return draw.choice((0, 1, 2, 3, 4, 8, 9, 100, 4097, (1 << bits) - 1, 1 << bits - 1))
