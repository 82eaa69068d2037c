"""Splits the keys of tiles into items so that a batch's blocks finish as soon as possible (split-K).

A tile is a group of queries of one row that a block processes together; an item is a range of its keys. The split is
computed before every step, mostly for few tiles, where the number of NumPy calls dominates: so there are few calls, and
results that do not change from step to step are cached.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

#: The number of keys of an item is a multiple of this: whole iterations of `attention_decode`.
ITEM_KEYS = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """The measured cost model that determines how many items keys are split into (docs/attention.md)."""

    #: Blocks resident on a multiprocessor (compute unit) at a time.
    at_once: int
    #: From this many blocks on, total throughput no longer grows: blocks share a bottleneck such as memory bandwidth.
    enough: int
    #: What a block takes besides its keys, in keys.
    block: int
    #: What an item takes besides, if it leaves a partial result, in keys.
    split: int


class Tiles(NamedTuple):
    """Queries of one row that a block takes together, ``[n]`` each."""

    row: I64
    first: I64
    queries: I64
    keys: I64


class Cut(NamedTuple):
    """Tiles as blocks take them: whole numbers ``[n, 5]``, as of `attention.Plan`.

    ``items``: those with the most keys first. ``entries``: what is to be combined, of ``entry_queries`` at most each.
    ``partial_rows``: the row behind the last partial result.
    """

    items: NDArray[Any]
    entries: NDArray[Any]
    entry_queries: int
    partial_rows: int


_NO_ITEMS = np.empty((0, 5), np.int64)
#: Of no tiles.
NOTHING = Cut(_NO_ITEMS, _NO_ITEMS, 0, 0)


@dataclass(frozen=True, slots=True)
class _Laid:
    """Items and entries but for where the keys of a tile's last item end."""

    of: I64  # [items]: which tile
    columns: I64  # [5, items]: as of `Cut.items`, with the end of an item that is whole
    entries: I64  # [entries, 5]
    entry_queries: int
    partial_rows: int


_NO_CUTS = np.empty(0)
#: Tiles from which on nothing stays as it is, and it may be faster to count how many tiles have how many keys.
_MANY = 32


