"""A fill: pages of one prompt on their way from lower tiers into a pool."""

from __future__ import annotations

import math

from services.kvcache.pool.host_memory import entry_bytes, sequence_bytes
from services.kvcache.pool.sequence import Sequence
from services.kvcache.tiers.pool_tiers import PoolTiers

#: Bytes that the daemon keeps of a page that is to be fetched, its tokens apart.
PLANNED = 320


class Run:
    """How one tier has delivered to one fill."""

    __slots__ = ("begun", "bytes", "first", "last")

    def __init__(self, begun: float) -> None:
        self.begun = self.first = self.last = begun
        self.bytes = 0  # behind the first page

    def delivered(self, size: int, now: float) -> None:
        """A page has arrived."""
        if self.first == self.begun:
            self.first = now
        else:
            self.bytes += size
        self.last = now


class Fill(Sequence):
    """Belongs to a pool, and to no session. It holds the cached pages of the prompt and those that it has published
    behind them, so no parent is evicted meanwhile; when it ends they are cached.

    ``chunks`` and ``digests`` are of the pages behind the ``base`` cached ones. Of these, ``planned`` are fetched,
    ``ordered`` were begun with, the first ``head`` are published, and ``landed`` are filled and wait for those before
    them. Somebody waits for it until ``until``; only then does it evict other pages.
    """

    __slots__ = (
        "base",
        "begun",
        "charge",
        "chunks",
        "compute_s",
        "digests",
        "ended",
        "head",
        "landed",
        "lower",
        "ordered",
        "planned",
        "runs",
        "until",
        "waited",
    )

    def __init__(
        self, lower: PoolTiers, number: int, salt: str, base: int, chunks: list[bytes], digests: list[bytes], now: float
    ) -> None:
        super().__init__("", f"fill-{number}", salt, b"", now)
        self.lower = lower
        self.base = base
        self.chunks = chunks
        self.digests = digests
        self.planned = len(digests)
        self.ordered = self.head = 0
        self.landed: dict[int, tuple[int, bool]] = {}  # the page, and whether the outer tier has it
        self.runs: dict[str, Run] = {}
        self.waited = False
        self.until = math.inf
        self.begun = now
        self.compute_s = 0.0
        self.ended = False
        pages, size = base + len(chunks), lower.page_size
        self.charge = sequence_bytes(self.id, salt) + pages * entry_bytes(size) + len(chunks) * (PLANNED + 4 * size)
