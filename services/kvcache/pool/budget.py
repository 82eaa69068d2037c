"""All pools, under one memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.common.errors import (
    ExceedsBudget,
    ExceedsShare,
    InvalidConfiguration,
    LayoutMismatch,
    PoolInUse,
    PoolUnknown,
    TooManyPools,
)
from services.kvcache import slices
from services.kvcache.pool.arena import Arena
from services.kvcache.pool.debts import Debts
from services.kvcache.pool.host_memory import HostMemory, pool_bytes
from services.kvcache.pool.index.chain_hash import ChainHash
from services.kvcache.pool.index.events import EventKind, EventRing
from services.kvcache.pool.layout import Layout
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import Work

CANARY_BYTES = 32

#: Bytes after an arena's pages for each session that the daemon may have: a canary and its answer.
CANARY_SLOT_BYTES = 2 * CANARY_BYTES

#: Limit on pages; what the daemon keeps of each is charged to `HostMemory`.
MAX_PAGES = 1 << 22

#: ``(layout, total_pages, canary_slots, device)`` to an arena on a GPU or, with device None, in a mapped file. Raises
#: ExceedsBudget if the machine lacks the memory.
ArenaMaker = Callable[[Layout, int, int, int | None], Arena]


def pool_name(pool_id: str, device: int | None) -> str:
    """The name of a pool: pools with one id on different GPUs are different pools."""
    return pool_id if device is None else f"{pool_id}/gpu{device}"


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one identity may have: so many pools, and such a share of the memory budget, 0 to 1."""

    pools: int
    share: float


