"""Pages of lost sessions that nobody may have yet, and pools whose memory one may still have mapped.

An engine that lost its lease may still have a kernel in flight, and nothing can unmap it. Its unfinished pages wait
here until its process is proven gone or a drain period is over; they never go straight to another sequence. As long
the pool's memory stays too: freeing what another process has mapped is undefined on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.kvcache.lease.sessions import Process
from services.kvcache.pool.pool import Pool

#: True: the process lives. False: it is proven gone. None: it cannot be seen from here.
Aliveness = Callable[[Process], bool | None]


@dataclass(frozen=True, slots=True)
class _Batch:
    pool: Pool
    pages: list[int]
    process: Process | None
    until: float
    session_id: str


class Quarantine:
    """Batches of pages, each waiting for one process or one moment."""

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

        Without ``until`` they are of a session that lives on, and may write as long as it does: ``ended`` tells when.
        ``mapped``: the pool's memory is waited for even if no page is, because the process may have it mapped.
        """
        if pages or mapped:
            self._batches.append(_Batch(pool, pages, process, until, session_id))

    def ended(self, session_id: str, until: float) -> None:
        """A session is over: what it left behind while it lived waits until the clock reads ``until``."""
        self._batches = [
            replace(batch, until=until) if batch.session_id == session_id else batch for batch in self._batches
        ]

    def sweep(self, now: float) -> None:
        """Free what nothing can write any more."""
        waiting: list[_Batch] = []
        for batch in self._batches:
            if batch.until <= now or self.gone(batch.process):
                batch.pool.unquarantine(batch.pages)
            else:
                waiting.append(batch)
        self._batches = waiting

    def waits_for(self, pool: Pool) -> bool:
        """Whether something may still be mapping or writing the pool's memory."""
        return any(batch.pool is pool for batch in self._batches)

    def pages(self, pool: Pool) -> list[int]:
        """The pages of a pool that wait here."""
        return [page for batch in self._batches if batch.pool is pool for page in batch.pages]
