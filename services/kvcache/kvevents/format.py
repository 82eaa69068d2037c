"""vLLM's KV events as they are on the wire: topics, and batches of events in msgpack.

A message has three frames: the topic, the number (8 bytes, big-endian) and a batch, ``[seconds, [events], rank]``.
Since vLLM 0.25 an event is a map with its name under ``type``; before, it was an array that began with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MAP, ARRAY = "map", "array"
FORMATS = (MAP, ARRAY)

#: ``number`` of the message that ends a replay.
END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks of one chain that are cached now; ``extra_keys`` has an entry for each, None without salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that are not cached any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

_encoder = msgspec.msgpack.Encoder()


def encode(events: Sequence[KvEvent], seconds: float, form: str) -> bytes:
    """A batch. ``seconds`` since 1970; ``form`` is one of `FORMATS`."""
    body: Sequence[Any] = events if form == MAP else [_as_array(event) for event in events]
    return _encoder.encode([seconds, body, None])


def _as_array(event: KvEvent) -> list[Any]:
    return [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]


def topic(engine: str, model: str) -> str:
    """The topic of an engine's blocks. Readers split it at each ``@``, so no name may have one."""
    return f"kv@{_plain(engine)}@{_plain(model)}"


def _plain(name: str) -> str:
    return name.replace("@", "_")
