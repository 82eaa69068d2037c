"""A reader of KV events that decodes them with vLLM's own classes: run by vLLM's Python, commands and answers as lines
of JSON.

``{"publisher", "replay"}`` connects, once the process says ``ready``. ``read``, a message's number: reads to it, asks
for a replay of what it misses, and answers with the blocks by topic and the counts of resets and replays. ``miss``:
loses the next message. ``collect``: answers with the events of another vLLM's stream that come within so many seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.kvcache.kvevents.reader import Reader

DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)
KINDS = (BlockStored, BlockRemoved, AllBlocksCleared)
LIMIT_S = 60.0


class Decoder:
    """vLLM's, which counts the events of each of vLLM's classes that it has made."""

    def __init__(self) -> None:
        self.counts = {kind.__name__: 0 for kind in KINDS}

    def decode(self, data: bytes) -> KVEventBatch:
        batch = DECODER.decode(data)
        for event in batch.events:
            assert type(event) in KINDS
            self.counts[type(event).__name__] += 1
        return batch


def read(reader: Reader, number: int) -> None:
    """Read to that message; what it has not learned by then it missed."""
    until = time.monotonic() + LIMIT_S
    while True:
        while reader.read(0.02):
            pass
        if number < 0 or reader.last == number:
            return
        if not reader.read(0.2):
            reader.catch_up()
        assert time.monotonic() < until, f"read to {reader.last}, not to {number}"


def collect(news: Any, seconds: float) -> list[dict[str, Any]]:
    """Events as they come, by the fields of vLLM's classes."""
    found, until = [], time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if news.poll(round(1000 * left)):
            batch = DECODER.decode(news.recv_multipart()[2])
            found += [{"kind": type(event).__name__, **msgspec.to_builtins(event)} for event in batch.events]
    return found


def main() -> None:
    """Serve commands until the input ends."""
    decoder = Decoder()
    reader: Reader | None = None
    news = zmq.Context().socket(zmq.SUB)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if "publisher" in command:
            reader = Reader(command["publisher"], command["replay"], decoder=decoder)
        elif "engine" in command:
            news.setsockopt(zmq.SUBSCRIBE, b"")
            news.connect(command["engine"])
        elif "collect" in command:
            answer["events"] = collect(news, command["collect"])
        elif reader is not None and "read" in command:
            read(reader, command["read"])
            answer = {"resets": reader.resets, "replays": reader.replays, "counts": decoder.counts}
            answer["blocks"] = {topic: sorted(blocks.items()) for topic, blocks in reader.blocks.items() if blocks}
        elif reader is not None and "miss" in command:
            answer["missed"] = reader.miss()
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
