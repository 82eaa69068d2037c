"""The registry of submitted generations: the live ones, and for a while, within bounds, those that are over."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import RequestExists, RequestLive, RequestUnknown
from services.engine.delivery.generation import Generation
from services.engine.scheduling.deadlines import Deadlines


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """What is kept of generations that are over.

    Each for ``ttl_s`` seconds unless it asked for less, ``count`` of them, and as many as ``memory`` bytes hold beside
    the live ones; the newest is kept in any case. The oldest go first.
    """

    ttl_s: float = 3600.0
    count: int = 1024
    memory: int = 64 << 20


class GenerationRegistry:
    """Generations by id. Owned by the asyncio loop; times are seconds of the injected clock.

    A live one is never forgotten: the engine's queue bounds those. Every call first forgets what has expired.
    """

    def __init__(self, retention: RegistryLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.retention = retention
        self.bytes = 0
        self._clock = clock
        self._known: dict[str, Generation] = {}
        self._over: OrderedDict[str, float] = OrderedDict()  # when those that are over ended, oldest first
        self._expiries = Deadlines()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, request_id: str) -> bool:
        self.expire()
        return request_id in self._known

    @property
    def retained(self) -> int:
        """How many that are over are kept."""
        return len(self._over)

    def open(
        self, request_id: str, fingerprint: bytes, seed: int, retention_s: float | None = None, samples: int = 1
    ) -> Generation:
        """Make a generation known, to be kept ``retention_s`` seconds when it is over. Raises RequestExists."""
        if request_id in self:
            raise RequestExists(f"a submitted generation has the id {request_id!r}", field="request_id")
        kept_s = self.retention.ttl_s if retention_s is None else min(retention_s, self.retention.ttl_s)
        generation = Generation(request_id, fingerprint, seed, kept_s, self._changed, samples)
        self._known[request_id] = generation
        self.bytes += generation.size
        return generation

    def find(self, request_id: str) -> Generation:
        """Raises RequestUnknown."""
        self.expire()
        generation = self._known.get(request_id)
        if generation is None:
            raise RequestUnknown(f"no submitted generation {request_id!r}", field="request_id")
        return generation

    def again(self, request_id: str, fingerprint: bytes) -> Generation | None:
        """The generation that was submitted with the same request before, if any. Raises RequestExists when another
        request was submitted under the id.
        """
        if request_id not in self:
            return None
        generation = self._known[request_id]
        if generation.fingerprint != fingerprint:
            raise RequestExists(
                f"the id {request_id!r} was submitted with another request; the same one may be sent again",
                field="request_id",
            )
        return generation

    def expires_in(self, generation: Generation) -> float | None:
        """In how many seconds it will be forgotten at the latest; None while it is live."""
        ended_at = self._over.get(generation.request_id)
        return None if ended_at is None else ended_at + generation.retention_s - self._clock()

    def delete(self, request_id: str) -> None:
        """Forget one that is over. Raises RequestUnknown, RequestLive."""
        generation = self.find(request_id)
        if not generation.over:
            raise RequestLive(f"{request_id!r} is {generation.state.name.lower()}; cancel it first", field="request_id")
        self._forget(request_id)

    def purge(self, older_than_s: float) -> int:
        """Forget those that ended at least so long ago; how many they were."""
        self.expire()
        before = self._clock() - older_than_s
        old = [name for name, ended_at in self._over.items() if ended_at <= before]
        for name in old:
            self._forget(name)
        return len(old)

    def expire(self) -> None:
        """Forget those whose time is up."""
        for name in self._expiries.take(self._clock()):
            self._forget(name)

    def _changed(self, generation: Generation, grown: int) -> None:
        self.bytes += grown
        if generation.refusal is not None:  # as though it had never been submitted
            self._forget(generation.request_id)
        elif generation.over:
            self._over[generation.request_id] = ended_at = self._clock()
            self._expiries.add(generation.request_id, ended_at + generation.retention_s)
        self.expire()
        while len(self._over) > 1 and (len(self._over) > self.retention.count or self.bytes > self.retention.memory):
            self._forget(next(iter(self._over)))

    def _forget(self, request_id: str) -> None:
        generation = self._known.pop(request_id)
        self.bytes -= generation.size
        self._over.pop(request_id, None)
        self._expiries.discard(request_id)
        generation.forget()
