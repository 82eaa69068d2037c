"""Taking condemned pages and their continuations out of the prefix cache, a slice at a time.

K and V behind a page were computed from it, so what is behind a corrupted page is worth nothing either. A pool may have
a million pages behind one: between two slices the cache serves others. It may, because a condemned page is found by no
lookup and nothing is published behind it, and because pages go in the order that keeps the index sound at every moment,
each after all of its continuations.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from services.kvcache.pool.pool import Pool

_UNKNOWN, _SOUND, _DOOMED = 0, 1, 2

#: Pages of one chain that are followed at once.
MOST_STEPS = 256


def purge(pool: Pool, slice_pages: int = 256) -> Iterator[None]:
    """Withdraw every condemned page of the pool with its continuation; yields after each slice.

    It takes one walk over the pool's pages: a page is behind a condemned one, or is not, as its parent is, so each is
    looked at once. Pages published meanwhile behind one that the walk has not reached yet are walked at its end.
    """
    index = pool.index
    fates = bytearray(pool.table.total)
    doomed = array("i")  # parents before their continuations
    spent = 0
    index.arrivals.clear()
    todo: Iterable[int] = range(pool.table.total)
    while True:
        for page in todo:
            path = [page]
            while path:
                spent += _judge(pool, path, fates, doomed)
                if spent >= slice_pages:
                    spent = 0
                    yield
        if not index.arrivals:
            break
        todo, index.arrivals = index.arrivals, []
        for page in todo:
            fates[page] = _UNKNOWN  # it has been published since it was judged
    for page in reversed(doomed):
        if index.is_condemned(page):  # and was not evicted meanwhile
            pool.published.withdraw(page)
            pool.totals.withdrawn_pages += 1
            spent += 4
            if spent >= slice_pages:
                spent = 0
                yield


def _judge(pool: Pool, path: list[int], fates: bytearray, doomed: array[int]) -> int:
    """Settle the fate of the last page of ``path``, and take it off; how many pages were looked at.

    If the answer is too far up its chain, an ancestor is added instead, to be settled before.
    """
    index, chain = pool.index, list[int]()
    at: int | None = path[-1]
    while at is not None and not fates[at] and index.is_published(at) and not index.is_condemned(at):
        if len(chain) == MOST_STEPS:
            path.append(at)
            return len(chain)
        chain.append(at)
        at = index.parent(at)
    path.pop()
    if at is not None and not fates[at] and index.is_condemned(at):
        fates[at] = _DOOMED
        doomed.append(at)
    fate = _DOOMED if at is not None and fates[at] == _DOOMED else _SOUND
    for page in reversed(chain):
        fates[page] = fate
        if fate == _DOOMED:
            index.condemn(page)
            doomed.append(page)
    return len(chain) + 1
