"""Published pages: where one goes that loses a holder, and how they leave the prefix cache."""

from __future__ import annotations

from services.kvcache.pool.index.events import EventKind
from services.kvcache.pool.index.prefix_cache import PrefixCache
from services.kvcache.pool.lower_tiers import LowerTiers
from services.kvcache.pool.pages.page_table import PageState, PageTable
from services.kvcache.pool.sequence import Sequence
from services.kvcache.pool.totals import Totals


class PublishedPages:
    """The pages of one pool that carry links: held, or cached until they are evicted, expire or are withdrawn.

    ``totals`` counts those that went.
    """

    def __init__(self, table: PageTable, index: PrefixCache, totals: Totals) -> None:
        self._table = table
        self._index = index
        self._totals = totals
        #: The tiers below the pool, if there are any.
        self.lower: LowerTiers | None = None

    def settle(self, page: int, unheld: bool, now: float) -> None:
        """Decide where a published page goes that has lost a holder; ``unheld`` if that was its last."""
        if self._index.is_primary(page):
            if unheld:
                self._table.cache(page, now)
                if self.lower is not None:
                    self.lower.cached(page)
            return
        # A stand-by is worthless once its holder leaves. Its link was in use until now, so the primary counts as just
        # used: it must outlive the continuations that have just been cached.
        primary = self._index.primary_of(page)
        if self._table.state(primary) == PageState.CACHED:
            self._table.cached.touch(primary, now)
        if unheld:
            self._index.withdraw(page)
            self._table.free(page)

    def expire(self, before: float, most: int) -> int:
        """Free the unretained pages that were cached at or before a time, at most so many. Returns how many."""
        count = 0
        while (
            count < most
            and (page := self._table.cached.oldest) is not None
            and self._table.cached.since(page) <= before
        ):
            self._uncache(page, EventKind.EXPIRED)
            count += 1
        self._totals.expired_pages += count
        return count

    def evict(self, most: int, *, retained: bool = True) -> int:
        """Evict at most ``most`` cached pages, in the policy's order. Returns how many.

        Retained pages go last, or not at all without ``retained``.
        """
        count = 0
        while count < most and (page := self._table.cached.victim(retained=retained)) is not None:
            self._uncache(page, EventKind.EVICTED)
            count += 1
        self._totals.evicted_pages += count
        return count

    def withdraw(self, page: int) -> None:
        """Take a published page out of the prefix cache; its published continuations are out already.

        Whoever holds it goes on with it, publishes nothing more, and gives it back in the end as an unfinished page.
        """
        if self.lower is not None:
            self.lower.withdrawn(page)
        if self._table.state(page) == PageState.CACHED:
            self._uncache(page, EventKind.EVICTED)
            return
        for holder in self._table.holders(page):
            if isinstance(holder, Sequence):
                pages, count = holder.pages, holder.published
                if page in pages[count - 1 : count]:  # nearly always, and a search is long
                    holder.published = count - 1
                elif page in pages[:count]:
                    holder.published = pages.index(page)
                holder.chain_broken = True
        self._table.cached.forget(page)
        self._index.withdraw(page)

    def _uncache(self, page: int, kind: EventKind) -> None:
        heir = self._index.withdraw(page, kind)
        if heir is not None:  # lookups now find a stand-by: the promise belongs to the link and moves with it
            self._table.cached.promise(heir, self._table.cached.promised(page))
        self._table.free(page)
