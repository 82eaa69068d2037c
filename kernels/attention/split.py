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
    """The queries of one row that a block processes together; arrays are ``[n]``."""

    row: I64
    first: I64
    queries: I64
    keys: I64


class Cut(NamedTuple):
    """Tiles split into items: integers ``[n, 5]``, as in `attention.Plan`.

    ``items`` are sorted by falling number of keys. ``entries`` are the partial results to combine, of at most
    ``entry_queries`` queries each. ``partial_rows`` is one more than the last row of partial results.
    """

    items: NDArray[Any]
    entries: NDArray[Any]
    entry_queries: int
    partial_rows: int


_NO_ITEMS = np.empty((0, 5), np.int64)
#: The result for no tiles.
NOTHING = Cut(_NO_ITEMS, _NO_ITEMS, 0, 0)


@dataclass(frozen=True, slots=True)
class _Laid:
    """Items and entries, except for the ends of the tiles' last items."""

    of: I64  # [items]: index of the tile
    columns: I64  # [5, items]: as in `Cut.items`, with the end of a full item
    entries: I64  # [entries, 5]
    entry_queries: int
    partial_rows: int


_NO_CUTS = np.empty(0)
#: From this many tiles on, layouts are not worth caching, and counting tiles by number of keys may be faster.
_MANY = 32


def cut(
    tiles: Tiles, heads: int, processors: int, cost: Cost, partial_rows: int = 0, item_keys: int | None = None
) -> Cut:
    """Split tiles into items: so that all blocks of ``heads`` kv heads finish soonest, or of ``item_keys`` at most.

    Partial results start at row ``partial_rows``.
    """
    keys = tiles.keys
    if not keys.size:
        return Cut(_NO_ITEMS, _NO_ITEMS, 0, partial_rows)
    pieces = _pieces(keys, heads, processors, cost) if item_keys is None else -(-keys // item_keys)
    if pieces is None:
        whole = np.empty((5, len(keys)), np.int64)
        whole[0], whole[1], whole[2], whole[3], whole[4] = tiles.row, tiles.first, 0, keys, -1
        return Cut(whole.take((-keys).argsort(kind="stable"), axis=1).T, _NO_ITEMS, 0, partial_rows)
    # The pieces of a tile are equal, except that the last may be shorter, or empty and left out.
    size = -(-keys // (pieces * ITEM_KEYS)) * ITEM_KEYS
    pieces = -(-keys // size)
    arrays = pieces, size, tiles.row, tiles.first, tiles.queries
    if len(keys) < _MANY:
        # For few tiles, the layout stays the same over many steps that add a key to each.
        laid = _laid_before(partial_rows, *[array.tobytes() for array in arrays])
    else:
        laid = _laid(partial_rows, *arrays)
    begin, end = laid.columns[2], np.minimum(laid.columns[3], keys[laid.of])
    order = (begin - end).argsort(kind="stable")
    items = laid.columns.take(order, axis=1)
    items[3] = end.take(order)
    return Cut(items.T, laid.entries, laid.entry_queries, laid.partial_rows)


def _laid(partial_rows: int, pieces: I64, size: I64, row: I64, first: I64, queries: I64) -> _Laid:
    """Lay out tiles of ``pieces`` of ``size`` keys each; ``row``, ``first``, ``queries`` as in `Tiles`."""
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
def _laid_before(partial_rows: int, *arrays: bytes) -> _Laid:
    return _laid(partial_rows, *(np.frombuffer(array, np.int64) for array in arrays))


def _pieces(keys: I64, heads: int, processors: int, cost: Cost) -> I64 | None:
    """Return the number of pieces of each tile for which all blocks of ``heads`` kv heads finish soonest.

    None: split no tile. The model runs equal blocks in rounds of as many as are resident at a time. If the last round
    is not full, its blocks are split further where that fills it better. So a batch of equal rows finishes together,
    and one of unequal rows nearly does, because its short items come last.
    """
    slots, enough = processors * cost.at_once, processors * cost.enough
    listed = keys.tolist()  # Python sums a short list faster than NumPy
    most = max(listed)
    steps = -(-most // ITEM_KEYS)
    sizes, each, alone = _tried(steps, cost, enough / slots)
    # Exact: a fractional quotient is further from an integer than the rounding error.
    if len(listed) == 1:
        items = np.ceil(most / sizes)
    elif len(listed) < _MANY or steps > 4 * len(listed):
        items = np.add.reduce(np.ceil(keys[:, None] / sizes))
    else:
        items = np.bincount(-(-keys // ITEM_KEYS)) @ _counts(steps)
    mean = sum(listed) / items
    blocks = items * heads
    cuts = rounds = rest = _NO_CUTS
    if blocks[-1] < slots:  # the smallest size has the most blocks: no size fills a round
        time = (mean + each) * np.maximum(blocks, enough) / slots
    else:
        rounds, rest = np.divmod(blocks, slots)
        cuts = np.minimum(enough // np.maximum(rest, 1), mean // (2 * ITEM_KEYS)) * (rounds > 0)
        cuts = np.maximum(cuts, 1)
        # A split block leaves a partial result; at all sizes but the first, blocks do so anyway.
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
    """Return the item sizes to try, in keys and falling, for tiles of up to ``steps`` times `ITEM_KEYS` keys.

    For each size, also returns an item's cost besides its keys, and the time that a full item takes alone. The first
    size holds any tile's keys, so no tile is split; its time alone is left at 0.
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
    """Return the number of items of a tile of 0 to ``steps`` times `ITEM_KEYS` keys, for each size of `_tried`."""
    sizes, _, _ = _tried(steps, Cost(1, 1, 0, 0), 1.0)
    return np.ceil(np.arange(steps + 1)[:, None] / (sizes // ITEM_KEYS))
