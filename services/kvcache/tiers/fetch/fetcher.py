"""Pages on their way from the lower tiers into pools.

A fill belongs to its pool. Its pages are published in the order of the chain, each with the bytes that its digest names
or not at all. An engine that waits for it asks again; one that is gone leaves a fill that ends by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from services.kvcache import slices
from services.kvcache.mover.orders import FILLED, REFUSED, Chain, Filled, FillFromHost, FillFromOuter, Order
from services.kvcache.pool.host_memory import SHARED, HostMemory
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import Work
from services.kvcache.tiers.counts import HOST, OUTER, MovedCounts
from services.kvcache.tiers.fetch.choice import Regret
from services.kvcache.tiers.fetch.fill import Fill, Run
from services.kvcache.tiers.fetch.lookups import Lookups
from services.kvcache.tiers.fetch.rates import Rate
from services.kvcache.tiers.host.host_tier import HostTier
from services.kvcache.tiers.jobs import Fetch, MoverJobs
from services.kvcache.tiers.memories import Memories
from services.kvcache.tiers.pool_tiers import IN_OUTER, RETURNED

#: Pages that are fetched at a time, of all fills, and what they may have together unless it is one.
MOST_MOVING, MOST_MOVING_BYTES = 128, 256 << 20

#: Share of a pool that can be filling: a page that a mover may be writing cannot be granted, however long that takes.
MOST_FILLING = 0.25


class Fetcher:
    """The fills of all pools."""

    def __init__(
        self,
        jobs: MoverJobs,
        host: HostTier | None,
        memories: Memories,
        lookups: Lookups,
        memory: HostMemory,
        counts: MovedCounts,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """``memory`` is charged for fills. ``wake`` is called when one begins."""
        self._wake = wake
        self._jobs = jobs
        self._host = host
        self._memories = memories
        self._lookups = lookups
        self._memory = memory
        self._counts = counts
        self._clock = clock
        #: Every page that is to be fetched, by digest.
        self._of_digest: dict[bytes, Fill] = {}
        self.rates = {HOST: Rate(0.001, 2e9), OUTER: Rate(0.002, 3e8)}
        self.regret = Regret()
        self.moving = self._moving_bytes = 0
        #: Whether the outer tier may have wrong bytes of a page.
        self.is_spoiled: Callable[[bytes], bool] = lambda digest: False

    def begin(self, fill: Fill, prompt: array[int], last: bytes) -> Work[bool]:
        """Hold the cached pages that a fill continues, and fetch the first behind them; False if there is no memory for
        that, or other pages are cached by now.
        """
        lower, pool = fill.lower, fill.lower.pool
        if self._memory.used + fill.charge + fill.base * SHARED > self._memory.limit:
            return False
        self._memory.used += fill.charge
        lower.fill_bytes += fill.charge
        pool.fills[fill] = None
        self._of_digest.update(dict.fromkeys(fill.digests, fill))
        try:
            while True:
                more = pool.match(prompt, fill.salt, slices.ENTRIES, behind=fill.pages)
                more = more[: fill.base - len(fill.pages)]
                pool.share(fill, prompt, more)
                if len(more) < slices.ENTRIES or len(fill.pages) == fill.base:
                    break
                yield None
                if fill.ended or fill.chain_broken:
                    break
        except BaseException:
            self.stop(fill)
            raise
        if fill.ended:
            return False
        above = lower.digests[fill.pages[-1]] if fill.pages else last
        if len(fill.pages) != fill.base or above != last or fill.chain_broken or lower.closed:
            self.stop(fill)
            return False
        self._counts.fills += 1
        self._wake()
        self.go_on(fill)
        return not fill.ended

    def go_on(self, fill: Fill) -> None:
        """Fetch the next pages of a fill, as many as there is room for."""
        lower, table = fill.lower, fill.lower.pool.table
        while not fill.ended and fill.ordered < fill.planned:
            if self.moving >= MOST_MOVING or (self.moving and self._moving_bytes >= MOST_MOVING_BYTES):
                return
            if not self._make_room(fill):
                return
            page = table.fill()
            if not self._order(fill, fill.ordered, page):
                table.free(page)
                return
            lower.filling.add(page)
            fill.ordered += 1

    def _make_room(self, fill: Fill) -> bool:
        """Whether a page can be filled, which may have to be evicted before."""
        pool, table = fill.lower.pool, fill.lower.pool.table
        if pool.headroom.pages <= 0 or table.filling_count >= max(1, int(table.total * MOST_FILLING)):
            return False
        missing = fill.planned - fill.ordered
        if not table.clean_count and fill.waited and table.free_count < missing and table.cached_count:
            pool.published.evict(1)
        return table.clean_count > 0

    def _order(self, fill: Fill, index: int, page: int) -> bool:
        """Have the mover fetch a page; False if it cannot now, or no tier has it any more."""
        lower, digest = fill.lower, fill.digests[index]
        slot = self._host.find(digest) if self._host is not None else None
        order: Callable[[int], Order]
        if slot is not None:
            slab, number = slot.slab.memory, slot.number

            def order(job: int) -> Order:
                return FillFromHost(job, lower.memory, page, slab, number, slot.checksum)
        elif self._lookups.is_up and not self.is_spoiled(digest):
            parent = fill.digests[index - 1] if index else self._above(fill)
            chain = Chain(digest, parent, fill.chunks[index])

            def order(job: int) -> Order:
                return FillFromOuter(job, lower.memory, page, chain)
        else:
            self._cut(fill, index)
            return False
        if not lower.is_mapped or not self._jobs.begin(Fetch(fill, index, page, slot, self._clock()), order):
            return False
        if slot is not None and self._host is not None:
            self._host.pin(slot)
        lower.moving += 1
        self.moving += 1
        self._moving_bytes += lower.page_bytes
        fill.runs.setdefault(OUTER if slot is None else HOST, Run(self._clock()))
        return True

    def _above(self, fill: Fill) -> bytes:
        return fill.lower.digests[fill.pages[fill.base - 1]] if fill.base else fill.lower.root(fill.salt)

    def filled(self, number: int, job: Fetch, reply: Filled | None) -> None:
        """The mover has filled a page, or could not; without a reply, it is gone."""
        fill, lower, now = job.fill, job.fill.lower, self._clock()
        pool, tier = lower.pool, OUTER if job.slot is None else HOST
        counts, outcome = self._counts.tiers[tier], "" if reply is None else reply.outcome
        self._jobs.end(number)
        lower.moving -= 1
        self.moving -= 1
        self._moving_bytes -= lower.page_bytes
        in_outer = job.slot is None or job.slot.outer
        if job.slot is not None and self._host is not None:
            self._host.unpin(job.slot)
            if outcome == FILLED:
                self._host.touch(job.slot)
            elif outcome == REFUSED:
                self._host.forget(job.slot)
        if outcome == FILLED and reply is not None:
            counts.fetched_pages += 1
            counts.fetched_bytes += reply.bytes
            counts.fetch_seconds.observe(reply.seconds)
            fill.runs[tier].delivered(lower.page_bytes, now)
        elif reply is None:
            self._counts.lost_pages += 1
        else:
            counts.failed_pages += 1
        if outcome != FILLED and not fill.ended:
            self._cut(fill, job.index)
        if outcome != FILLED or fill.ended or job.index >= fill.planned:
            lower.filling.discard(job.page)
            pool.table.free(job.page)
        else:
            fill.landed[job.index] = (job.page, in_outer)
        if not fill.ended:
            self._publish(fill)
            self.go_on(fill)

    def _publish(self, fill: Fill) -> None:
        """Publish what is filled, in the order of the chain."""
        lower, pool = fill.lower, fill.lower.pool
        while fill.head in fill.landed:
            page, in_outer = fill.landed.pop(fill.head)
            lower.filling.discard(page)
            pool.table.filled(page, fill)
            fill.pages.append(page)
            before = fill.published
            pool.append(fill, array("I", fill.chunks[fill.head]))
            fill.head += 1
            if fill.published == before:  # its parent is withdrawn, or another chain has its hash
                self._cut(fill, fill.head)
                break
            lower.flags[page] = RETURNED | (IN_OUTER if in_outer else 0)
            pool.totals.filled_pages += 1
        if fill.head >= fill.planned:
            self.stop(fill)

    def _cut(self, fill: Fill, planned: int) -> None:
        """Fetch no page of a fill from this one on."""
        if planned >= fill.planned:
            return
        fill.planned = planned
        for index in [index for index in fill.landed if index >= planned]:
            page, _ = fill.landed.pop(index)
            fill.lower.filling.discard(page)
            fill.lower.pool.table.free(page)
        if fill.head >= planned:
            self.stop(fill)

    def stop(self, fill: Fill) -> None:
        """End a fill. What it has published is cached; pages that the mover writes still are freed when it has ended.
        Idempotent.
        """
        if fill.ended:
            return
        fill.ended = True
        lower, pool = fill.lower, fill.lower.pool
        for page, _ in fill.landed.values():
            lower.filling.discard(page)
            pool.table.free(page)
        fill.landed.clear()
        for digest in fill.digests:
            if self._of_digest.get(digest) is fill:
                del self._of_digest[digest]
        del pool.fills[fill]
        self._memory.used -= fill.charge
        lower.fill_bytes -= fill.charge
        pool.endings.end_fill(fill)
        now = self._clock()
        for tier, run in fill.runs.items():
            if run.first > run.begun:
                latency = run.first - run.begun
                self.rates[tier].measured(latency, run.bytes, run.last - run.first, now)
                self.regret.measured(latency, self.rates[tier].bandwidth(now))
        if fill.waited and fill.head:
            self.regret.fetched(now - fill.begun, fill.compute_s * fill.head / len(fill.digests))

    def of_pool(self, pool: Pool) -> list[Fill]:
        """The fills of a pool, oldest first."""
        return [fill for fill in pool.fills if isinstance(fill, Fill)]

    def walk(self, pool: Pool) -> Iterator[str]:
        """Every violated invariant of the fills of a pool."""
        for fill in self.of_pool(pool):
            if len(fill.pages) > fill.base + fill.head or fill.head > fill.planned:
                yield f"{fill!r} has published {fill.head} of {fill.planned} pages"

    def of(self, digest: bytes) -> Fill | None:
        """The fill that is to fetch the page with this digest."""
        return self._of_digest.get(digest)

    def tick(self, fills: Iterable[Fill]) -> None:
        """Go on with fills that lacked something, and end those that nobody waits for any more."""
        now = self._clock()
        for fill in fills:
            if fill.waited and fill.until <= now:
                self.stop(fill)
            else:
                self.go_on(fill)
                if not fill.waited and not fill.ended and fill.ordered == fill.head:
                    self.stop(fill)  # there is no page for it
