"""Pages that still have what their last holder wrote, and are zeroed before they are granted to anyone else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice


class UncleanPages:
    """Free pages that are to be zeroed, or are being zeroed, and granted ones that were not zeroed in time.

    No grant of a page is answered before it is zero: ``KvCacheServicer`` sees to that. ``wake`` is called when a page
    waits and none did. Every operation is O(1).
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[int, None] = {}
        self._in_work: dict[int, None] = {}
        #: Granted before they were zeroed, in that order.
        self.granted: dict[int, None] = {}
        self.zeroed_pages = 0

    @property
    def free_count(self) -> int:
        """Free pages among them."""
        return len(self._waiting) + len(self._in_work)

    @property
    def is_due(self) -> bool:
        """Whether pages wait to be zeroed."""
        return bool(self._waiting or self.granted)

    def listed(self, page: int) -> int:
        """How often a page is listed as a free one among them."""
        return (page in self._waiting) + (page in self._in_work)

    def dismantle(self, most: int) -> bool:
        """Give up some of the pages that wait, of a pool that is used no more; whether there were any."""
        some = min(most, len(self._waiting))
        for _ in range(some):
            self._waiting.popitem()
        return some > 0

    def add(self, page: int) -> None:
        """A page has become free."""
        self.granted.pop(page, None)
        self._waiting[page] = None
        if len(self._waiting) == 1:
            self._wake()

    def take(self) -> int:
        """Grant one of the free pages. Raises KeyError if there is none."""
        page, _ = (self._waiting or self._in_work).popitem()
        self.granted[page] = None
        return page

    def forget(self, page: int) -> None:
        """The grant of a page will never be answered: it is zeroed once it is free."""
        self.granted.pop(page, None)

    def next(self, most: int) -> list[int]:
        """The next pages to zero: granted ones first, then free ones, which are then being zeroed."""
        pages = list(islice(self.granted, most))
        while self._waiting and len(pages) < most:
            page, _ = self._waiting.popitem()
            self._in_work[page] = None
            pages.append(page)
        return pages

    def zeroed(self, page: int, *, same: bool) -> bool:
        """A page has been zeroed. Returns whether it is free and clean now, and no longer among these.

        Unless it is the ``same`` as then, it has been given up meanwhile, perhaps by somebody who was told of it.
        """
        free = page in self._in_work
        self._in_work.pop(page, None)
        if free or (same and page in self.granted):
            self.zeroed_pages += 1
        if same:
            self.granted.pop(page, None)
        return free

    def defer(self, pages: list[int]) -> None:
        """These were not zeroed: those that are still free wait again."""
        for page in pages:
            if page in self._in_work:
                del self._in_work[page]
                self.add(page)
