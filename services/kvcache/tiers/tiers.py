"""The tiers below the pools as a whole: what the mover says goes where it belongs, and the loop drives what is due."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import ServiceError
from services.kvcache import slices
from services.kvcache.mover.orders import (
    Attached,
    AttachFile,
    AttachGpu,
    Detached,
    Filled,
    Found,
    Health,
    ReadDone,
    Reply,
    Stored,
)
from services.kvcache.pool.host_memory import HostMemory
from services.kvcache.pool.index.events import EventKind, EventRing
from services.kvcache.pool.lower_tiers import StoredLink
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import Work
from services.kvcache.tiers.counts import HOST, MovedCounts
from services.kvcache.tiers.digests import chain_digest
from services.kvcache.tiers.fetch.fetch_or_compute import FetchOrCompute
from services.kvcache.tiers.fetch.fetcher import Fetcher
from services.kvcache.tiers.fetch.lookups import ANSWER, Lookups
from services.kvcache.tiers.fetch.waits import MOST as MOST_WAITS
from services.kvcache.tiers.fetch.waits import WAIT, Key
from services.kvcache.tiers.host.host_tier import HostTier, Slot
from services.kvcache.tiers.host.slabs import SlabFiles, Slabs
from services.kvcache.tiers.jobs import Fetch, MoverJobs, Search, Store
from services.kvcache.tiers.memories import Memories, MoverLink
from services.kvcache.tiers.pool_tiers import TIERED_PAGE, PoolTiers
from services.kvcache.tiers.spills import Spills

#: Bytes that the daemon keeps of a page that waits to be stored.
QUEUED_PAGE = 160

#: Pages that are read in one pass of the loop.
_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """``host_bytes`` of host tier, 0 for none; whether there is an ``outer`` one; ``key`` is that of the digests."""

    host_bytes: int = 0
    outer: bool = False
    admits_all: bool = False
    queue: int = 4096
    prefill_tokens_per_s: float = 5000.0
    key: bytes = b""


class TierState(NamedTuple):
    """``detail`` says why a tier is not available, or why it is smaller than it may be."""

    available: bool
    detail: str


class Located(NamedTuple):
    """The fastest tier that has a page, empty if none is known to, and whether it is on its way into a pool."""

    tier: str
    filling: bool


class Tiers:
    """Belongs to the loop that owns the cache. ``wake`` is called when ``work`` is to be called soon."""

    def __init__(
        self,
        settings: TierSettings,
        link: MoverLink,
        files: SlabFiles,
        memory: HostMemory,
        events: EventRing,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """``memory`` is charged for what is kept of the tiers. Raises InvalidConfiguration if it is too little."""
        memory.reserve_more(settings.queue * QUEUED_PAGE + MOST_WAITS * (WAIT + ANSWER))
        self.settings = settings
        self.admits_all, self.key = settings.admits_all, settings.key
        self.page_bytes = TIERED_PAGE
        self.counts = MovedCounts()
        self.mover = link
        self.host = HostTier(settings.host_bytes, self._changed) if settings.host_bytes else None
        self.memories = Memories(link)
        self.jobs = MoverJobs(link)
        self.lookups = Lookups(self.jobs, clock)
        self.slabs = Slabs(self.host, self.memories, memory, files, wake)
        self.spills = Spills(settings.queue, self.jobs, self.slabs, self.counts, wake)
        self.fetcher = Fetcher(self.jobs, self.host, self.memories, self.lookups, memory, self.counts, clock, wake)
        self.fetcher.is_spoiled = self.spills.is_spoiled
        self.spills.on_stored = self.lookups.forget
        self.choices = FetchOrCompute(
            self.fetcher, self.host, self.lookups, self.counts, settings.prefill_tokens_per_s, clock
        )
        #: Why the outer tier is not used; empty while it is.
        self.outer_detail = "not reached yet" if settings.outer else ""
        self._events = events
        self._clock = clock
        self._lowers: dict[int, PoolTiers] = {}

    # --- pools ---

    def adopt(self, pool: Pool) -> None:
        """A pool was made: it has tiers below it from now on."""
        lower = PoolTiers(self, pool, self.memories.next_number())
        pool.adopt(lower)
        self._lowers[lower.memory] = lower
        self._note_sizes()
        arena, size, pages = pool.arena, pool.layout.page_bytes, pool.table.total
        if arena.device is None:
            self.memories.add(AttachFile(lower.memory, arena.file_path, size, pages))
        else:
            device = arena.device
            self.memories.add(AttachGpu(lower.memory, device.handle, device.ordinal, device.id, size, pages))

    def spill(self, lower: PoolTiers, page: int) -> None:
        """Store a page that is admitted."""
        self.spills.add(lower, page)

    def withdraw(self, digest: bytes) -> None:
        """Forget what was stored of a page that has changed: it may have been read since."""
        self.spills.withdraw(digest)

    def look(
        self, lower: PoolTiers, key: Key, prompt: array[int], salt: str, wait_s: float | None, speed: float
    ) -> Work[ServiceError | None]:
        """See ``LowerTiers.look``."""
        return self.choices.look(lower, key, prompt, salt, wait_s, speed)

    def stop_fills(self, lower: PoolTiers) -> None:
        """End all fills of a pool."""
        for fill in self.fetcher.of_pool(lower.pool):
            self.fetcher.stop(fill)

    def is_mapped(self, memory: int) -> bool:
        """Whether jobs can use a memory."""
        return self.memories.is_mapped(memory)

    def is_awaited(self, memory: int) -> bool:
        """Whether the mover is about to map a memory."""
        return self.memories.is_awaited(memory)

    def let_go(self, lower: PoolTiers) -> bool:
        """Whether nothing maps the memory of a pool that is closing; otherwise that comes nearer."""
        if lower.moving:
            return False
        if self.memories.is_known(lower.memory):
            self.memories.remove(lower.memory)
        if self.memories.is_known(lower.memory):
            return False
        self._lowers.pop(lower.memory, None)
        self._note_sizes()
        return True

    def _note_sizes(self) -> None:
        self.slabs.live = {(lower.page_bytes, lower.gpu) for lower in self._lowers.values()}

    def pools(self) -> list[Pool]:
        """The pools that have these tiers below them."""
        return [lower.pool for lower in self._lowers.values()]

    # --- what the mover says ---

    def replied(self, reply: Reply) -> None:
        """The mover has answered."""
        if isinstance(reply, Attached):
            self.memories.attached(reply.memory, ok=reply.ok)
            self.slabs.mapped()
        elif isinstance(reply, Detached):
            self.memories.detached(reply.memory)
            self.slabs.mapped()
        elif isinstance(reply, Health):
            self.spills.outer_up = self.lookups.is_up = reply.outer_up
            self.outer_detail = "" if reply.outer_up else reply.detail or "not reached"
        elif isinstance(reply, ReadDone | Stored | Found | Filled):
            self._ended(reply)
        self.slabs.retire()

    def _ended(self, reply: ReadDone | Stored | Found | Filled) -> None:
        job = self.jobs.find(reply.job)
        if isinstance(job, Store) and isinstance(reply, ReadDone):
            self.spills.read(reply.job, job, reply)
        elif isinstance(job, Store) and isinstance(reply, Stored):
            self.spills.stored(reply.job, job, reply)
        elif isinstance(job, Fetch) and isinstance(reply, Filled):
            self.fetcher.filled(reply.job, job, reply)
        elif isinstance(job, Search) and isinstance(reply, Found):
            self.jobs.end(reply.job)
            job.found(min(reply.count, job.keys), None if reply.detail else reply.seconds)

    def lost(self, jobs: Sequence[int]) -> None:
        """The mover is proven gone: it writes nothing any more, and maps nothing."""
        self.memories.lost()
        self.slabs.mapped()
        self.spills.outer_up = self.lookups.is_up = False
        if self.settings.outer:
            self.outer_detail = "the mover has ended"
        for number in list(jobs):
            job = self.jobs.find(number)
            if isinstance(job, Store):
                self.spills.lost(number, job)
            elif isinstance(job, Fetch):
                self.fetcher.filled(number, job, None)
            elif isinstance(job, Search):
                self.jobs.end(number)
                job.found(0, None)

    # --- what the loop does ---

    def work(self) -> bool:
        """Do some of what is due; whether there is more that can be done at once."""
        return self.spills.start(_AT_ONCE) | self.slabs.retire()

    def tick(self) -> None:
        """Do what has become due by time: call it every few milliseconds while ``is_busy``."""
        for lower in list(self._lowers.values()):
            self.fetcher.tick(self.fetcher.of_pool(lower.pool))

    @property
    def is_busy(self) -> bool:
        """Whether anything moves, or waits to."""
        return bool(len(self.jobs) or self.spills.queued or any(pool.fills for pool in self.pools()))

    def drain(self) -> None:
        """Store what is worth it, since the pools end with the daemon; it is done when ``spills.is_idle``."""
        if self.settings.outer:
            self.spills.add_all(list(self._lowers.values()))

    # --- looking ---

    def state(self, tier: str) -> TierState | None:
        """Whether a tier can be used; None if there is none."""
        if tier == HOST:
            if self.host is None:
                return None
            detail = self.slabs.failure if self.mover.running else "there is no mover"
            return TierState(self.mover.running and (bool(self.host.slabs) or not detail), detail)
        if not self.settings.outer:
            return None
        return TierState(self.lookups.is_up, self.outer_detail)

    def locate(
        self, pool: Pool, prompt: array[int], salt: str
    ) -> Work[tuple[int, list[Located], list[tuple[int, bytes]]]]:
        """How many pages of a prompt the pool has, where those behind them are, and position and digest of those of
        which only the outer tier can say it: from the first that the host tier does not have on.
        """
        lower = next((one for one in self._lowers.values() if one.pool is pool), None)
        if lower is None:  # it is being dropped
            return 0, [], []
        size = pool.page_size
        matched, _ = yield from pool.matching(prompt, salt)
        whole, found = (len(prompt) - 1) // size, len(matched)
        digest, behind, beyond = lower.root(salt), list[Located](), list[tuple[int, bytes]]()
        for at in range(whole):
            digest = chain_digest(digest, prompt[at * size : (at + 1) * size].tobytes())
            if at >= found:
                stored = self.host is not None and self.host.holds(digest)
                if beyond or not stored:
                    beyond.append((len(behind), digest))
                behind.append(Located(HOST if stored else "", self.fetcher.of(digest) is not None))
            if at % slices.ENTRIES == slices.ENTRIES - 1:
                yield None
        return found, behind, beyond[: self.lookups.most] if self.lookups.is_up else []

    def stored_links(self, pool_id: str) -> list[StoredLink]:
        """What the host tier has of a pool, all of it as it is now."""
        return [] if self.host is None else [slot.content for slot in self.host.stored() if slot.pool_id == pool_id]

    def stored_link(self, pool_id: str, key: int) -> StoredLink | None:
        """What the host tier has of a pool under the hash of a link; None if it has nothing."""
        slot = self.host.of_link(pool_id, key) if self.host is not None else None
        return None if slot is None else slot.content

    def charged(self) -> int:
        """What is charged for the slots of the host tier."""
        return self.slabs.charged()

    def walk(self) -> Iterator[str]:
        """Every violated invariant that is none of a single pool."""
        if self.host is not None:
            yield from self.host.walk()
        for lower in self._lowers.values():
            moving = sum(
                (isinstance(job, Store) and job.lower is lower) or (isinstance(job, Fetch) and job.fill.lower is lower)
                for job in self.jobs.all()
            )
            yield from self.fetcher.walk(lower.pool)
            if moving != lower.moving:
                yield f"pool {lower.pool_id} counts {lower.moving} jobs, {moving} are in flight"
        fetched = sum(isinstance(job, Fetch) for job in self.jobs.all())
        if fetched != self.fetcher.moving:
            yield f"{self.fetcher.moving} pages are counted as being fetched, {fetched} are"
        stored = sum(isinstance(job, Store) for job in self.jobs.all())
        if stored != self.spills.moving:
            yield f"{self.spills.moving} pages are counted as being stored, {stored} are"

    def _changed(self, stored: bool, slot: Slot) -> None:
        kind = EventKind.STORED if stored else EventKind.EVICTED
        self._events.add(slot.pool_id, kind, slot.content.link, HOST)
