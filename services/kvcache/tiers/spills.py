"""Pages on their way to the lower tiers.

A page is stored while it is cached, ahead of its eviction: eviction waits for nothing. What is stored counts only if
the page is still of the generation, and published, when the copy is complete: a page that was granted to another
meanwhile is found by no lookup of any tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from services.kvcache.mover.orders import MOST_KEYS, Abandon, Chain, Commit, Forget, Read, ReadDone, Stored
from services.kvcache.tiers.counts import HOST, OUTER, MovedCounts
from services.kvcache.tiers.host.host_tier import Slot
from services.kvcache.tiers.host.slabs import Slabs
from services.kvcache.tiers.jobs import MoverJobs, Store
from services.kvcache.tiers.pool_tiers import IN_OUTER, PoolTiers

#: Pages that are read at a time, and what they may have together unless it is one.
MOST_MOVING, MOST_MOVING_BYTES = 64, 256 << 20

#: Deleted pages that are remembered.
_MOST_FORGOTTEN = 4096


class _Waiting(NamedTuple):
    lower: PoolTiers
    page: int
    generation: int


class Spills:
    """A queue of at most ``most`` pages. What finds it full is dropped, and may come again when it is cached again."""

    def __init__(self, most: int, jobs: MoverJobs, slabs: Slabs, counts: MovedCounts, wake: Callable[[], None]) -> None:
        """``wake`` is called when a page waits and none did."""
        self._most = most
        self._jobs = jobs
        self._slabs = slabs
        self._host = slabs.host
        self._counts = counts
        self._wake = wake
        self._queue: deque[_Waiting] = deque()
        self._storing: set[bytes] = set()
        self._moving_bytes = 0
        #: Digests of pages that have changed: to be deleted from the outer tier, and those that are being stored still.
        self._to_forget: dict[bytes, None] = {}
        self._spoiled: set[bytes] = set()
        self._forgotten: dict[bytes, None] = {}  # deletions that were sent, and nobody answers
        self._backlog: Iterator[_Waiting] = iter(())
        self._all_queued = True
        #: Called with the digest of each page that the outer tier has got.
        self.on_stored: Callable[[bytes], None] = lambda digest: None
        #: Whether the outer tier takes pages now.
        self.outer_up = False

    @property
    def queued(self) -> int:
        """Pages that wait."""
        return len(self._queue)

    @property
    def moving(self) -> int:
        """Pages that are being stored."""
        return len(self._storing)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to store, nor being stored."""
        return not self._queue and not self._storing and self._all_queued

    def add(self, lower: PoolTiers, page: int) -> None:
        """A page that is admitted is cached."""
        if lower.is_queued(page) or not self._wants(lower, page):
            return
        if len(self._queue) >= self._most:
            self._counts.dropped_pages += 1
            return
        lower.set_queued(page, queued=True)
        self._queue.append(_Waiting(lower, page, lower.pool.table.generation(page)))
        if len(self._queue) == 1:
            self._wake()

    def add_all(self, lowers: list[PoolTiers]) -> None:
        """Store every cached page that is admitted, however many, most recently used first: there is no later."""
        self._all_queued = False
        self._backlog = (
            _Waiting(lower, page, lower.pool.table.generation(page))
            for lower in lowers
            for page in reversed(list(lower.pool.table.cached))
            if not lower.is_queued(page) and lower.admits(page) and self._wants(lower, page)
        )
        self._wake()

    def _wants(self, lower: PoolTiers, page: int) -> bool:
        digest = lower.digests[page]
        return digest not in self._storing and (self._to_host(digest) or self._to_outer(lower, page))

    def _to_host(self, digest: bytes) -> bool:
        return self._host is not None and not self._host.holds(digest)

    def _to_outer(self, lower: PoolTiers, page: int) -> bool:
        return self.outer_up and not lower.flags[page] & IN_OUTER and lower.digests[page] not in self._to_forget

    def start(self, most: int) -> bool:
        """Have the mover read pages, at most so many; whether more can be."""
        self._forget()
        for _ in range(most):
            if len(self._storing) >= MOST_MOVING or (self._storing and self._moving_bytes >= MOST_MOVING_BYTES):
                return False
            if not self._queue:
                waiting = next(self._backlog, None)
                if waiting is None:
                    self._all_queued = True
                    return False
                self._queue.append(waiting)
                waiting.lower.set_queued(waiting.page, queued=True)
            if not self._start_next():
                return False
        return bool(self._queue) or not self._all_queued

    def _start_next(self) -> bool:
        """Whether the first in the queue has left it."""
        lower, page, generation = self._queue[0]
        if not lower.holds(page, generation):
            self._queue.popleft()
            return True
        if lower.is_awaited:
            return False
        digest, size = lower.digests[page], lower.page_bytes
        outer = self._to_outer(lower, page) and digest not in self._storing
        slot: Slot | None = None
        if self._to_host(digest) and digest not in self._storing and lower.is_mapped:
            slot = self._slabs.write(digest, lower, lower.content(page))
            if slot is None and self._slabs.growing(size, lower.gpu):
                return False  # there will be one soon
        if not lower.is_mapped or (slot is None and not outer):
            self._queue.popleft()
            lower.set_queued(page, queued=False)
            return True
        chain = Chain(digest, lower.parent_digest(page), lower.content(page).tokens) if outer else None
        job = Store(lower, page, generation, digest, slot, outer, size)

        def order(number: int) -> Read:
            if slot is None:
                return Read(number, lower.memory, page, outer=chain)
            return Read(number, lower.memory, page, slot.slab.memory, slot.number, chain, checksum=True)

        if not self._jobs.begin(job, order):
            if slot is not None and self._host is not None:
                self._host.abandon(slot)
            return False
        self._queue.popleft()
        lower.moving += 1
        self._storing.add(digest)
        self._moving_bytes += size
        return True

    def read(self, number: int, job: Store, reply: ReadDone) -> None:
        """The mover has read a page: what it read is of the page that was meant, or is forgotten."""
        same = reply.ok and job.lower.holds(job.page, job.generation)
        if job.slot is not None and self._host is not None:
            if same:
                slot = job.slot
                self._host.commit(slot, reply.checksum)
                counts = self._counts.tiers[HOST]
                counts.stored_pages += 1
                counts.stored_bytes += job.size
                counts.store_seconds.observe(reply.seconds)
            else:
                self._host.abandon(job.slot)
            job.slot = None
        if not reply.ok:
            self._counts.tiers[OUTER if job.outer else HOST].failed_pages += 1
        elif not same:
            self._counts.outdated_pages += 1
        if same and job.outer:
            self._jobs.send(Commit(number))
            return
        if reply.ok and job.outer:
            self._jobs.send(Abandon(number))
        self._end(number, job)

    def stored(self, number: int, job: Store, reply: Stored) -> None:
        """The outer tier has a page, or does not."""
        counts = self._counts.tiers[OUTER]
        if reply.ok:
            counts.stored_pages += 1
            counts.stored_bytes += reply.bytes
            counts.store_seconds.observe(reply.seconds)
            self.on_stored(job.digest)
            if job.digest not in self._spoiled:
                self._forgotten.pop(job.digest, None)
            if job.lower.holds(job.page, job.generation):
                job.lower.flags[job.page] |= IN_OUTER
            if self._host is not None and (slot := self._host.find(job.digest)) is not None:
                slot.outer = True
        else:
            counts.failed_pages += 1
        self._end(number, job)

    def lost(self, number: int, job: Store) -> None:
        """The mover is gone: nothing writes the slot any more."""
        if job.slot is not None and self._host is not None:
            self._host.abandon(job.slot)
            job.slot = None
        self._counts.lost_pages += 1
        self._end(number, job)

    def _end(self, number: int, job: Store) -> None:
        self._jobs.end(number)
        self._storing.discard(job.digest)
        if job.digest in self._spoiled:  # it may have been stored after it was deleted
            self._spoiled.discard(job.digest)
            self._to_forget[job.digest] = None
        self._moving_bytes -= job.size
        job.lower.moving -= 1
        if job.lower.pool.table.generation(job.page) == job.generation:
            job.lower.set_queued(job.page, queued=False)
        self._wake()

    def withdraw(self, digest: bytes) -> None:
        """A page with this digest was found changed: what was stored of it may have been read since."""
        if self._host is not None:
            self._host.forget_digest(digest)
        self._to_forget[digest] = None
        if digest in self._storing:
            self._spoiled.add(digest)
        self._forget()

    def _forget(self) -> None:
        """Delete from the outer tier what is to be forgotten, as far as the mover takes orders."""
        while self._to_forget:
            some = tuple(islice(self._to_forget, MOST_KEYS))
            if not self._jobs.send(Forget(some)):
                return
            for digest in some:
                del self._to_forget[digest]
                self._forgotten[digest] = None
            while len(self._forgotten) > _MOST_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]

    def is_spoiled(self, digest: bytes) -> bool:
        """Whether the outer tier may have wrong bytes of this page that are to be deleted: it is not fetched from
        there before it was stored again.
        """
        return digest in self._to_forget or digest in self._spoiled or digest in self._forgotten
