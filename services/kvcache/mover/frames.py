"""Messages on a socket: a frame is its length (4 bytes, little-endian) and an array of messages in msgpack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from services.kvcache.mover.orders import Order, Reply

#: A frame that claims more is refused before it is read.
MOST_FRAME_BYTES: Final = 16 << 20
MOST_MESSAGES: Final = 4096

_LENGTH_BYTES = 4


class InvalidFrame(Exception):
    """Bytes that are no frame of these messages."""


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Annotated[list[Order], Meta(min_length=1, max_length=MOST_MESSAGES)])
_replies = msgspec.msgpack.Decoder(Annotated[list[Reply], Meta(min_length=1, max_length=MOST_MESSAGES)])


def encode(messages: Sequence[Order] | Sequence[Reply]) -> bytes:
    """One frame. Raises ValueError if there are none or too many, or if the frame would be too long."""
    if not 1 <= len(messages) <= MOST_MESSAGES:
        raise ValueError(f"{len(messages)} messages in a frame: from 1 to {MOST_MESSAGES}")
    body = _encoder.encode(messages)
    if len(body) > MOST_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes: at most {MOST_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that ``data`` completes. Raises InvalidFrame for one that is too long, or empty."""
        self._waiting += data
        while len(self._waiting) >= _LENGTH_BYTES:
            length = int.from_bytes(self._waiting[:_LENGTH_BYTES], "little")
            if not 1 <= length <= MOST_FRAME_BYTES:
                raise InvalidFrame(f"a frame of {length} bytes: from 1 to {MOST_FRAME_BYTES}")
            end = _LENGTH_BYTES + length
            if len(self._waiting) < end:
                return
            body = bytes(self._waiting[_LENGTH_BYTES:end])
            del self._waiting[:end]
            yield body


def orders(body: bytes) -> list[Order]:
    """What the daemon says in a frame. Raises InvalidFrame."""
    try:
        return _orders.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidFrame(str(error)) from error


def replies(body: bytes) -> list[Reply]:
    """What the mover says in a frame. Raises InvalidFrame."""
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidFrame(str(error)) from error
