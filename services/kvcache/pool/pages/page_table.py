"""The page table: the state and the holders of each page.

    FREE --take--> HELD --cache--> CACHED --hold--> HELD
                   HELD --free---> FREE   <--free-- CACHED
                   HELD --quarantine--> QUARANTINED --free--> FREE
    FREE --fill--> FILLING --filled--> HELD                   FILLING --free--> FREE

A page is HELD exactly while it has holders; the set of holders is its reference count. The caller that drops the last
holder moves the page to its next state in the same transaction, so no page is between states when a transaction ends.
A page is FILLING while its bytes come from a lower tier: nobody holds it, and no lookup finds it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from services.kvcache.eviction.lru import PAUSE
from services.kvcache.eviction.retaining_queue import RetainingQueue
from services.kvcache.pool.host_memory import BLOCK, HOLDER, SHARED, HostMemory, is_sparse
from services.kvcache.pool.pages.unclean import UncleanPages


class PageState(enum.IntEnum):
    """The state of a page."""

    FREE = 0
    HELD = 1
    CACHED = 2
    QUARANTINED = 3
    FILLING = 4


# Plain integers: looking up an enum member costs more than everything else done to a page.
_FREE, _HELD, _CACHED = int(PageState.FREE), int(PageState.HELD), int(PageState.CACHED)
_FILLING = int(PageState.FILLING)


class PageTable:
    """States, holders and generations of ``total`` pages, ids 0 to total - 1. Every operation is O(1).

    Free pages are the never used ones (ids from ``_fresh`` up) and a stack of recycled ones, which are reused first
    because their memory is warm. The caller must know that a page is in the state that an operation starts from;
    ``LookupError`` or ``ValueError`` report a bug in the caller, before anything changes.

    Nearly every page has one holder, so the first holder is stored by itself, and only further holders need a set.
    """

    def __init__(
        self,
        total: int,
        cached: RetainingQueue,
        unclean: UncleanPages | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        """``unclean``: pages given up are zeroed before they are granted again. ``memory`` is charged for the holders
        of shared pages; the caller has checked.
        """
        self._memory = HostMemory() if memory is None else memory
        self.total = total
        self.cached = cached
        self.quarantined_count = self.filling_count = 0
        self._states = bytearray(total)
        self._generations = array("I", bytes(4 * total))
        self._first: list[Hashable | None] = [None] * total
        self._others: dict[int, set[Hashable]] = {}  # no set is empty or contains its page's first holder
        self._charged = array("q", bytes(8 * (total // BLOCK + 1)))  # for the holders of each block of pages
        self._held_count = 0
        self._fresh = 0
        self._recycled = array("I")
        self.unclean = unclean

    @property
    def free_count(self) -> int:
        """Pages in state FREE."""
        return self.total - self._fresh + self.recycled_count

    @property
    def never_used_count(self) -> int:
        """Free pages that were never granted."""
        return self.total - self._fresh

    @property
    def recycled_count(self) -> int:
        """Free pages that were granted before."""
        return len(self._recycled) + (0 if self.unclean is None else self.unclean.free_count)

    @property
    def clean_count(self) -> int:
        """Free pages that nothing is zeroing, or will: those that can be filled."""
        return self.total - self._fresh + len(self._recycled)

    @property
    def held_count(self) -> int:
        """Pages in state HELD."""
        return self._held_count

    @property
    def cached_count(self) -> int:
        """Pages in state CACHED."""
        return len(self.cached)

    def state(self, page: int) -> PageState:
        """The state of a page."""
        return PageState(self._states[page])

    def generation(self, page: int) -> int:
        """How often the page was freed; a new generation means new content."""
        return self._generations[page]

    def generations(self, pages: Sequence[int]) -> Iterator[int]:
        """The generation of each of these pages."""
        return map(self._generations.__getitem__, pages)

    def cached_among(self, pages: Sequence[int]) -> int:
        """How many of these pages are CACHED."""
        return bytes(map(self._states.__getitem__, pages)).count(_CACHED)

    def holders(self, page: int) -> frozenset[Hashable]:
        """The holders of the page."""
        first = self._first[page]
        return frozenset() if first is None else frozenset((first, *self._others.get(page, ())))

    def is_held_by(self, page: int, holder: Hashable) -> bool:
        """Whether the page has this holder."""
        return self._first[page] == holder or holder in self._others.get(page, ())

    def is_shared(self, page: int) -> bool:
        """Whether the page has more than one holder."""
        return page in self._others

    def holder_count(self, page: int) -> int:
        """The number of holders of the page."""
        return (self._first[page] is not None) + len(self._others.get(page, ()))

    def take(self, holder: Hashable) -> int:
        """Take a free page, which is then held. Raises LookupError if none is free."""
        if self._recycled:
            page = self._recycled.pop()
        elif self._fresh < self.total:
            page = self._fresh
            self._fresh += 1
        elif self.unclean is not None and self.unclean.free_count:
            page = self.unclean.take()
        else:
            raise LookupError("no free page")
        self._states[page] = _HELD
        self._first[page] = holder
        self._held_count += 1
        return page

    def fill(self) -> int:
        """Take a free page to be filled. Raises LookupError if none is free and clean."""
        if self._recycled:
            page = self._recycled.pop()
        elif self._fresh < self.total:
            page = self._fresh
            self._fresh += 1
        else:
            raise LookupError("no clean page")
        self._states[page] = _FILLING
        self.filling_count += 1
        return page

    def filled(self, page: int, holder: Hashable) -> None:
        """FILLING to HELD by this holder."""
        if self._states[page] != _FILLING:
            raise ValueError(f"page {page} is {self.state(page).name}")
        self._states[page] = _HELD
        self._first[page] = holder
        self.filling_count -= 1
        self._held_count += 1

    def hold(self, page: int, holder: Hashable) -> None:
        """Add a holder to a held or cached page; idempotent. Raises ValueError for a page in another state."""
        state = self._states[page]
        if state == _HELD:
            if self._first[page] != holder:
                self._share(page, holder)
        elif state == _CACHED:
            self.cached.discard(page)
            self._states[page] = _HELD
            self._first[page] = holder
            self._held_count += 1
        else:
            raise ValueError(f"page {page} is {self.state(page).name}")

    def _share(self, page: int, holder: Hashable) -> None:
        others = self._others.get(page)
        if others is None:
            self._others[page] = {holder}
            self._memory.used += SHARED
            self._charged[page // BLOCK] += SHARED
        elif holder not in others:
            others.add(holder)
            self._memory.used += HOLDER
            self._charged[page // BLOCK] += HOLDER

    def hold_all(self, pages: Sequence[int], holder: Hashable) -> None:
        """As `hold`, for each of these pages in order."""
        states, first = self._states, self._first
        cached = [page for page in pages if states[page] == _CACHED]
        if len(cached) < len(pages):
            for page in pages:
                self.hold(page, holder)
            return
        self.cached.discard_all(cached)
        for page in cached:
            states[page] = _HELD
            first[page] = holder
        self._held_count += len(cached)

    def drop(self, page: int, holder: Hashable) -> bool:
        """Remove a holder. Returns True if it was the last; the caller must then move the page to its next state.

        Raises ValueError if ``holder`` does not hold the page.
        """
        others = self._others.get(page)
        if others is None:
            if self._first[page] != holder:
                raise ValueError(f"page {page} is not held by {holder!r}")
            self._first[page] = None
            return True
        if self._first[page] == holder:
            self._first[page] = others.pop()
        elif holder in others:
            others.discard(holder)
        else:
            raise ValueError(f"page {page} is not held by {holder!r}")
        if not others:
            del self._others[page]
            self._memory.used -= SHARED
            self._charged[page // BLOCK] -= SHARED
            return False
        self._memory.used -= HOLDER
        self._charged[page // BLOCK] -= HOLDER
        if is_sparse(others):
            self._others[page] = set(others)
        return False

    def give_back(self, pages: list[int], holders: Sequence[Hashable]) -> None:
        """Remove each page's holder, for unpublished pages: pages left without a holder become FREE, in order.

        Raises ValueError if a holder does not hold its page; the pages before it have then been given back.
        """
        first, others, states, generations = self._first, self._others, self._states, self._generations
        recycle = self._recycled.append if self.unclean is None else self.unclean.add
        for page, holder in zip(pages, holders, strict=True):
            if first[page] is holder and page not in others:
                first[page] = None
            elif not self.drop(page, holder):
                continue
            self._held_count -= 1
            states[page] = _FREE
            generations[page] = (generations[page] + 1) & 0xFFFFFFFF
            recycle(page)

    def cache(self, page: int, now: float) -> None:
        """HELD without holders to CACHED, as the most recently used page."""
        self._leave_held(page)
        self._states[page] = _CACHED
        self.cached.push(page, now)

    def quarantine(self, page: int) -> None:
        """HELD without holders to QUARANTINED."""
        self._leave_held(page)
        self._states[page] = PageState.QUARANTINED
        if self.unclean is not None:
            self.unclean.forget(page)
        self.quarantined_count += 1

    def free(self, page: int) -> None:
        """To FREE, from any other state but HELD with holders. The content is lost, and the generation increments."""
        state = self._states[page]
        if state == _HELD:
            self._leave_held(page)
        elif state == PageState.CACHED:
            self.cached.evict(page)
        elif state == PageState.QUARANTINED:
            self.quarantined_count -= 1
        elif state == _FILLING:
            self.filling_count -= 1
        else:
            raise ValueError(f"page {page} is free already")
        self._states[page] = _FREE
        self._generations[page] = (self._generations[page] + 1) & 0xFFFFFFFF
        if self.unclean is None:
            self._recycled.append(page)
        else:
            self.unclean.add(page)

    def zeroing(self, most: int) -> list[tuple[int, int]]:
        """The next pages to set to zero, as (id, generation): granted ones before free ones."""
        pages = [] if self.unclean is None else self.unclean.next(most)
        return [(page, self._generations[page]) for page in pages]

    def zeroed(self, pages: list[tuple[int, int]]) -> None:
        """These pages have been set to zero since ``zeroing`` named them."""
        if self.unclean is not None:
            for page, generation in pages:
                if self.unclean.zeroed(page, same=self._generations[page] == generation):
                    self._recycled.append(page)

    def _leave_held(self, page: int) -> None:
        if self._states[page] != _HELD or self._first[page] is not None:
            raise ValueError(f"page {page} is {self.state(page).name} with {self.holder_count(page)} holders")
        self._held_count -= 1

    def charged(self) -> int:
        """What is charged for the holders of shared pages."""
        return sum(self._charged)

    def walk(self) -> Iterator[str | None]:
        """Every violated invariant of the table, but for those of the queue of cached pages; None now and then.

        The table may change meanwhile. What is said of a page was seen in one look at it, and the counts and the free
        list are of one moment.
        """
        yield from self._walk_free()
        for block, charged in enumerate(self._charged):
            pages = range(block * BLOCK, min((block + 1) * BLOCK, self.total))
            shared = [len(self._others[page]) for page in pages if page in self._others]
            costs = SHARED * len(shared) + HOLDER * (sum(shared) - len(shared))
            if costs != self._charged[block]:
                yield f"{charged} bytes are charged for the holders of pages {pages}, they cost {costs}"
            yield None
        for page in range(self.total):
            state = self._states[page]
            if (state == _HELD) != (self._first[page] is not None):
                yield f"page {page} is {self.state(page).name} with holders {set(self.holders(page))}"
            others = self._others.get(page)
            if others is not None and (not others or self._first[page] in others or self._first[page] is None):
                yield f"page {page} is first held by {self._first[page]!r} and also by {others}"
            if (state == _CACHED) != (page in self.cached):
                yield f"page {page} is {self.state(page).name} and its place in the eviction queue disagrees"
            if page % PAUSE == 0:
                yield None

    def _walk_free(self) -> Iterator[str | None]:
        states, fresh, recycled, generations = self._states[:], self._fresh, self._recycled[:], self._generations[:]
        counted = {
            PageState.FREE: self.free_count,
            PageState.HELD: self.held_count,
            PageState.CACHED: self.cached_count,
            PageState.QUARANTINED: self.quarantined_count,
            PageState.FILLING: self.filling_count,
        }
        counts = dict.fromkeys(counted, 0)
        for state in counts:
            counts[state] = states.count(state)
            yield None
        if counts != counted:
            yield f"counted {counts}, ledger says {counted}"
        listed = bytearray(self.total)
        for at, page in enumerate(chain(recycled, range(fresh, self.total))):
            if listed[page]:
                yield f"page {page} is on the free list twice"
            listed[page] = 1
            if states[page] != _FREE:
                yield f"page {page} is on the free list and {PageState(states[page]).name}"
            if at % PAUSE == 0:
                yield None
        for page in range(self.total if self.unclean is not None else 0):
            yield from self._check_unclean(page, listed[page] and generations[page] == self._generations[page])
            if page % PAUSE == 0:
                yield None

    def _check_unclean(self, page: int, listed: int) -> Iterator[str]:
        """``listed``: it was on the free list, of which it has not been taken since."""
        unclean = 0 if self.unclean is None else self.unclean.listed(page)
        if unclean + listed > 1:
            yield f"page {page} is on the free list twice"
        if unclean and self._states[page] != _FREE:
            yield f"page {page} is on the free list and {self.state(page).name}"
