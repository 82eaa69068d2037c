"""A reader of a daemon's events that keeps a map of what is cached."""

from __future__ import annotations

import threading

import grpc

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc


class Watcher(threading.Thread):
    """``known`` are the hashes cached in one pool; ``error`` is what it failed with."""

    def __init__(self, channel: grpc.Channel, pool_id: str) -> None:
        super().__init__(name="watcher", daemon=True)
        self.known: set[int] = set()
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._number = 0
        self._stream = kvcache_pb2_grpc.KvCacheServiceStub(channel).WatchEvents(pb.WatchEventsRequest(pool_id=pool_id))

    def run(self) -> None:
        try:
            for answer in self._stream:
                with self._changed:
                    self._take_in(answer)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _take_in(self, answer: pb.WatchEventsResponse) -> None:
        kind = answer.WhichOneof("event")
        if kind == "reset":
            self.known.clear()
        elif kind == "stored":
            assert self.known.isdisjoint(answer.stored.hashes), "stored twice"
            self.known.update(answer.stored.hashes)
        else:
            gone = set(getattr(answer, kind).hashes)
            assert gone <= self.known, "gone, and was never stored"
            self.known -= gone
        self._number = answer.sequence_number

    def read_to(self, number: int, seconds: float) -> set[int]:
        """What is cached once everything up to an event was read."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.error or self._number >= number, seconds), "no events"
            assert self.error is None, self.error
            return set(self.known)

    def close(self) -> None:
        self._stream.cancel()
