"""The tiers below one pool: the digests of its pages, and which of them go down; see ``pool.lower_tiers``."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from typing import Protocol

from services.common.errors import ServiceError
from services.kvcache.pool.budget import device_of
from services.kvcache.pool.lower_tiers import StoredLink
from services.kvcache.pool.pages.page_table import PageState
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import Work
from services.kvcache.tiers.digests import PageDigests, chain_digest, root_digest

#: Flags of a published page: an opening has matched it; the outer tier has it; it waits to be stored, or is on its way.
RETURNED, IN_OUTER, QUEUED = 1, 2, 4

#: Bytes that the daemon keeps of each page for the tiers below its pool.
TIERED_PAGE = 40

#: Seconds between two looks at whether the mover has let go of a pool's memory.
_LOOK_S = 0.02


class Below(Protocol):
    """What moves the pages of all pools."""

    key: bytes  # of the digests
    admits_all: bool

    def spill(self, lower: PoolTiers, page: int) -> None:
        """Store a page that is admitted."""

    def withdraw(self, digest: bytes) -> None:
        """Forget what was stored of a page."""

    def look(
        self, lower: PoolTiers, key: tuple[str, str], prompt: array[int], salt: str, wait_s: float | None, speed: float
    ) -> Work[ServiceError | None]:
        """See ``LowerTiers.look``."""

    def stop_fills(self, lower: PoolTiers) -> None:
        """End all fills of a pool."""

    def let_go(self, lower: PoolTiers) -> bool:
        """Whether nothing maps the memory of a pool that is closing; otherwise that comes nearer."""

    def is_mapped(self, memory: int) -> bool:
        """Whether jobs can use a memory."""

    def is_awaited(self, memory: int) -> bool:
        """Whether the mover is about to map a memory."""


class PoolTiers:
    """``memory`` is the mover's number for the pool's arena."""

    def __init__(self, tiers: Below, pool: Pool, memory: int) -> None:
        self.pool = pool
        self.memory = memory
        self.digests = PageDigests(pool.table.total)
        self.flags = bytearray(pool.table.total)
        self.filling: set[int] = set()
        self.moving = 0  # jobs that use the arena
        self.fill_bytes = 0  # charged for fills
        self.closed = False
        self.page_bytes, self.page_size = pool.layout.page_bytes, pool.page_size
        self.gpu = device_of(pool)
        self.pool_id = pool.id
        self._tiers = tiers
        suffix = "" if self.gpu is None else f"/gpu{self.gpu}"
        self._name = pool.id.removesuffix(suffix)
        self._gone = threading.Event()

    # --- what the pool says ---

    def published(self, page: int, parent: int | None, tokens: bytes, salt: str) -> None:
        """See ``LowerTiers``."""
        self.digests[page] = chain_digest(self.root(salt) if parent is None else self.digests[parent], tokens)
        self.flags[page] = 0

    def came_back(self, pages: list[int]) -> None:
        """See ``LowerTiers``."""
        flags = self.flags
        for page in pages:
            flags[page] |= RETURNED

    def cached(self, page: int) -> None:
        """See ``LowerTiers``."""
        if not self.closed and self.admits(page):
            self._tiers.spill(self, page)

    def withdrawn(self, page: int) -> None:
        """See ``LowerTiers``."""
        self._tiers.withdraw(self.digests[page])

    def look(
        self, session_id: str, sequence_id: str, prompt: array[int], salt: str, wait_s: float | None, speed: float
    ) -> Work[ServiceError | None]:
        """See ``LowerTiers``."""
        return self._tiers.look(self, (session_id, sequence_id), prompt, salt, wait_s, speed)

    def give_way(self) -> None:
        """See ``LowerTiers``."""
        self._tiers.stop_fills(self)

    def closing(self) -> Work[None]:
        """See ``LowerTiers``."""
        self.closed = True
        self.give_way()
        yield from self.pool.debts.paying()
        while not self._tiers.let_go(self):
            yield lambda: self._gone.wait(_LOOK_S)

    def charged(self) -> int:
        """See ``LowerTiers``."""
        return self.fill_bytes + TIERED_PAGE * self.pool.table.total

    def walk(self) -> Iterator[str]:
        """See ``LowerTiers``."""
        table = self.pool.table
        if len(self.filling) != table.filling_count:
            yield f"{table.filling_count} pages are filling, {len(self.filling)} are waited for"
        for page in self.filling:
            if table.state(page) != PageState.FILLING:
                yield f"page {page} is waited for and {table.state(page).name}"

    # --- what is known of its pages ---

    @property
    def is_mapped(self) -> bool:
        """Whether the mover can use the pool's memory."""
        return not self.closed and self._tiers.is_mapped(self.memory)

    @property
    def is_awaited(self) -> bool:
        """Whether the mover is about to map the pool's memory."""
        return not self.closed and self._tiers.is_awaited(self.memory)

    def root(self, salt: str) -> bytes:
        """The digest that first pages of a salt have as their parent's."""
        return root_digest(self._tiers.key, self._name, self.pool.layout, salt)

    def admits(self, page: int) -> bool:
        """Whether a published page is worth storing."""
        if self._tiers.admits_all or self.flags[page] & RETURNED:
            return True
        return self.pool.table.cached.promised(page) is not None

    def holds(self, page: int, generation: int) -> bool:
        """Whether the page is still of this generation, and what was published."""
        index = self.pool.index
        same = self.pool.table.generation(page) == generation and not self.closed
        return same and index.is_published(page) and not index.is_condemned(page)

    def is_queued(self, page: int) -> bool:
        """Whether a published page waits to be stored, or is being stored."""
        return bool(self.flags[page] & QUEUED)

    def set_queued(self, page: int, *, queued: bool) -> None:
        """A published page waits to be stored, or does not any more."""
        self.flags[page] = self.flags[page] | QUEUED if queued else self.flags[page] & ~QUEUED

    def content(self, page: int) -> StoredLink:
        """The link of a published page, with its tokens."""
        index = self.pool.index
        return StoredLink(index.link(page), index.tokens(page) or b"", index.salt(page))

    def parent_digest(self, page: int) -> bytes:
        """The digest of a published page's parent."""
        parent = self.pool.index.parent(page)
        if parent is not None:
            return self.digests[parent]
        return self.root(self.pool.index.salt(page) or "")
