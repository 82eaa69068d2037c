"""The queue of cached pages of which some are retained: see ``retention``."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from services.kvcache.eviction.hints import Claim
from services.kvcache.eviction.lru import PAUSE, Links, LruQueue
from services.kvcache.eviction.retention import Promise

#: Stale heap entries are removed when they outnumber the live ones by this many.
SLACK = 64


class _Entry(NamedTuple):
    """A retained page in its priority's heap. ``number`` increases: at equal expiry, the first cached goes first."""

    until: float
    number: int
    page: int
    priority: int


class RetainingQueue:
    """All cached pages of a pool: the unretained ones in a policy's queue, followed by the retained ones.

    At most ``most`` pages are retained. A further page displaces the lowest-ranked one, which returns to the policy; if
    it ranks below them all, it is not retained itself. Operations on retained pages are O(log n) amortised; for other
    pages the costs are the policy's, and nothing is stored.
    """

    def __init__(self, policy: LruQueue, links: Links, most: int) -> None:
        self.most = most
        self._policy = policy
        self._links = links
        self._now = -math.inf
        # No retained page expires before this.
        self._due = math.inf
        # Promises of pages outside the queue: held, or about to be pushed. Expired promises are ignored.
        self._promises: dict[int, Promise] = {}
        self._retained: dict[int, _Entry] = {}
        # By priority. An entry that is not its page's current entry in ``_retained`` is stale and skipped.
        self._heaps: dict[int, list[_Entry]] = {}
        self._entries = 0
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._policy) + len(self._retained)

    def __contains__(self, page: int) -> bool:
        return page in self._policy or page in self._retained

    def __iter__(self) -> Iterator[int]:
        """The unretained pages, oldest first; then the retained ones, in order of eviction."""
        yield from self._policy
        for entry in sorted(self._retained.values(), key=lambda entry: (entry.priority, entry)):
            yield entry.page

    @property
    def retained_count(self) -> int:
        """The number of retained pages in the queue."""
        return len(self._retained)

    @property
    def oldest(self) -> int | None:
        """The unretained page cached the longest ago."""
        return self._policy.oldest

    def since(self, page: int) -> float:
        """When an unretained page was cached or its retention ended, in seconds of the caller's clock."""
        return self._policy.since(page)

    def victim(self, *, retained: bool = True) -> int | None:
        """The next page to evict, which stays queued until then; None if there is none, or only retained ones and
        ``retained`` is False.
        """
        page = self._policy.victim()
        if page is None and retained and (lowest := self._lowest()) is not None:
            return lowest.page
        return page

    # --- transitions of pages ---

    def push(self, page: int, now: float) -> None:
        """Add a page as the newest; retained, if it has a promise. Raises ValueError if it is queued already."""
        if page in self._retained:
            raise ValueError(f"page {page} is queued already")
        promise = self._promises.pop(page, None)
        if promise is not None and promise.until > self._now and self._has_room(promise, now):
            self._policy.note_cached(page)
            self._retain(page, promise)
        else:
            self._policy.push(page, now)

    def discard(self, page: int) -> None:
        """Remove a page because of a hit. Its promise is kept.

        Raises ValueError if it is not queued.
        """
        entry = self._retained.pop(page, None)
        if entry is None:
            self._policy.discard(page)
            return
        self._promises.setdefault(page, Promise(entry.priority, entry.until))
        self._policy.note_returned(page)

    def discard_all(self, pages: Sequence[int]) -> None:
        """As `discard`, for each of these pages in order."""
        if not self._retained:
            self._policy.discard_all(pages)
            return
        for page in pages:
            self.discard(page)

    def evict(self, page: int) -> None:
        """Remove a page because it is evicted. Raises ValueError if it is not queued."""
        if self._retained.pop(page, None) is None:
            self._policy.evict(page)
        else:
            self._policy.note_evicted(page)

    def touch(self, page: int, now: float) -> None:
        """Make a queued page the newest; retained, if it has been promised that since it was queued."""
        self.discard(page)
        self.push(page, now)

    # --- promises ---

    @property
    def has_promises(self) -> bool:
        """Whether pages outside the queue may have promises."""
        return bool(self._promises)

    def has_promise(self, page: int) -> bool:
        """Whether a page outside the queue may have a promise."""
        return page in self._promises

    def promised(self, page: int) -> Promise | None:
        """A page's promise; None if it has none, or it has expired."""
        promise = self._promises.get(page)
        if promise is None and (entry := self._retained.get(page)) is not None:
            promise = Promise(entry.priority, entry.until)
        return promise if promise is not None and promise.until > self._now else None

    def promise(self, page: int, more: Promise | None) -> Promise | None:
        """Join ``more`` to a page's promise and return the result.

        A cached page must be touched afterwards.
        """
        has = self.promised(page)
        if more is None or has == more:
            return has
        joined = more if has is None else has.joined(more)
        if joined != has:
            self._promises[page] = joined
        return joined

    def forget(self, page: int) -> None:
        """Drop the promise of a page outside the queue, if it has one, and what callers said of its return."""
        self._promises.pop(page, None)
        self._policy.forget(page)

    def claim(self, page: int, claim: Claim | None) -> None:
        """See ``LruQueue``."""
        self._policy.claim(page, claim)

    @property
    def has_claims(self) -> bool:
        """See ``LruQueue``."""
        return self._policy.has_claims

    def pass_time(self, now: float, most: int = PAUSE) -> bool:
        """Advance the clock to ``now``: pages whose retention has expired return to the policy, continuations first.

        At most so many of them: when there are more, returns False, and the clock stays where it is until all of them
        have returned.
        """
        if now < self._due:
            self._now = now
            return True
        due = math.inf
        # A page's priority and expiry are at least those of its continuations, and among equals it was cached later.
        for priority in sorted(self._heaps):
            while (first := self._first(priority)) is not None and first.until <= now:
                if not most:
                    return False
                most -= 1
                del self._retained[first.page]
                self._policy.enter(first.page, now)
            if first is not None:
                due = min(due, first.until)
        self._now, self._due = now, due
        return True

    # --- the heaps ---

    def _first(self, priority: int) -> _Entry | None:
        """The first entry of a priority to be evicted; drops the heap if it has none."""
        heap = self._heaps[priority]
        while heap:
            if self._retained.get(heap[0].page) is heap[0]:
                return heap[0]
            heappop(heap)
            self._entries -= 1
        del self._heaps[priority]
        return None

    def _lowest(self) -> _Entry | None:
        while self._heaps:
            if (first := self._first(min(self._heaps))) is not None:
                return first
        return None

    def _has_room(self, promise: Promise, now: float) -> bool:
        """Whether a page with this promise may be retained; displaces a lower-ranked page if necessary."""
        if len(self._retained) < self.most:
            return True
        lowest = self._lowest()
        if lowest is None or (lowest.priority, lowest.until) > promise:
            return False
        # Among equals the newer page stays: in a sequence that ends, it is nearer to the start.
        del self._retained[lowest.page]
        self._policy.enter(lowest.page, now)
        return True

    def _retain(self, page: int, promise: Promise) -> None:
        self._numbers += 1
        entry = _Entry(promise.until, self._numbers, page, promise.priority)
        self._retained[page] = entry
        self._due = min(self._due, promise.until)
        heappush(self._heaps.setdefault(promise.priority, []), entry)
        self._entries += 1
        if self._entries > 2 * len(self._retained) + SLACK:
            self._heaps = {}
            for entry in self._retained.values():
                self._heaps.setdefault(entry.priority, []).append(entry)
            for heap in self._heaps.values():
                heapify(heap)
            self._entries = len(self._retained)

    def dismantle(self, most: int) -> bool:
        """Give up some of what is kept of retained pages, of a queue that is used no more; whether there was any."""
        some = list(islice(self._retained, most))
        for page in some:
            del self._retained[page]
        for heap in self._heaps.values():
            if heap:
                del heap[-most:]
                return True
        return bool(some)

    def check(self) -> Iterator[str]:
        """Every violation, see ``walk``."""
        return (said for said in self.walk() if said is not None)

    def walk(self) -> Iterator[str | None]:
        """Violations of the policy, the limit, the heaps, or the order of continuations; None now and then.

        The queue may change meanwhile: what is said of a page was seen in one look at it, and the heaps are of one
        moment.
        """
        yield from self._policy.walk()
        if len(self._retained) > self.most:
            yield f"{len(self._retained)} pages are retained, the limit is {self.most}"
        for page in range(self._policy.total):
            if page % PAUSE == 0:
                yield None
            entry = self._retained.get(page)
            if entry is not None and page in self._policy:
                yield f"page {page} is retained and in the policy's queue"
            if entry is not None and not self._now < entry.until:
                yield f"page {page} is retained and its time was over at {self._now}"
            if entry is not None and entry.until < self._due:
                yield f"the time of page {page} is over before {self._due}"
            if entry is not None or page in self._policy:
                if page in self._promises:
                    yield f"page {page} is queued and has a promise that it was not queued with"
                yield from self._check_continuation(page, entry)
        yield from self._walk_heaps()

    def _check_continuation(self, page: int, mine: _Entry | None) -> Iterator[str]:
        try:
            parent = self._links.parent(page)
        except KeyError:  # the index is inconsistent and reports that itself
            return
        if parent is None or self._links.has_standby(parent):
            return  # whose holder is about to end, perhaps, and touches the parent then
        its = self._retained.get(parent)
        if mine is None:
            early = parent in self._policy and self._policy.is_before(parent, page)
        elif its is None:
            early = parent in self._policy
        else:
            early = (its.priority, its) < (mine.priority, mine)
        if early:
            yield f"page {parent} would be given up before its continuation {page}"
        elif mine is not None and parent not in self:
            promise, least = self._promises.get(parent), Promise(mine.priority, mine.until)
            if promise is None or promise.joined(least) != promise:
                yield f"page {parent} is held and promised {promise}, its continuation {page} {least}"

    def _walk_heaps(self) -> Iterator[str | None]:
        heaps, numbers, entries = [(one, heap[:]) for one, heap in self._heaps.items()], self._numbers, self._entries
        size = sum(len(heap) for _, heap in heaps)
        if entries != size or entries > 2 * len(self._retained) + SLACK:
            yield f"the heaps have {size} entries, say {entries}"
        found = array("Q", [0]) * self._policy.total  # the number of a page's entry
        for priority, heap in heaps:
            while heap:  # from its end, so that not all of it goes at once
                if len(heap) % PAUSE == 0:
                    yield None
                entry = heap.pop()
                if heap and heap[(len(heap) - 1) // 2] > entry:
                    yield f"the heap of priority {priority} is none: page {entry.page} is above a lesser one"
                if entry.priority != priority:
                    yield f"the heap of priority {priority} has page {entry.page} of {entry.priority}"
                if self._retained.get(entry.page) is entry:
                    if found[entry.page] == entry.number:
                        yield f"page {entry.page} is in the heap of priority {priority} twice"
                    found[entry.page] = entry.number
        for page, number in enumerate(found):
            if page % PAUSE == 0:
                yield None
            mine = self._retained.get(page)  # those that were retained since have higher numbers
            if mine is not None and mine.number <= numbers and mine.number != number:
                yield f"page {page} is retained, and the heaps had it not"
