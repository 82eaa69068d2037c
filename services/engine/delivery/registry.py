"""The registry of submitted generations: live ones, and finished ones until they expire or are evicted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import RequestExists, RequestLive, RequestUnknown
from services.engine.delivery.generation import Generation
from services.engine.scheduling.queue.deadlines import Deadlines


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Limits on finished generations.

    Each is kept for ``ttl_s`` seconds, or less if its request says so. At most ``count`` are kept, and at most
    ``memory`` bytes including live ones. The oldest are evicted first; the newest is always kept.
    """

    ttl_s: float = 3600.0
    count: int = 1024
    memory: int = 64 << 20


class GenerationRegistry:
    """Generations by id. Owned by the asyncio loop; times are seconds of the injected clock.

    Live ones are never dropped: the engine's queue bounds them. Every call first drops expired ones.
    """

    def __init__(self, retention: RegistryLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.retention = retention
        self.bytes = 0
        self._clock = clock
        self._known: dict[str, Generation] = {}
        self._over: OrderedDict[str, float] = OrderedDict()  # end time of finished ones, oldest first
        self._expiries = Deadlines()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, request_id: str) -> bool:
        self.expire()
        return request_id in self._known

    @property
    def retained(self) -> int:
        """The number of finished generations kept."""
        return len(self._over)

    def open(
        self,
        request_id: str,
        fingerprint: bytes,
        seed: int,
        retention_s: float | None = None,
        samples: int = 1,
        owner: str = "",
    ) -> Generation:
        """Register a generation of ``owner``, to be kept for ``retention_s`` seconds after it ends. Raises
        RequestExists.
        """
        if request_id in self:
            raise RequestExists(f"a submitted generation has the id {request_id!r}", field="request_id")
        kept_s = self.retention.ttl_s if retention_s is None else min(retention_s, self.retention.ttl_s)
        generation = Generation(request_id, fingerprint, seed, kept_s, self._changed, samples, owner)
        self._known[request_id] = generation
        self.bytes += generation.size
        return generation

    def get(self, request_id: str, by: str | None = None) -> Generation | None:
        """Returns a generation; None if there is none that is ``by``'s, or with None anybody's."""
        self.expire()
        generation = self._known.get(request_id)
        return generation if generation is not None and by in (None, generation.owner) else None

    def find(self, request_id: str, by: str | None = None) -> Generation:
        """Returns a generation. Raises RequestUnknown, also for one that is not ``by``'s; None is everybody."""
        generation = self.get(request_id, by)
        if generation is None:
            raise RequestUnknown(f"no submitted generation {request_id!r}", field="request_id")
        return generation

    def again(self, request_id: str, fingerprint: bytes, owner: str = "") -> Generation | None:
        """Returns the generation that was submitted with this id and the same request, None if the id is unused.
        Raises RequestExists when the id was used for a different request, or by another owner.
        """
        if request_id not in self:
            return None
        generation = self._known[request_id]
        if (generation.fingerprint, generation.owner) != (fingerprint, owner):
            raise RequestExists(
                f"the id {request_id!r} was already used for a different request",
                field="request_id",
            )
        return generation

    def expires_in(self, generation: Generation) -> float | None:
        """Returns the seconds until it expires; None while it is live. It may be evicted earlier."""
        ended_at = self._over.get(generation.request_id)
        return None if ended_at is None else ended_at + generation.retention_s - self._clock()

    def delete(self, request_id: str) -> None:
        """Drop a finished generation. Raises RequestUnknown, RequestLive."""
        generation = self.find(request_id)
        if not generation.over:
            raise RequestLive(f"{request_id!r} is {generation.state.name.lower()}; cancel it first", field="request_id")
        self._forget(request_id)

    def purge(self, older_than_s: float, by: str | None = None) -> int:
        """Drop the generations that ended at least ``older_than_s`` seconds ago, only ``by``'s unless that is None.
        Returns how many there were.
        """
        self.expire()
        before = self._clock() - older_than_s
        old = [
            name
            for name, ended_at in self._over.items()
            if ended_at <= before and by in (None, self._known[name].owner)
        ]
        for name in old:
            self._forget(name)
        return len(old)

    def expire(self) -> None:
        """Drop expired generations."""
        for name in self._expiries.take(self._clock()):
            self._forget(name)

    def _changed(self, generation: Generation, grown: int) -> None:
        self.bytes += grown
        if generation.refusal is not None:  # a refused submission leaves no trace
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
