"""Limits on a message by its method, checked on its bytes before any of it becomes an object.

A parsed message is larger than its bytes by what each field costs: an empty item of a list takes 2 bytes on the wire
and about a hundred in memory. So a method limits the bytes of its messages, and the fields in them: every tag on the
wire, nested messages included. Packed numbers are one field; 8 times their bytes is the most that they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

#: The most bytes of an engine's step call: `STEP_TOKENS` of three bytes each leave a MiB for the rest. The daemon's
#: loop reads a message without a pause: 30 ms for so many.
STEP_BYTES = 1 << 22

#: A message of at most so many bytes is not looked into: parsed, it takes a few MiB at worst.
SMALL = 1 << 16

#: As deep as the parser goes.
_DEPTH = 100

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5

#: The nested messages of a message, by the tag that they have on the wire.
_Nested = dict[int, Any]


@dataclass(frozen=True, slots=True)
class MessageLimit:
    """The most bytes that a method's requests may have, and the most fields."""

    size: int = 1 << 16
    fields: int = 1 << 16

    def why_refused(self, method: str, message: bytes, kind: type[Message] | None) -> str | None:
        """Why a message exceeds the limit; None if it does not. Reads ``fields`` fields at most, and none without a
        ``kind``.
        """
        if len(message) > self.size:
            return f"the message has {len(message)} bytes; {method} takes at most {self.size}"
        if len(message) <= SMALL or kind is None:
            return None
        try:
            count = count_fields(message, kind, self.fields)
        except ValueError as error:
            return f"the message cannot be parsed: {error}"
        if count > self.fields:
            return f"the message has more than {self.fields} fields, which is the limit of {method}"
        return None


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of a service's methods by name; ``others`` is that of those without one."""

    by_method: Mapping[str, MessageLimit]
    others: MessageLimit = MessageLimit()

    def of(self, method: str) -> MessageLimit:
        """The limit of a method."""
        return self.by_method.get(method, self.others)

    @property
    def size(self) -> int:
        """The most bytes that any method takes."""
        return max(limit.size for limit in (self.others, *self.by_method.values()))


def count_fields(message: bytes, kind: type[Message], most: int) -> int:
    """How many fields a message of this kind has on the wire, those of nested messages included.

    Counts to ``most + 1`` and no further. Raises ValueError for what is no message of proto3; not all of it is found.
    """
    nested, outer = _nested(kind.DESCRIPTOR), list[tuple[int, _Nested]]()
    at, end, count = 0, len(message), 0
    try:
        while True:
            if at >= end:
                if at > end:
                    raise ValueError("a field ends behind its message")
                if not outer:
                    return count
                end, nested = outer.pop()
                continue
            count += 1
            if count > most:
                return count
            tag, at = message[at], at + 1
            if tag > 0x7F:
                tag, at = _varint(message, at - 1)
            wire = tag & 7
            if wire == _DELIMITED:
                size, at = message[at], at + 1
                if size > 0x7F:
                    size, at = _varint(message, at - 1)
                if size > end - at:
                    raise ValueError("a field ends behind its message")
                inner = nested.get(tag)
                if inner is None:
                    at += size
                    continue
                outer.append((end, nested))
                if len(outer) > _DEPTH:
                    raise ValueError(f"messages are nested more than {_DEPTH} deep")
                end, nested = at + size, inner
            elif wire == _VARINT:
                _, at = _varint(message, at)
            elif wire == _FIXED64:
                at += 8
            elif wire == _FIXED32:
                at += 4
            else:
                # Groups are not in proto3. Reading over them here could differ from how the parser reads them.
                raise ValueError(f"wire type {wire}")
    except IndexError:
        raise ValueError("it ends within a field") from None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends. Raises IndexError or ValueError."""
    value = 0
    for place in range(10):
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte <= 0x7F:
            return value, at + place + 1
    raise ValueError("a number of more than 10 bytes")


_known: dict[str, _Nested] = {}


def _nested(kind: Any) -> _Nested:
    """The nested messages of a kind, which may nest itself."""
    found = _known.get(kind.full_name)
    if found is None:
        found = _known[kind.full_name] = {}
        for field in kind.fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
                found[field.number << 3 | _DELIMITED] = _nested(field.message_type)
    return found
