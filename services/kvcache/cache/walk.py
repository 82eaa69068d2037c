"""Every violated invariant of the daemon's state: what Fsck reports."""

from __future__ import annotations

from collections.abc import Iterator

from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.pool_walk import walk_pool
from services.kvcache.eviction.lru import PAUSE
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.budget import Pools, device_of
from services.kvcache.pool.pool import Pool


def check(cache: KvCache) -> Iterator[str]:
    """Every violation of the whole state; empty when it is sound. Changes nothing."""
    return (said for said in walk(cache) if said is not None)


def walk(cache: KvCache) -> Iterator[str | None]:
    """As ``check``, in slices: None wherever transactions may run before it goes on.

    No transaction makes it report what was no violation. What it says of a page or a sequence it has seen in one
    look at it, between two transactions, when all that is compared is to be sound; and what takes a look at
    everything (sums, the free list, the order of eviction) it copies at one moment, whole arrays at a time. It
    finds what was wrong all the while, and not what went wrong where it had been already.
    """
    yield from _walk_pools(cache.pools)
    yield from _check_account(cache)
    if cache.tiers is not None:
        yield from cache.tiers.walk()
    slots = {(session.pool_id, session.canary_slot) for session in cache.live_sessions()}
    if len(slots) != len(cache.live_sessions()):
        yield "two sessions share a canary slot"
    for pool in list(cache.pools):
        sessions = [session for session in cache.live_sessions() if session.pool_id == pool.id]
        if sum(len(session.sequences) for session in sessions) != len(pool.sequences):
            yield f"pool {pool.id} has sequences that no session lists, or the reverse"
        waiting = cache.quarantine.pages(pool)
        yield from cache.quarantine.miscounted(pool)
        if len(waiting) != pool.table.quarantined_count:
            yield f"pool {pool.id}: {pool.table.quarantined_count} pages quarantined, {len(waiting)} waited for"
        entries = sum(sequence.page_count for sequence in pool.endings.ending)
        if entries != pool.endings.entries:
            yield f"pool {pool.id} counts {pool.endings.entries} entries of ended sequences, they have {entries}"
        yield from _walk_sessions(cache, pool, sessions)
        seen = bytearray(pool.table.total)
        for at, page in enumerate(waiting):
            if seen[page]:
                yield f"pool {pool.id}: page {page} is waited for twice"
            seen[page] = 1
            if at % PAUSE == 0:
                yield None


def _walk_pools(pools: Pools) -> Iterator[str | None]:
    for pool in list(pools):
        for violation in walk_pool(pool):
            yield None if violation is None else f"pool {pool.id}: {violation}"
    for device in {device_of(pool) for pool in pools}:
        size = sum(pool.arena.size_bytes for pool in pools if device_of(pool) == device)
        if size > pools.ceiling:
            where = "the host" if device is None else f"GPU {device}"
            yield f"the arenas of {where} have {size} bytes, the budget is {pools.ceiling}"


def _check_account(cache: KvCache) -> Iterator[str]:
    """Whether the account is the sum of what there is, at one moment."""
    memory, sessions = cache.memory, cache.live_sessions()
    charged = memory.floor + cache.pools.charged_apart + sum(pool.charged() for pool in cache.pools)
    charged += cache.tiers.charged() if cache.tiers is not None else 0
    charged += sum(session.held_pages * session.entry_bytes + session.ids_bytes for session in sessions)
    if memory.used > memory.ceiling:
        yield f"{memory.used} bytes of host memory are charged, of {memory.ceiling}"
    if charged != memory.used:
        yield f"{memory.used} bytes of host memory are charged, what there is costs {charged}"


def _walk_sessions(cache: KvCache, pool: Pool, sessions: list[Session]) -> Iterator[str | None]:
    for session in sessions:
        if all(live is not session for live in cache.live_sessions()):
            continue  # it has ended meanwhile
        counted = sum(sequence.page_count for sequence in session.sequences.values())
        if counted != session.held_pages:
            yield f"session {session.handle} counts {session.held_pages} pages, its sequences have {counted}"
        ids = session.charged()
        if ids != session.ids_bytes:
            yield f"session {session.handle} is charged {session.ids_bytes} bytes for ids, they cost {ids}"
        yield None
        for sequence_id, sequence in session.sequences.items():
            if sequence_id != sequence.id or sequence_id in session.removed or session.id != sequence.session_id:
                yield f"{sequence!r} is listed as {sequence_id!r}, or was removed"
            if sequence not in pool.sequences:
                yield f"pool {pool.id} lacks {sequence!r}, which session {session.handle} lists"
        yield None
