"""Every violated invariant of the daemon's state: what Fsck reports."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.pool_walk import walk_pool
from services.kvcache.eviction.lru import PAUSE
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.budget import Pools, device_of
from services.kvcache.pool.pages.page_table import PageState
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import entries_of


def check(cache: KvCache) -> Iterator[str]:
    """Every violation of the whole state; empty when it is sound. Changes nothing."""
    return (said for said in walk(cache) if said is not None)


def walk(cache: KvCache) -> Iterator[str | None]:
    """As ``check``, in slices: None wherever transactions may run before it goes on.

    No transaction makes it report what was no violation. What it says of a page, a sequence or a session it has seen in
    one look at it, between two transactions; what takes a look at more (sums, the free list) is counted in one look, or
    copied at one moment, whole arrays at a time. It finds what was wrong all the while, and not what went wrong where
    it had been already.
    """
    yield from _walk_pools(cache.pools)
    yield None
    yield from _check_account(cache)
    if cache.tiers is not None:
        yield from cache.tiers.walk()
    slots = {(session.pool_id, session.canary_slot) for session in cache.live_sessions()}
    if len(slots) != len(cache.live_sessions()):
        yield "two sessions share a canary slot"
    for pool in list(cache.pools):
        yield None
        sessions = [session for session in cache.live_sessions() if session.pool_id == pool.id]
        if sum(len(session.sequences) for session in sessions) != len(pool.sequences):
            yield f"pool {pool.id} has sequences that no session lists, or the reverse"
        ending = [pool.endings.ending, *(of.values() for of in pool.endings.sessions.values())]
        entries = sum(map(entries_of, ending))
        if entries != pool.endings.entries:
            yield f"pool {pool.id} counts {pool.endings.entries} entries of ended sequences, they have {entries}"
        yield from _walk_sessions(cache, pool, sessions)
        yield from _walk_quarantine(cache, pool)


def _walk_pools(pools: Pools) -> Iterator[str | None]:
    for pool in list(pools):
        for violation in walk_pool(pool):
            if all(one is not pool for one in pools):
                break  # it is being taken apart
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
        yield None
        if all(live is not session for live in cache.live_sessions()):
            continue  # it has ended meanwhile
        counted = entries_of(session.sequences.values())
        if counted != session.held_pages:
            yield f"session {session.handle} counts {session.held_pages} pages, its sequences have {counted}"
        yield None
        yield from session.walk_charges()
        for at, sequence_id in enumerate(list(session.sequences)):
            if at % PAUSE == 0:
                yield None
            sequence = session.sequences.get(sequence_id)
            if sequence is None:
                continue
            if sequence_id != sequence.id or sequence_id in session.removed or session.id != sequence.session_id:
                yield f"{sequence!r} is listed as {sequence_id!r}, or was removed"
            if sequence not in pool.sequences:
                yield f"pool {pool.id} lacks {sequence!r}, which session {session.handle} lists"


def _walk_quarantine(cache: KvCache, pool: Pool) -> Iterator[str | None]:
    yield None
    records, leaving = cache.quarantine.records(pool), pool.endings.leaving
    waiting = len(leaving) + sum(record.page_count for record in records)
    if waiting != pool.table.quarantined_count:
        yield f"pool {pool.id}: {pool.table.quarantined_count} pages quarantined, {waiting} waited for"
    seen = array("Q", [0]) * pool.table.total  # which of its lives each page was seen in
    # Pages of a record may be leaving later, and those that are leaving are of no record until they were free.
    yield from _walk_waiting(pool, leaving, seen, lambda: True)
    for record in records:
        yield None
        if not record.over:
            yield from record.miscounted()
        for at, name in enumerate(list(record.left)):
            if at % PAUSE == 0:
                yield None
            pages = record.left.get(name, [])
            yield from _walk_waiting(pool, pages, seen, lambda: not record.over and record.left.get(name) is pages)  # noqa: B023


def _walk_waiting(pool: Pool, pages: list[int], seen: array[int], are_kept: Callable[[], bool]) -> Iterator[str | None]:
    at = 0
    while at < len(pages) and are_kept():
        page = pages[at]
        life = pool.table.generation(page) + 1
        if seen[page] == life:
            yield f"pool {pool.id}: page {page} is waited for twice"
        seen[page] = life
        if pool.table.state(page) != PageState.QUARANTINED:
            yield f"pool {pool.id}: page {page} is waited for and {pool.table.state(page).name}"
        at += 1
        if at % PAUSE == 0:
            yield None
