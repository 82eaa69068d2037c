"""Quarantine for pages that a lost session may still write, and for pools whose memory it may still map.

An engine that lost its lease may still have a kernel in flight, and the daemon cannot unmap its memory. Its unfinished
pages wait here until its process is proven gone or the drain period is over; they never go straight to another
sequence. Until then the pool's memory is kept too: on a GPU, freeing memory that another process has mapped is
undefined behaviour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.kvcache.lease.sessions import Process
from services.kvcache.pool.pool import Pool

#: True: the process is alive. False: it is proven gone. None: it is not visible from here.
Aliveness = Callable[[Process], bool | None]


@dataclass(frozen=True, slots=True)
class _Batch:
    pool: Pool
    pages: list[int]
    process: Process | None
    until: float
    session_id: str


class Quarantine:
    """Batches of pages, each waiting for a process to be gone or for a point in time."""

    def __init__(self, alive: Aliveness) -> None:
        self._alive = alive
        self._batches: list[_Batch] = []

    def gone(self, process: Process | None) -> bool:
        """Whether a process is proven gone."""
        return process is not None and self._alive(process) is False

    def add(
        self,
        pool: Pool,
        pages: list[int],
        process: Process | None,
        until: float = math.inf,
        session_id: str = "",
        *,
        mapped: bool = False,
    ) -> None:
        """Keep quarantined pages until the process is gone or the clock reads ``until``.

        Without ``until``, the pages belong to a live session, which may write them until it ends; ``ended`` then sets
        the time. With ``mapped``, the batch keeps the pool's memory even if it has no pages, because the process may
        have it mapped.
        """
        if pages or mapped:
            self._batches.append(_Batch(pool, pages, process, until, session_id))

    def ended(self, session_id: str, until: float) -> None:
        """A session has ended: pages that it left while it was live wait until the clock reads ``until``."""
        self._batches = [
            replace(batch, until=until) if batch.session_id == session_id else batch for batch in self._batches
        ]

    def sweep(self, now: float) -> None:
        """Free pages that nothing can write any more."""
        waiting: list[_Batch] = []
        for batch in self._batches:
            if batch.until <= now or self.gone(batch.process):
                batch.pool.unquarantine(batch.pages)
            else:
                waiting.append(batch)
        self._batches = waiting

    def waits_for(self, pool: Pool) -> bool:
        """Whether a process may still map or write the pool's memory."""
        return any(batch.pool is pool for batch in self._batches)

    def pages(self, pool: Pool) -> list[int]:
        """The pages of a pool in quarantine."""
        return [page for batch in self._batches if batch.pool is pool for page in batch.pages]
