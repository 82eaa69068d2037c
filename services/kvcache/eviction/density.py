"""Density eviction: the least valuable cached page goes first. Resists scans and loops, which flush an LRU cache.

Pages are queued by kind, which is how often their content was reused, and what callers say of when it comes back (see
``hints``); each queue is in caching order. ``ReuseModel`` gives the value of a page by kind and age, and the victim is
the least valuable page at the ends of the queues. At the old ends, pages have outlived their value. The new ends matter
for a loop over more than the cache holds: there the page just used is needed last, and keeping part of the loop beats
keeping none of it for long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from services.kvcache.eviction.hints import Claim, HintClasses
from services.kvcache.eviction.lru import PAUSE, Links, LruQueue
from services.kvcache.eviction.reuse import KINDS, LEVELS, ReuseModel

_NONE = -1

#: The level by number of reuses; the last entry is for that number or more.
_LEVEL = (0, 1, 2, 2, 3)

#: Marks a page whose content is not known to have been cached before.
_NEW = 0xFF

#: Evicted links whose reuse counts are remembered, per page of the pool: content that stays away four times as long as
#: it takes to refill the whole pool counts as new.
REMEMBERED = 4

#: A queue's newest page goes first only if it is worth less than this share of every queue's oldest, so that sampling
#: noise does not decide.
MARGIN = 0.9

#: Pages condemned at a time: neighbours of about the same value. At most 1/256 of the pool, which makes no difference.
BATCH, BATCH_SHARE = 16, 1 / 256

#: The places of a page.
_OUT, _QUEUED, _CONDEMNED = 0, 1, 2

_NOWHERE = 0xFF


class DensityQueue(LruQueue):
    """Pages in caching order, as in ``LruQueue``, with a different choice of victim.

    A victim never has a cached continuation, by construction: each page counts its continuations in the queue, and a
    page that has any is *condemned* instead: removed from its level's queue and set aside. It becomes a victim when its
    last continuation leaves; if it is held before that, it is no longer condemned. Held continuations do not count,
    because their holder also holds a page of every link before them (see ``prefix_cache``). A page is condemned at most
    once per stay, so every operation is O(1) amortised. There is always a victim: the page cached the longest ago has
    no continuation, since continuations are cached before it.
    """

    def __init__(self, total: int, links: Links) -> None:
        super().__init__(total)
        self._links = links
        self._model = ReuseModel(total)
        self._classes = HintClasses(total)
        self._batch = max(1, min(BATCH, int(total * BATCH_SHARE)))
        self._returns = bytearray([_NEW]) * total
        self._place = bytearray(total)
        self._parent = array("i", [_NONE]) * total
        self._continuations = array("i", bytes(4 * total))
        # A second set of links, for the queues by kind and, as the last of them, the list of victims.
        self._before = array("i", [_NONE]) * total
        self._after = array("i", [_NONE]) * total
        self._ends = [[_NONE, _NONE] for _ in range(KINDS + 1)]
        self._kind = bytearray(total)  # of a queued page, the queue it is in
        self._filled: dict[int, None] = {}  # kinds whose queues have pages
        # For evicted links, 13 bits of the hash and 3 bits of the reuse count, indexed by hash. Newer links overwrite.
        self._memory = array("H", bytes(2 * REMEMBERED * total))

    def returns(self, page: int) -> int:
        """How often the content of a queued page is known to have been reused; saturates at 4."""
        return self._returns[page]

    def victim(self) -> int | None:
        """The next page to evict, which stays queued until then; None if the queue is empty."""
        if not len(self):
            return None
        while (page := self._ends[KINDS][0]) == _NONE:
            kind, end = self._worst()
            for _ in range(self._batch):
                if (worst := self._ends[kind][end]) != _NONE:
                    self._condemn(worst)
        return page

    def _worst(self) -> tuple[int, int]:
        """The queue that has the least valuable page, and the end where it is (0 for the oldest)."""
        oldest, least, oldest_at = _NONE, float("inf"), 0
        newest, lowest = _NONE, float("inf")
        for kind in sorted(self._filled):
            old, new = self._ends[kind]
            cached_at = self._cached_at[old]
            value = self._model.value(kind, self._clock - cached_at)
            if value < least or (value == least and cached_at < oldest_at):
                oldest, least, oldest_at = kind, value, cached_at
            value = self._model.value(kind, self._clock - self._cached_at[new])
            if value < lowest:
                newest, lowest = kind, value
        return (newest, 1) if lowest < least * MARGIN else (oldest, 0)

    def _condemn(self, page: int) -> None:
        self._unlink(page)
        self._place[page] = _CONDEMNED
        if not self._continuations[page]:
            self._link(page, KINDS)

    def claim(self, page: int, claim: Claim | None) -> None:
        """Overrides."""
        self._classes.put(page, claim)

    @property
    def has_claims(self) -> bool:
        """Overrides."""
        return self._classes.used

    def push(self, page: int, now: float) -> None:
        """Add a page as the newest. Raises ValueError if it is queued already."""
        super().push(page, now)
        self._begin(page)
        self._rank(page)

    def enter(self, page: int, now: float) -> None:
        """Add an already cached page as the newest. Raises ValueError if it is queued already."""
        super().push(page, now)
        self._rank(page)

    def note_cached(self, page: int) -> None:
        """Begin a stay."""
        self._clock += 1
        self._begin(page)

    def _begin(self, page: int) -> None:
        link = self._links.key(page)
        returns = self._recall(link) if self._returns[page] == _NEW else self._returns[page] + 1
        self._returns[page] = returns = min(returns, len(_LEVEL) - 1)
        while self._classes.ended:
            self._model.forget(self._classes.ended.pop())
        self._model.began(link, self._kind_of(page), self._clock)

    def _rank(self, page: int) -> None:
        """Append a page, already in the caching order, to the queue of its kind."""
        parent = self._links.parent(page)
        if parent is not None:
            if self._place[parent] == _CONDEMNED and not self._continuations[parent]:
                # The sequence of this page held a stand-by of the parent and has ended: the parent is not a victim now.
                self._unlink(parent)
            self._parent[page] = parent
            self._continuations[parent] += 1
        self._place[page] = _QUEUED
        self._kind[page] = kind = self._kind_of(page)
        self._link(page, kind)

    def discard(self, page: int) -> None:
        """Remove a page because of a hit. Raises ValueError if it is not queued."""
        self._remove(page)
        self.note_returned(page)

    def discard_all(self, pages: Sequence[int]) -> None:
        """As `discard`, for each of these pages in order."""
        for page in pages:
            self.discard(page)

    def note_returned(self, page: int) -> None:
        """End a stay with a hit."""
        self._model.returned(self._links.key(page), self._clock)

    def evict(self, page: int) -> None:
        """Remove a page because it is evicted. Raises ValueError if it is not queued."""
        self._remove(page)
        self.note_evicted(page)

    def note_evicted(self, page: int) -> None:
        """Remember, for a while, how often the content was reused."""
        link = self._links.key(page)
        self._memory[link % len(self._memory)] = (link >> 48 & 0xFFF8) | self._returns[page]
        self._returns[page] = _NEW
        self._classes.forget(page)

    def forget(self, page: int) -> None:
        """Overrides."""
        self._classes.forget(page)

    def _recall(self, link: int) -> int:
        """How often the content of a page that was not cached has been reused, including this time; 0 if unknown."""
        entry = self._memory[link % len(self._memory)]
        return (entry & 7) + 1 if entry and entry & 0xFFF8 == link >> 48 & 0xFFF8 else 0

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
                self._link(parent, KINDS)

    def _kind_of(self, page: int) -> int:
        """The kind of a page that is about to be queued."""
        return self._classes.of(page) * LEVELS + _LEVEL[self._returns[page]]

    def _queue_of(self, page: int) -> int:
        return self._kind[page] if self._place[page] == _QUEUED else KINDS

    def _link(self, page: int, at: int) -> None:
        """Append to a queue, or to the list of victims."""
        ends = self._ends[at]
        self._before[page], self._after[page] = ends[1], _NONE
        if ends[1] == _NONE:
            ends[0] = page
            if at != KINDS:
                self._filled[at] = None
        else:
            self._after[ends[1]] = page
        ends[1] = page

    def _unlink(self, page: int) -> None:
        at, before, after = self._queue_of(page), self._before[page], self._after[page]
        ends = self._ends[at]
        if before == _NONE:
            ends[0] = after
        else:
            self._after[before] = after
        if after == _NONE:
            ends[1] = before
            if before == _NONE and at != KINDS:
                del self._filled[at]
        else:
            self._before[after] = before

    def walk(self) -> Iterator[str | None]:
        """Violations: those of the caching order, a wrong queue, a wrong count of continuations; None now and then.

        The queue may change meanwhile: what is said of a page was seen in one look at it, that of the counts and that
        of the queues by level are each of one moment.
        """
        yield from super().walk()
        for page in range(self.total):
            if page % PAUSE == 0:
                yield None
            if (self._place[page] != _OUT) != (page in self):
                yield f"page {page} is {'' if page in self else 'not '}queued and its place is {self._place[page]}"
            if page in self:
                yield from self._check_parent(page)
            if self._place[page] == _QUEUED and self._kind[page] % LEVELS != _LEVEL[self._returns[page]]:
                yield f"page {page} is queued at level {self._kind[page] % LEVELS}, and not by its reuses"
        yield from self._walk_counts()
        yield from self._walk_levels()
        yield from self._classes.walk()

    def _check_parent(self, page: int) -> Iterator[str]:
        try:
            parent = self._links.parent(page)
        except KeyError:  # the index is inconsistent and reports that itself
            return
        if self._parent[page] != (_NONE if parent is None else parent):
            yield f"page {page} is queued as the continuation of {self._parent[page]}, which is {parent}"
        elif parent is None or parent not in self or self._links.has_standby(parent):
            return
        elif self.is_before(parent, page):
            yield f"page {page} is queued behind its parent {parent}"

    def _walk_counts(self) -> Iterator[str | None]:
        parents, continuations = self._parent[:], self._continuations[:]
        yield None
        count = array("i", [0]) * len(parents)
        for at, parent in enumerate(parents):
            if at % PAUSE == 0:
                yield None
            if parent != _NONE:
                count[parent] += 1
        if count != continuations:
            yield "the counts of continuations are wrong"

    def _walk_levels(self) -> Iterator[str | None]:
        queue_of, expected = self._place[:], [0] * len(self._ends)
        kind, continuations, filled = self._kind[:], self._continuations[:], set(self._filled)
        before, after, ends = self._before[:], self._after[:], [list(pair) for pair in self._ends]
        for page, place in enumerate(queue_of):
            if page % PAUSE == 0:
                yield None
            if place == _QUEUED:
                queue_of[page] = kind[page]
            elif place == _CONDEMNED and not continuations[page]:
                queue_of[page] = KINDS
            else:
                queue_of[page] = _NOWHERE
                continue
            expected[queue_of[page]] += 1
        if filled != {kind for kind in range(KINDS) if expected[kind]}:
            yield f"the queues {sorted(filled)} are said to have pages"
        for at, (oldest, newest) in enumerate(ends):
            seen, last, page = 0, _NONE, oldest
            while page != _NONE and before[page] == last and queue_of[page] == at and seen <= expected[at]:
                seen, last, page = seen + 1, page, after[page]
                if seen % PAUSE == 0:
                    yield None
            if page != _NONE or last != newest or seen != expected[at]:
                yield f"queue {at} links {seen} pages up to {last}, expected {expected[at]} up to {newest}"
