"""Every violated invariant of one pool, looked for in slices between which transactions may run: see ``walk``."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator

from services.kvcache.eviction.lru import PAUSE
from services.kvcache.pool.pages.page_table import PageState
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence


def walk_pool(pool: Pool) -> Iterator[str | None]:
    """Every violated invariant of this pool; empty if it is consistent. None now and then, where transactions may
    run.
    """
    yield from pool.table.walk()
    yield from pool.table.cached.walk()
    yield from pool.index.walk()
    # Of each page the sum of those that list it, to be compared with that of its holders.
    listed = array("Q", [0]) * pool.table.total
    yield None
    for sequence in list(pool.sequences):
        if sequence in pool.sequences:
            yield from _check_sequence(pool, sequence)
            yield from _walk_block_table(pool, sequence, pool.sequences.__contains__, listed, live=True)
        yield None
    for sequence in list(pool.endings.expired):
        yield from _walk_block_table(pool, sequence, pool.endings.expired.__contains__, listed)
        yield None
    for fill in list(pool.fills):
        yield from _walk_block_table(pool, fill, pool.fills.__contains__, listed)
        yield None
    for among in (pool.endings.ending, *(sequences.values() for sequences in list(pool.endings.sessions.values()))):
        for sequence in list(among):
            yield from _walk_block_table(pool, sequence, pool.endings.is_ending, listed)
            yield None
    if pool.lower is not None:
        yield from pool.lower.walk()
    yield from _walk_holders(pool, listed)


def _check_sequence(pool: Pool, sequence: Sequence) -> Iterator[str]:
    size = pool.page_size
    if len(sequence.tokens) > len(sequence.pages) * size:
        yield f"{sequence!r} has more tokens than its pages hold"
    if not sequence.chain_broken and sequence.published != len(sequence.tokens) // size:
        yield f"{sequence!r} has a complete page that is not published"
    if sequence.copy is not None:
        index, source = sequence.copy
        if source in sequence.pages or index != len(sequence.tokens) // size:
            yield f"{sequence!r} copies page {source} to index {index}"
    index, slot = divmod(len(sequence.tokens), size)
    if slot and not sequence.forked and index < len(sequence.pages) and pool.table.is_shared(sequence.pages[index]):
        yield f"{sequence!r} was no side of a fork and shares its tail"


def _walk_block_table(
    pool: Pool, sequence: Sequence, there: Callable[[Sequence], bool], listed: array[int], *, live: bool = False
) -> Iterator[str | None]:
    size, seen, at = pool.page_size, set[int](), 0
    if sequence.copy is not None and there(sequence):
        listed[sequence.copy[1]] ^= _mark(sequence)
        if not pool.table.is_held_by(sequence.copy[1], sequence):
            yield f"{sequence!r} copies page {sequence.copy[1]} and does not hold it"
    # It may end meanwhile, or have its last page replaced.
    while at < len(sequence.pages) and there(sequence):
        page = sequence.pages[at]
        listed[page] ^= _mark(sequence)
        if not pool.table.is_held_by(page, sequence):
            yield f"page {page}: holders {set(pool.table.holders(page))}, the block table of {sequence!r} has it"
        if page in seen and sequence.pages.count(page) > 1:
            yield f"{sequence!r} lists page {page} twice"
        seen.add(page)
        if live and at < sequence.published:
            chunk = sequence.tokens[at * size : (at + 1) * size].tobytes()
            if pool.index.tokens(page) != chunk:
                yield f"{sequence!r}: page {page} is published with other tokens"
        at += 1
        if at % PAUSE == 0:
            yield None


def _walk_holders(pool: Pool, listed: array[int]) -> Iterator[str | None]:
    spent = 0
    for page in range(pool.table.total):
        holders = pool.table.holders(page)
        found = 0
        for holder in holders:
            found ^= _mark(holder)
        if found != listed[page]:  # or it has changed hands since: each holder is looked at
            for holder in holders:
                if pool.table.is_held_by(page, holder) and not _lists(pool, holder, page):
                    yield f"page {page} is held by {holder!r}, whose block table has it not"
                yield None
        state = pool.table.state(page)
        if state == PageState.CACHED and not pool.index.is_primary(page):
            yield f"page {page} is cached and no lookup finds it"
        if pool.table.cached.has_promise(page) and (state != PageState.HELD or not pool.index.is_primary(page)):
            yield f"page {page} has a promise, is {state.name} and no lookup finds it held"
        if state in (PageState.FREE, PageState.QUARANTINED, PageState.FILLING) and pool.index.is_published(page):
            yield f"page {page} is {state.name} and published"
        spent += 1 + len(holders)
        if spent >= PAUSE:
            spent = 0
            yield None


def _lists(pool: Pool, holder: Hashable, page: int) -> bool:
    if not isinstance(holder, Sequence):
        return False
    among = (pool.sequences, pool.fills, pool.endings.expired)
    if not any(holder in one for one in among) and not pool.endings.is_ending(holder):
        return False
    # What has changed lately is at the end.
    return page in holder.pages[-PAUSE:] or page in holder.pages or (holder.copy is not None and holder.copy[1] == page)


def _mark(holder: Hashable) -> int:
    """64 bits of a holder's own, such that those of several can be summed."""
    return id(holder) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
