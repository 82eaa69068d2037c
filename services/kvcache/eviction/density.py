"""The order in which cached pages are evicted: least valuable first. Scans and loops do not flush it.

Pages are queued by level, how often their content came back, each queue in the order they were cached. ``ReuseModel``
says what a page of some level and age is worth; the victim is the worst of the queues' ends. Their old ends are where
value has run out. Their new ends matter in a loop over more than fits, where the page that was just used is the one
that comes back last, and keeping a part of the loop beats keeping none of it for long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from services.kvcache.eviction.lru import LruQueue
from services.kvcache.eviction.reuse import LEVELS, ReuseModel

_NONE = -1

#: The level of content that came back so many times, and more often.
_LEVEL = (0, 1, 2, 2, 3)

#: A page whose content was never cached, as far as is known.
_NEW = 0xFF

#: Evicted links whose returns are remembered, for each page of the pool: content that stays away four times as long
#: as it takes to cache the whole pool anew counts as new.
REMEMBERED = 4

#: How much less a queue's newest page must be worth than every queue's oldest, to go first: a difference that is not
#: an accident of the sample.
MARGIN = 0.9

#: Pages condemned at a time: neighbours, of about one value. At most a 256th of the pool, so that it makes no odds.
BATCH, BATCH_SHARE = 16, 1 / 256

#: Where a page is.
_OUT, _QUEUED, _CONDEMNED = 0, 1, 2


class Links(Protocol):
    """What the queue asks about pages that are cached. The prefix index answers."""

    def key(self, page: int) -> int:
        """The hash of the page's link."""

    def parent(self, page: int) -> int | None:
        """The page that lookups find for the link before the page's own; None for a first link."""


