"""Checksums of one pool's published pages: which are known, which are still to be taken, and which pages have changed.

A published page is never written again, so its bytes have one checksum until the page is given up. It is taken once,
off the daemon's loop, some time after the page was published. Whoever takes it has the page as (id, generation): by the
time it is there the page may be another's, and then it is worth nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable

from services.kvcache.pool.index.prefix_cache import PrefixCache
from services.kvcache.pool.pages.page_table import PageTable

Reference = tuple[int, int]


class Checksums:
    """Checksums of the pages of a table; 10 bytes a page, and 8 for one that waits. Every operation is O(1) a page.

    ``wake`` is called when a page waits and none did.
    """

    def __init__(self, table: PageTable, index: PrefixCache, wake: Callable[[], None]) -> None:
        self._table = table
        self._index = index
        self._wake = wake
        self._sums = array("Q", bytes(8 * table.total))
        self._known = bytearray(table.total)
        self._queued = bytearray(table.total)
        self._waiting: deque[int] = deque()
        #: Why no checksum of this pool can be taken; empty while they can.
        self.failure = ""
        self.verified_pages = 0
        self.corrupted_pages = 0  # included in verified_pages

    @property
    def waiting(self) -> int:
        """Pages that wait for their checksum; some may have been given up since."""
        return len(self._waiting)

    def published(self, page: int) -> None:
        """The page has been published: what was known of it is void, and it waits for its checksum."""
        self._known[page] = 0
        if not self._queued[page]:  # as `_enqueue`: part of every step
            self._queued[page] = 1
            self._waiting.append(page)
            if len(self._waiting) == 1:
                self._wake()

    def dismantle(self, most: int) -> bool:
        """Give up some of the pages that wait, of a pool that is used no more; whether there were any."""
        some = min(most, len(self._waiting))
        for _ in range(some):
            self._waiting.popleft()
        return some > 0

    def _enqueue(self, page: int) -> None:
        if not self._queued[page]:
            self._queued[page] = 1
            self._waiting.append(page)
            if len(self._waiting) == 1:
                self._wake()

    def due(self, most: int) -> list[Reference]:
        """The next published pages whose checksum is to be taken: at most so many, empty when there are none."""
        if self.failure:
            return []
        pages: list[int] = []
        while self._waiting and len(pages) < most:
            page = self._waiting.popleft()
            self._queued[page] = 0
            if self._index.is_published(page):
                pages.append(page)
        return [(page, self._table.generation(page)) for page in pages]

    def defer(self, pages: list[Reference]) -> None:
        """No checksums of these were taken: they are due again."""
        for page, _ in pages:
            self._enqueue(page)

    def learn(self, pages: list[Reference], checksums: list[int]) -> None:
        """Record checksums; those of pages given up meanwhile are ignored."""
        for (page, generation), checksum in zip(pages, checksums, strict=True):
            if self._is_published(page, generation):
                self._sums[page] = checksum
                self._known[page] = 1

    def verifiable(self, pages: Iterable[int]) -> list[Reference]:
        """Those of the pages that have a checksum, and were not found corrupted already."""
        if self.failure:
            return []
        index, generation = self._index, self._table.generation
        return [
            (page, generation(page))
            for page in pages
            if self._known[page] and index.is_published(page) and not index.is_condemned(page)
        ]

    def verify(self, pages: list[Reference], checksums: list[int]) -> list[int]:
        """Compare checksums taken now with those recorded; the pages that have changed, which are condemned then.

        Pages given up meanwhile are ignored. What is condemned is removed by ``purge``.
        """
        corrupted = []
        for (page, generation), checksum in zip(pages, checksums, strict=True):
            if not self._is_published(page, generation):
                continue
            self.verified_pages += 1
            if self._sums[page] != checksum and not self._index.is_condemned(page):
                self.corrupted_pages += 1
                self._index.condemn(page)
                corrupted.append(page)
        return corrupted

    def _is_published(self, page: int, generation: int) -> bool:
        return self._table.generation(page) == generation and self._index.is_published(page)