def cut(
    tiles: Tiles, heads: int, processors: int, cost: Cost, partial_rows: int = 0, item_keys: int | None = None
) -> Cut:
    """Cut tiles into items such that all blocks of ``heads`` kv heads are over soonest, or of ``item_keys`` at most.

    Partial results are from row ``partial_rows`` on.
    """
    keys = tiles.keys
    if not keys.size:
        return Cut(_NO_ITEMS, _NO_ITEMS, 0, partial_rows)
    pieces = _pieces(keys, heads, processors, cost) if item_keys is None else -(-keys // item_keys)
    if pieces is None:
        whole = np.empty((5, len(keys)), np.int64)
        whole[0], whole[1], whole[2], whole[3], whole[4] = tiles.row, tiles.first, 0, keys, -1
        return Cut(whole.take((-keys).argsort(kind="stable"), axis=1).T, _NO_ITEMS, 0, partial_rows)
    # Pieces of a tile are alike, but for the last, which may be shorter, or not be there.
    size = -(-keys // (pieces * ITEM_KEYS)) * ITEM_KEYS
    pieces = -(-keys // size)
    told = pieces, size, tiles.row, tiles.first, tiles.queries
    if len(keys) < _MANY:
        # All this stays as it is for many steps that add a key to each tile, if there are few.
        laid = _laid_before(partial_rows, *[array.tobytes() for array in told])
    else:
        laid = _laid(partial_rows, *told)
    begin, end = laid.columns[2], np.minimum(laid.columns[3], keys[laid.of])
    order = (begin - end).argsort(kind="stable")
    items = laid.columns.take(order, axis=1)
    items[3] = end.take(order)
    return Cut(items.T, laid.entries, laid.entry_queries, laid.partial_rows)


def _laid(partial_rows: int, pieces: I64, size: I64, row: I64, first: I64, queries: I64) -> _Laid:
    """Lay out tiles by the pieces of each and the keys of a piece; ``row``, ``first``, ``queries`` as of `Tiles`."""
    of = np.arange(len(pieces)).repeat(pieces)
    number = np.arange(len(of)) - (pieces.cumsum() - pieces)[of]
    split = pieces > 1
    results = pieces * queries * split
    behind = results.cumsum() + partial_rows
    base = behind - results
    columns = np.empty((5, len(of)), np.int64)
    columns[0], columns[1], columns[2] = row[of], first[of], number * size[of]
    columns[3] = columns[2] + size[of]
    columns[4] = np.where(split[of], base[of] + number * queries[of], -1)
    cut_up = split.nonzero()[0]
    entries = np.empty((5, len(cut_up)), np.int64)
    for column, values in zip(entries, (row, first, queries, base, pieces), strict=True):
        column[:] = values[cut_up]
    return _Laid(of, columns, entries.T, int(entries[2].max(initial=0)), int(behind[-1]))


@functools.lru_cache(maxsize=64)
def _laid_before(partial_rows: int, *told: bytes) -> _Laid:
    return _laid(partial_rows, *(np.frombuffer(array, np.int64) for array in told))


def _pieces(keys: I64, heads: int, processors: int, cost: Cost) -> I64 | None:
    """Return into how many pieces to cut each tile, such that all blocks of ``heads`` kv heads are over soonest.

    None is not to cut any. Blocks are thought of as rounds of as many as run at once, all alike. Those of a last round
    that is not full are cut once more, if that fills it better. So a batch of equal rows ends together, and one of
    unequal rows nearly does: its short items come last.
    """
    slots, enough = processors * cost.at_once, processors * cost.enough
    listed = keys.tolist()  # of which Python is done before NumPy has begun
    most = max(listed)
    steps = -(-most // ITEM_KEYS)
    sizes, each, alone = _tried(steps, cost, enough / slots)
    # Exact: a quotient that is no whole number differs from one by far more than a rounding.
    if len(listed) == 1:
        items = np.ceil(most / sizes)
    elif len(listed) < _MANY or steps > 4 * len(listed):
        items = np.add.reduce(np.ceil(keys[:, None] / sizes))
    else:
        items = np.bincount(-(-keys // ITEM_KEYS)) @ _counts(steps)
    mean = sum(listed) / items
    blocks = items * heads
    cuts = rounds = rest = _NO_CUTS
    if blocks[-1] < slots:  # of the smallest size there are the most: none fills a round
        time = (mean + each) * np.maximum(blocks, enough) / slots
    else:
        rounds, rest = np.divmod(blocks, slots)
        cuts = np.minimum(enough // np.maximum(rest, 1), mean // (2 * ITEM_KEYS)) * (rounds > 0)
        cuts = np.maximum(cuts, 1)
        # Whoever is cut leaves a partial result; of all sizes but the first, there are such anyway.
        last_each = each if cuts[0] == 1 else cost.block + cost.split
        last = (mean / cuts + last_each) * np.maximum(rest * cuts, enough) / slots
        time = rounds * (mean + each) + last * (rest > 0)
    time = np.maximum(time, alone)
    time[0] = max(time[0], (most + cost.block) * (enough / slots))
    best = int(time.argmin())
    again = cuts is not _NO_CUTS and rounds[best] > 0 and cuts[best] > 1
    if not best and not again:
        return None
    pieces: I64 = -(-keys // sizes[best])
    if again:
        shortest = (keys / pieces).argsort(kind="stable")
        before = pieces[shortest].cumsum() - pieces[shortest]
        pieces[shortest[before * heads < rest[best]]] *= int(cuts[best])
    return pieces


@functools.lru_cache(maxsize=256)
def _tried(steps: int, cost: Cost, share: float) -> tuple[I64, F64, F64]:
    """Return what to try for an item where tiles have up to ``steps`` times `ITEM_KEYS` keys: numbers of keys, falling.

    With them what an item takes besides its keys, and what a whole one takes alone. The first is all keys of any tile,
    so that none is split; what it takes alone is left open.
    """
    pieces = np.geomspace(1, steps, 40).astype(np.int64)
    sizes = np.unique(-(-steps // pieces))[::-1] * ITEM_KEYS
    each = np.full(len(sizes), float(cost.block + cost.split))
    each[0] = cost.block
    alone = (sizes + each) * share
    alone[0] = 0
    return sizes, each, alone


@functools.lru_cache(maxsize=8)
def _counts(steps: int) -> F64:
    """Return how many items a tile of 0 to ``steps`` times `ITEM_KEYS` keys has, for each size of `_tried`."""
    sizes, _, _ = _tried(steps, Cost(1, 1, 0, 0), 1.0)
    return np.ceil(np.arange(steps + 1)[:, None] / (sizes // ITEM_KEYS))
