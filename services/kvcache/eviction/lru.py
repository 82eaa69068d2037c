"""LRU eviction: the least recently used cached page goes first."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from services.kvcache.eviction.hints import Claim

_NONE = -1

#: Pages that a walk looks at in one go.
PAUSE = 512


class Links(Protocol):
    """What a policy knows of the links of pages. ``PrefixCache`` is one."""

    def key(self, page: int) -> int:
        """The hash of the link of a published page."""

    def parent(self, page: int) -> int | None:
        """The page of the parent link; None for a first link."""

    def has_standby(self, page: int) -> bool:
        """Whether the link of a published page stays when the page goes, since a holder has another copy of it."""


class LruQueue:
    """An intrusive doubly linked list over page ids: two links, a time and a number per page, and no objects.

    All operations but ``check`` and iteration are O(1). When a sequence ends, its pages are pushed tail first, so among
    them each page is older than its predecessor in the sequence: evicting the oldest never orphans a cached
    continuation.
    """

    def __init__(self, total: int) -> None:
        self._older = array("i", [_NONE]) * total
        self._newer = array("i", [_NONE]) * total
        self._since = array("d", bytes(8 * total))
        self._member = bytearray(total)
        # A clock that ticks with every push, and what it was when a page was pushed: the order of the queue.
        self._clock = 0
        self._cached_at = array("Q", bytes(8 * total))
        self._oldest = self._newest = _NONE
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def total(self) -> int:
        """Pages that there are, queued or not."""
        return len(self._member)

    def is_before(self, page: int, other: int) -> bool:
        """Whether one of two queued pages is the older."""
        return self._cached_at[page] < self._cached_at[other]

    def __contains__(self, page: int) -> bool:
        return bool(self._member[page])

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        page = self._oldest
        while page != _NONE:
            yield page
            page = self._newer[page]

    @property
    def oldest(self) -> int | None:
        """The page cached the longest ago; None if the queue is empty."""
        return None if self._oldest == _NONE else self._oldest

    def victim(self) -> int | None:
        """The next page to evict, which stays queued until then; None if the queue is empty."""
        return self.oldest

    def since(self, page: int) -> float:
        """When the page was pushed, in seconds of the caller's clock."""
        return self._since[page]

    def push(self, page: int, now: float) -> None:
        """Add a page as the newest. Raises ValueError if it is queued already."""
        if self._member[page]:
            raise ValueError(f"page {page} is queued already")
        self._member[page] = 1
        self._since[page] = now
        self._clock = self._cached_at[page] = self._clock + 1
        self._older[page], self._newer[page] = self._newest, _NONE
        if self._newest == _NONE:
            self._oldest = page
        else:
            self._newer[self._newest] = page
        self._newest = page
        self._length += 1

    def discard(self, page: int) -> None:
        """Remove a page because of a hit. Raises ValueError if it is not queued."""
        self._take_out((page,))

    def discard_all(self, pages: Sequence[int]) -> None:
        """As `discard`, for each of these pages in order."""
        self._take_out(pages)

    def _take_out(self, pages: Sequence[int]) -> None:
        olders, newers, member = self._older, self._newer, self._member
        for page in pages:
            if not member[page]:
                raise ValueError(f"page {page} is not queued")
            member[page] = 0
            older, newer = olders[page], newers[page]
            if older == _NONE:
                self._oldest = newer
            else:
                newers[older] = newer
            if newer == _NONE:
                self._newest = older
            else:
                olders[newer] = older
            self._length -= 1

    def evict(self, page: int) -> None:
        """Remove a page because it is evicted. Raises ValueError if it is not queued."""
        self._take_out((page,))

    def enter(self, page: int, now: float) -> None:
        """Add an already cached page as the newest. Raises ValueError if it is queued already."""
        self.push(page, now)

    def note_cached(self, page: int) -> None:
        """A page was cached without entering the queue. This and the next two methods feed policies that learn."""

    def note_returned(self, page: int) -> None:
        """A cached page outside the queue was hit."""

    def note_evicted(self, page: int) -> None:
        """A cached page outside the queue is evicted."""

    def claim(self, page: int, claim: Claim | None) -> None:
        """A sequence that used the page has ended, and its caller said this of its return; before it is pushed."""

    @property
    def has_claims(self) -> bool:
        """Whether pages may have claims, which the end of a sequence without one would change."""
        return False

    def forget(self, page: int) -> None:
        """A page outside the queue has lost its content."""

    def touch(self, page: int, now: float) -> None:
        """Make a queued page the newest."""
        self.discard(page)
        self.push(page, now)

    def check(self) -> Iterator[str]:
        """Every violation, see ``walk``."""
        return (said for said in self.walk() if said is not None)

    def walk(self) -> Iterator[str | None]:
        """Violations: inconsistent links, a wrong length, pages out of order; None now and then.

        The queue may change meanwhile: what is said of a page was seen in one look at it, and the lengths are of one
        moment. Every page is linked with its neighbours and pushed after the older of them: so all pages are one chain.
        """
        members = self._member.count(1)
        if members != self._length or (self._oldest == _NONE) != (not members):
            yield f"eviction queue marks {members} pages, says {self._length}, the oldest is {self._oldest}"
        for page in range(self.total):
            if page % PAUSE == 0:
                yield None
            if self._member[page]:
                yield from self._check_place(page)

    def _check_place(self, page: int) -> Iterator[str]:
        older, newer = self._older[page], self._newer[page]
        # A link to a page that is not queued leads nowhere.
        before = self._oldest if older == _NONE else self._newer[older] if self._member[older] else _NONE
        behind = self._newest if newer == _NONE else self._older[newer] if self._member[newer] else _NONE
        if before != page or behind != page:
            yield f"eviction queue is broken at page {page}"
        elif older != _NONE and (not self.is_before(older, page) or self._since[older] > self._since[page]):
            yield f"page {page} is queued behind a newer one"
