"""MessagePack as the metadata of AMD's code objects has it: maps, arrays, strings, whole numbers, booleans, nil."""

from __future__ import annotations

import struct
from typing import Any

_NUMBERS = {
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_LENGTHS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def read(data: bytes) -> Any:
    """Return the value that ``data`` begins with; ValueError for a type that is none of the above."""
    return _value(data, 0)[0]


def _value(data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    at += 1
    if kind < 0x80:
        return kind, at
    if kind >= 0xE0:
        return kind - 0x100, at
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    if kind in _NUMBERS:
        form = _NUMBERS[kind]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if kind in _LENGTHS:
        form = _LENGTHS[kind]
        count, at = struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    elif kind < 0xC0:
        count = kind & (0x1F if kind >= 0xA0 else 0x0F)
    else:
        raise ValueError(f"MessagePack: type 0x{kind:02x}")
    if 0xA0 <= kind < 0xC0 or kind in (0xD9, 0xDA, 0xDB):
        return data[at : at + count].decode(), at + count
    if 0x90 <= kind < 0xA0 or kind in (0xDC, 0xDD):
        items = []
        for _ in range(count):
            item, at = _value(data, at)
            items.append(item)
        return items, at
    pairs = {}
    for _ in range(count):
        key, at = _value(data, at)
        pairs[key], at = _value(data, at)
    return pairs, at