class Pools:
    """Pools by name. No arena is made by which those in one memory (the host's, or a GPU's) would exceed
    ``budget_bytes`` in total, which is checked before anything is allocated.
    """

    def __init__(
        self,
        budget_bytes: int,
        allotment: Allotment,
        default_pages: int | None,
        canary_slots: int,
        make_arena: ArenaMaker,
        chain: ChainHash,
        events: EventRing,
        eviction: str,
        retained_share: float,
        wake: Callable[[], None] = lambda: None,
        *,
        checksums: bool = True,
        zero_pages: bool = False,
        memory: HostMemory | None = None,
        debts: Debts | None = None,
    ) -> None:
        """``memory`` is charged for what the daemon keeps of the pools, ``debts`` has what they give up in slices."""
        self._debts = Debts() if debts is None else debts
        self._memory = HostMemory() if memory is None else memory
        #: The largest budget there was: arenas stay when it is lowered.
        self.ceiling = 0
        self.set_limits(budget_bytes, allotment, default_pages)
        self._canary_slots = canary_slots
        self._make_arena = make_arena
        self._chain = chain
        self._events = events
        self._eviction = eviction
        self._retained_share = retained_share
        self._wake = wake
        self._checksums = checksums
        self._zero_pages = zero_pages
        #: Called with each pool that was made, which the daemon keeps so many bytes more of for each page.
        self.on_made: Callable[[Pool], None] = lambda pool: None
        self.more_page_bytes = 0
        self._by_id: dict[str, Pool] = {}
        self.dropped = 0
        #: What is charged for pools that are being made, and for those that are being dropped.
        self.charged_apart = 0

    def set_limits(self, budget_bytes: int, allotment: Allotment, default_pages: int | None) -> None:
        """Go by these limits from now on: what there is stays, and is refused more beyond them."""
        self.budget_bytes = budget_bytes
        self.ceiling = max(self.ceiling, budget_bytes)
        self._allotment = allotment
        self._default_pages = default_pages

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._by_id.values())

    def __getitem__(self, pool_id: str) -> Pool:
        return self._by_id[pool_id]

    @property
    def arena_bytes(self) -> int:
        """Total size of all arenas in bytes."""
        return sum(pool.arena.size_bytes for pool in self)

    def get_or_make(
        self,
        pool_id: str,
        layout: Layout,
        pages: int | None,
        device: int | None,
        is_used: Callable[[Pool], bool],
        owner: str = "",
    ) -> Work[Pool]:
        """The pool with this id on this device (None: host memory), created for its owner if it does not exist. That
        is work in slices, and with jobs for memory; only one such work, or `drop`, may be under way.

        ``is_used`` says whether a pool's memory is or may be mapped. Unused pools in the same memory are dropped to
        make room for a new one, the owner's own first, then least recently used first, since an upgraded model comes
        with a new pool id. Raises LayoutMismatch, InvalidConfiguration, ExceedsBudget, ExceedsShare, TooManyPools,
        HostMemoryExceeded, GpuError.
        """
        pool_id = pool_name(pool_id, device)
        pool = self._by_id.get(pool_id)
        if pool is None:
            yield from self._debts.paying()  # so it is known which pools are idle
            return (yield from self._make(pool_id, layout, pages, device, is_used, owner))
        if pool.layout != layout:
            raise LayoutMismatch(
                f"layout: pool {pool_id!r} has {pool.layout}; this session requested {layout}", field="layout"
            )
        if pages is not None and pages != pool.table.total:
            raise LayoutMismatch(
                f"pool_pages is {pages}; pool {pool_id!r} exists with {pool.table.total}", field="pool_pages"
            )
        return pool

    def _make(
        self,
        pool_id: str,
        layout: Layout,
        pages: int | None,
        device: int | None,
        is_used: Callable[[Pool], bool],
        owner: str,
    ) -> Work[Pool]:
        allowed = int(self.budget_bytes * self._allotment.share)
        canaries = self._canary_slots * CANARY_SLOT_BYTES
        if pages is None:
            pages = self._default_pages
        if pages is None:
            most = min((allowed - canaries) // layout.page_bytes, self._memory.pages_within(layout.page_size))
            pages = min(MAX_PAGES, max(1, most))
        if not 1 <= pages <= MAX_PAGES:
            raise InvalidConfiguration(f"pool_pages is {pages}; it must be 1 to {MAX_PAGES}", field="pool_pages")
        wanted = pages * layout.page_bytes + canaries
        there = [pool for pool in self if device_of(pool) == device]
        idle = sorted(
            (pool for pool in there if not is_used(pool) and not pool.table.quarantined_count),
            key=lambda pool: (pool.owner != owner, pool.last_used),
        )
        own = [pool for pool in there if pool.owner == owner and pool not in idle]
        self._check_allotment(owner, own, wanted, allowed, pool_id)
        spare = [pool for pool in idle if pool.owner == owner]
        room = self.budget_bytes - sum(pool.arena.size_bytes for pool in there)
        most = room + sum(pool.arena.size_bytes for pool in idle)
        if wanted > most:
            raise ExceedsBudget(
                f"pool {pool_id!r} needs {wanted} bytes ({pages} pages of {layout.page_bytes} and {canaries} for "
                f"canaries); of the memory budget of {self.budget_bytes}, {most} are free or held by idle pools; start "
                "the daemon with more --memory",
                field="pool_pages",
                wanted_bytes=wanted,
                budget_bytes=self.budget_bytes,
            )
        needs, memory = pool_bytes(pages, layout.page_size) + pages * self.more_page_bytes, self._memory
        memory.check(
            needs,
            f"pool {pool_id!r} of {pages} pages",
            field="pool_pages",
            spare=sum(pool.charged() for pool in idle),
        )
        has = sum(pool.arena.size_bytes for pool in (*own, *spare))
        for old in idle:
            mine = old.owner == owner
            short = wanted > room or memory.used + needs > memory.limit
            if short or (mine and (wanted + has > allowed or len(own) + len(spare) >= self._allotment.pools)):
                room += old.arena.size_bytes
                if mine:
                    spare.remove(old)
                    has -= old.arena.size_bytes
                yield from self._drop(old)
        memory.check(needs, f"pool {pool_id!r} of {pages} pages", field="pool_pages")
        memory.used += needs
        self.charged_apart += needs
        made: list[Pool] = []
        try:
            yield lambda: made.append(self._new_pool(pool_id, layout, pages, device))
        except BaseException:
            memory.used -= needs
            raise
        finally:
            self.charged_apart -= needs
        [pool] = made
        pool.owner = owner
        self._by_id[pool_id] = pool
        self.on_made(pool)
        return pool

    def _new_pool(self, pool_id: str, layout: Layout, pages: int, device: int | None) -> Pool:
        """Runs on any thread."""
        arena = self._make_arena(layout, pages, self._canary_slots, device)
        try:
            return Pool(
                pool_id,
                layout,
                pages,
                arena,
                self._chain,
                self._events,
                self._eviction,
                self._retained_share,
                self._wake,
                checksums=self._checksums,
                zero_pages=self._zero_pages,
                memory=self._memory,
                debts=self._debts,
            )
        except BaseException:
            arena.close()
            raise

    def _check_allotment(self, owner: str, used: list[Pool], wanted: int, allowed: int, pool_id: str) -> None:
        """Whether an identity may have one more pool, beside those that it uses."""
        if len(used) >= self._allotment.pools:
            raise TooManyPools(
                f"{owner} uses {len(used)} pools, the limit of one identity",
                field="pool_id",
                identity=owner,
                limit=self._allotment.pools,
            )
        has = sum(pool.arena.size_bytes for pool in used)
        if allowed < self.budget_bytes and has + wanted > allowed:
            raise ExceedsShare(
                f"pool {pool_id!r} needs {wanted} bytes and {owner} uses {has}; one identity may have {allowed} of the "
                f"memory budget of {self.budget_bytes}",
                field="pool_pages",
                identity=owner,
                wanted_bytes=wanted,
                limit=allowed,
            )

    def get(self, pool_id: str) -> Pool:
        """Raises PoolUnknown."""
        pool = self._by_id.get(pool_id)
        if pool is None:
            # Truncated: no pool has a longer name, and an error must fit in the trailers of an HTTP/2 stream.
            raise PoolUnknown(f"no pool {pool_id[:128]!r}", field="pool_id")
        return pool

    def drop(self, pool: Pool) -> Work[None]:
        """Drop a pool and free its memory, as work. Raises PoolInUse if pages are held or in quarantine."""
        if pool.lower is not None and not pool.sequences and not pool.table.quarantined_count:
            yield from pool.lower.closing()
        yield from self._debts.paying()
        if pool.table.held_count or pool.table.quarantined_count:
            raise PoolInUse(
                f"pool {pool.id!r} has {pool.table.held_count} pages held and {pool.table.quarantined_count} in "
                "quarantine",
                field="pool_id",
            )
        yield from self._drop(pool)

    def _drop(self, pool: Pool) -> Work[None]:
        """It is no pool any more from the first slice on; what it was made of goes in slices, for that takes long."""
        if pool.lower is not None:
            yield from pool.lower.closing()
        charged = pool.charged()
        del self._by_id[pool.id]
        self.charged_apart += charged
        self.dropped += 1
        try:
            yield pool.arena.close
            while links := pool.index.dismantled(slices.ENTRIES):
                for link in links:
                    self._events.add(pool.id, EventKind.DROPPED, link)
                yield None
            for part in (pool.table.cached, pool.checksums, pool.table.unclean):
                while part is not None and part.dismantle(slices.ENTRIES):
                    yield None
        finally:
            self.charged_apart -= charged
            self._memory.used -= charged
            self._debts.owe(_letting_go(pool.parts()))

    def close(self) -> None:
        """Free all memory."""
        for pool in self:
            pool.arena.close()
        self._by_id.clear()


def _letting_go(parts: list[object]) -> Work[None]:
    """Free what a pool was made of one by one, unless work that goes on with the pool keeps it until its end."""
    yield None
    while parts:
        parts.pop()
        yield None


def device_of(pool: Pool) -> int | None:
    """The GPU that a pool's memory is on; None for the host's."""
    return pool.arena.device.ordinal if pool.arena.device else None