class DensityQueue(LruQueue):
    """Pages by the time they were cached, as in ``LruQueue``, with another choice of victim.

    Only a page without a cached continuation is a victim, by construction: each page counts its continuations in the
    queue, and one that has some is *condemned* instead, taken out of its level's queue and put aside. It becomes a
    victim when its last continuation leaves, and is as good as new when it is held before. A continuation that is
    held does not count: whoever holds it holds a page of every link before it (see ``prefix``). A page is condemned at
    most once in a stay, so everything is O(1), amortised. There is always a victim: the page cached longest ago has no
    continuation, those being cached before it.
    """

    def __init__(self, total: int, links: Links) -> None:
        super().__init__(total)
        self._links = links
        self._model = ReuseModel(total)
        self._clock = 0
        self._batch = max(1, min(BATCH, int(total * BATCH_SHARE)))
        self._cached_at = array("Q", bytes(8 * total))
        self._returns = bytearray([_NEW]) * total
        self._place = bytearray(total)
        self._parent = array("i", [_NONE]) * total
        self._continuations = array("i", bytes(4 * total))
        # One more set of links through the pages, for the queues by level and, behind them, the list of victims.
        self._before = array("i", [_NONE]) * total
        self._after = array("i", [_NONE]) * total
        self._ends = [[_NONE, _NONE] for _ in range(LEVELS + 1)]
        # Of an evicted link, 13 bits of its hash and 3 of its returns, where the hash says. Newer ones overwrite it.
        self._memory = array("H", bytes(2 * REMEMBERED * total))

    def returns(self, page: int) -> int:
        """How often the content of a queued page has come back, as far as is known; counted to 4."""
        return self._returns[page]

    def victim(self) -> int | None:
        """The next page to evict; it stays queued until it is. None when nothing is."""
        if not len(self):
            return None
        while (page := self._ends[LEVELS][0]) == _NONE:
            level, end = self._worst()
            for _ in range(self._batch):
                if (worst := self._ends[level][end]) != _NONE:
                    self._condemn(worst)
        return page

    def _worst(self) -> tuple[int, int]:
        """The queue, and which end of it (0 for the oldest), where the least valuable page is."""
        oldest, least, oldest_at = _NONE, float("inf"), 0
        newest, lowest = _NONE, float("inf")
        for level in range(LEVELS):
            old, new = self._ends[level]
            if old == _NONE:
                continue
            cached_at = self._cached_at[old]
            value = self._model.value(level, self._clock - cached_at)
            if value < least or (value == least and cached_at < oldest_at):
                oldest, least, oldest_at = level, value, cached_at
            value = self._model.value(level, self._clock - self._cached_at[new])
            if value < lowest:
                newest, lowest = level, value
        return (newest, 1) if lowest < least * MARGIN else (oldest, 0)

    def _condemn(self, page: int) -> None:
        self._unlink(page)
        self._place[page] = _CONDEMNED
        if not self._continuations[page]:
            self._link(page, LEVELS)

    def push(self, page: int, now: float) -> None:
        """Add as the newest. Raises ValueError when it is in the queue."""
        super().push(page, now)
        self.note_cached(page)
        self._rank(page)

    def enter(self, page: int, now: float) -> None:
        """Add, as the newest, a page that was cached already. Raises ValueError when it is in the queue."""
        super().push(page, now)
        self._clock += 1
        self._rank(page)

    def note_cached(self, page: int) -> None:
        """A stay begins."""
        self._clock += 1
        link = self._links.key(page)
        returns = self._recall(link) if self._returns[page] == _NEW else self._returns[page] + 1
        self._returns[page] = returns = min(returns, len(_LEVEL) - 1)
        self._model.began(link, _LEVEL[returns], self._clock)

    def _rank(self, page: int) -> None:
        """Place a page that is in the order by time, as the newest of its level."""
        parent = self._links.parent(page)
        self._cached_at[page] = self._clock
        if parent is not None:
            if self._place[parent] == _CONDEMNED and not self._continuations[parent]:
                # A sequence that had a copy of the parent ends with this page: the parent is no victim any more.
                self._unlink(parent)
            self._parent[page] = parent
            self._continuations[parent] += 1
        self._place[page] = _QUEUED
        self._link(page, _LEVEL[self._returns[page]])

    def discard(self, page: int) -> None:
        """Take out of the queue: its content was asked for. Raises ValueError when it is not in it."""
        self._remove(page)
        self.note_returned(page)

    def discard_all(self, pages: Sequence[int]) -> None:
        """As `discard`, of each of these pages in order."""
        for page in pages:
            self.discard(page)

    def note_returned(self, page: int) -> None:
        """A stay has ended in a hit."""
        self._model.returned(self._links.key(page), self._clock)

    def evict(self, page: int) -> None:
        """Take out of the queue: its content is given up. Raises ValueError when it is not in it."""
        self._remove(page)
        self.note_evicted(page)

    def note_evicted(self, page: int) -> None:
        """How often the content came back is remembered, for a while."""
        link = self._links.key(page)
        self._memory[link % len(self._memory)] = (link >> 48 & 0xFFF8) | self._returns[page]
        self._returns[page] = _NEW

    def _recall(self, link: int) -> int:
        """How often the content of a page that was not cached had come back, this time included."""
        told = self._memory[link % len(self._memory)]
        return (told & 7) + 1 if told and told & 0xFFF8 == link >> 48 & 0xFFF8 else 0

    def _remove(self, page: int) -> None:
        super().discard(page)
        if self._place[page] == _QUEUED or not self._continuations[page]:
            self._unlink(page)
        self._place[page] = _OUT
        parent = self._parent[page]
        if parent != _NONE:
            self._parent[page] = _NONE
            self._continuations[parent] -= 1
            if not self._continuations[parent] and self._place[parent] == _CONDEMNED:
                self._link(parent, LEVELS)

    def _level(self, page: int) -> int:
        return _LEVEL[self._returns[page]]

    def _list_of(self, page: int) -> list[int]:
        return self._ends[self._level(page) if self._place[page] == _QUEUED else LEVELS]

    def _link(self, page: int, at: int) -> None:
        """Append to a queue, or to the list of victims."""
        ends = self._ends[at]
        self._before[page], self._after[page] = ends[1], _NONE
        if ends[1] == _NONE:
            ends[0] = page
        else:
            self._after[ends[1]] = page
        ends[1] = page

    def _unlink(self, page: int) -> None:
        ends, before, after = self._list_of(page), self._before[page], self._after[page]
        if before == _NONE:
            ends[0] = after
        else:
            self._after[before] = after
        if after == _NONE:
            ends[1] = before
        else:
            self._before[after] = before

    def check(self) -> Iterator[str]:
        """Violations: those of the order by time, a wrong queue, a wrong count of continuations."""
        yield from super().check()
        count = [0] * len(self._parent)
        for page in self:
            try:
                parent = self._links.parent(page)
            except KeyError:  # the index is broken, and says so itself
                continue
            if self._parent[page] != (_NONE if parent is None else parent):
                yield f"page {page} is queued as the continuation of {self._parent[page]}, which is {parent}"
            elif parent is not None:
                count[parent] += 1
                if parent in self and self._cached_at[parent] <= self._cached_at[page]:
                    yield f"page {page} was cached before its continuation {parent}"
        if count != self._continuations.tolist():
            yield "the counts of continuations are wrong"
        expected: list[set[int]] = [set() for _ in self._ends]
        for page in self:
            if self._place[page] == _QUEUED:
                expected[self._level(page)].add(page)
            elif not count[page]:
                expected[LEVELS].add(page)
        for at, (oldest, newest) in enumerate(self._ends):
            seen, before, page = set[int](), _NONE, oldest
            while page != _NONE and self._before[page] == before and page not in seen:
                seen.add(page)
                before, page = page, self._after[page]
            if page != _NONE or before != newest or seen != expected[at]:
                yield f"queue {at} has pages {sorted(seen)}, expected {sorted(expected[at])}"
