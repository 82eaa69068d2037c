"""A reader of KV events that keeps a map by engine, as routers do. The structs are written from vLLM's format."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

#: A block: its parent's hash, None for a first one; its tokens; what it is salted with.
Block = tuple[int | None, tuple[int, ...], str]


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class OldRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class OldCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class Received:
    topic: str
    number: int
    batch: bytes


class Reader:
    """Follows the numbers as llm-d's router does: a gap is asked for again, and a number that goes back means that all
    is forgotten and asked for from 0. ``blocks`` are by topic; a replay must be complete and in order. ``decoder``
    makes a batch of bytes, if not that of these structs.
    """

    def __init__(
        self, address: str, replay: str, *, topics: str = "kv@", form: str = "map", decoder: Any = None
    ) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._replay = replay
        self._decode = decoder or msgspec.msgpack.Decoder(Batch if form == "map" else OldBatch)
        self.blocks: dict[str, dict[int, Block]] = {}
        self.last: int | None = None
        self._live: int | None = None  # the last that came of itself
        self.resets = self.replays = 0
        self.media: set[str | None] = set()
        self._news = self._context.socket(zmq.SUB)
        self._news.setsockopt_string(zmq.SUBSCRIBE, topics)
        self._news.connect(f"tcp://{address}")

    def close(self) -> None:
        self._news.close(linger=0)
        self._context.term()

    def read(self, seconds: float) -> bool:
        """Read what comes within a time; whether anything did."""
        if not self._news.poll(round(1000 * seconds)):
            return False
        topic, number, batch = self._news.recv_multipart()
        self.take(Received(topic.decode(), int.from_bytes(number, "big"), batch))
        return True

    def miss(self) -> bool:
        """Lose a message, if there is one."""
        if not self._news.poll(0):
            return False
        self._news.recv_multipart()
        return True

    def take(self, message: Received) -> None:
        if self._live is not None and message.number < self._live:
            self.resets += 1
            self.blocks.clear()
            self.last = None
        self._live = message.number
        if self.last is not None and message.number <= self.last:
            return  # a replay was ahead of it
        if message.number > (0 if self.last is None else self.last + 1):
            self.catch_up()
        if message.number == (0 if self.last is None else self.last + 1):
            self._apply(message)
        elif self.last is None or message.number > self.last:
            self.blocks.clear()  # the numbers have begun again meanwhile: it will see them go back
            self.last = None

    def catch_up(self) -> None:
        """Ask for what follows the last message."""
        start = 0 if self.last is None else self.last + 1
        for message in self.replayed(start):
            assert message.number == start, "a replay with a hole"
            self._apply(message)
            start += 1
        self.replays += 1

    def replayed(self, start: int, seconds: float = 60) -> list[Received]:
        """The answer to a replay request."""
        found: list[Received] = []
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{self._replay}")
        try:
            dealer.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                assert dealer.poll(round(1000 * seconds)), "no end of the replay"
                empty, topic, number, batch = dealer.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert topic == batch == b""
                    return found
                found.append(Received(topic.decode(), int.from_bytes(number, "big"), batch))
        finally:
            dealer.close(linger=0)

    def _apply(self, message: Received) -> None:
        batch: Any = self._decode.decode(message.batch)
        assert abs(time.time() - batch.ts) < 600 and batch.data_parallel_rank is None
        for event in batch.events:
            blocks = self.blocks.setdefault(message.topic, {})
            kind = type(event).__name__.replace("Old", "Block")
            if kind == "BlockStored":
                self._store(blocks, event)
            elif kind == "BlockRemoved":
                for block in event.block_hashes:
                    blocks.pop(block, None)  # one that was gone before anybody could say what it held
            else:
                assert kind in ("AllBlocksCleared", "BlockCleared"), kind
                blocks.clear()
        self.last = message.number

    def _store(self, blocks: dict[int, Block], event: Any) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes) > 0
        assert parent is None or parent in blocks, "behind a block that is not there"
        assert event.lora_id is None and event.lora_name is None
        self.media.add(event.medium)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes)
        for at, (block, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            assert block not in blocks, "stored twice"
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            blocks[block] = (parent, tokens, key[0] if key else "")
            parent = block
