"""Splitting tiles into items: caching and counting change no result; and the formula, tile by tile."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import split
from kernels.attention.split import ITEM_KEYS, Cost, Cut, Tiles, cut


def tiles_of(keys: list[int], queries: int = 4) -> Tiles:
    n = len(keys)
    return Tiles(np.arange(n), np.zeros(n, np.int64), np.full(n, queries), np.array(keys, np.int64))


def same(found: Cut, expected: Cut) -> bool:
    sizes = (found.entry_queries, found.partial_rows) == (expected.entry_queries, expected.partial_rows)
    return sizes and np.array_equal(found.items, expected.items) and np.array_equal(found.entries, expected.entries)


def expected_pieces(keys: list[int], heads: int, processors: int, cost: Cost) -> list[int]:
    """The formula by itself: how long each size would take, and the first of those that take least."""
    slots, enough = processors * cost.at_once, processors * cost.enough
    most, steps = max(keys), -(-max(keys) // ITEM_KEYS)
    tried = sorted({-(-steps // int(pieces)) for pieces in np.geomspace(1, steps, 40)}, reverse=True)
    best: tuple[float, list[int], int, int] | None = None
    for size in (ITEM_KEYS * one for one in tried):
        counts = [-(-one // size) for one in keys]
        mean = sum(keys) / sum(counts)
        rounds, rest = divmod(sum(counts) * heads, slots)
        cuts = max(1, min(enough // max(rest, 1), int(mean // (2 * ITEM_KEYS)))) if rounds else 1
        each = cost.block + (cost.split if max(counts) > 1 else 0)
        last_each = cost.block + cost.split if cuts > 1 else each
        last = (mean / cuts + last_each) * max(rest * cuts, enough) / slots if rest else 0.0
        time = max(rounds * (mean + each) + last, (min(size, most) + each) * (enough / slots))
        if best is None or time < best[0]:
            best = time, counts, cuts if rounds else 1, rest
    assert best is not None
    _, counts, cuts, rest = best
    if cuts > 1:
        before = 0
        for at in sorted(range(len(keys)), key=lambda at: keys[at] / counts[at]):
            share = counts[at]
            if before * heads < rest:
                counts[at] *= cuts
            before += share
    held = [-(-one // (count * ITEM_KEYS)) * ITEM_KEYS for one, count in zip(keys, counts, strict=True)]
    return [-(-one // size) for one, size in zip(keys, held, strict=True)]


BATCHES = st.one_of(
    st.lists(st.integers(1, 20000), min_size=1, max_size=6),
    st.lists(st.integers(900, 1100), min_size=30, max_size=90),
    st.lists(st.integers(1, 5000), min_size=30, max_size=70),
)
COSTS = st.builds(Cost, st.integers(1, 4), st.just(1), st.sampled_from([0, 64]), st.sampled_from([64, 192]))


@settings(deadline=None, max_examples=150)
@given(BATCHES, st.sampled_from([1, 4, 8]), st.sampled_from([1, 5, 132, 304]), COSTS)
def test_as_many_pieces_as_the_formula_says(keys: list[int], heads: int, processors: int, cost: Cost) -> None:
    found = cut(tiles_of(keys), heads, processors, cost)
    pieces = np.bincount(found.items[:, 0], minlength=len(keys))
    assert pieces.tolist() == expected_pieces(keys, heads, processors, cost)
    assert [math.prod(row) for row in found.entries[:, 2::2]] == [4 * one for one in pieces.tolist() if one > 1]


@pytest.mark.parametrize("keys", [[700], [3000, 61, 5000], [900 + 7 * row for row in range(40)]])
def test_a_key_more_for_each_tile_is_cut_as_if_it_had_not_been_before(keys: list[int]) -> None:
    cost, later = Cost(3, 2, 64, 64), list[Cut]()
    split._laid_before.cache_clear()
    for step in range(150):
        later.append(cut(tiles_of([one + step for one in keys]), 8, 60, cost, 5))
    kept = split._laid_before.cache_info()
    for step, found in enumerate(later):
        split._laid_before.cache_clear()
        assert same(cut(tiles_of([one + step for one in keys]), 8, 60, cost, 5), found)
    assert (kept.hits > 100) == (len(keys) < 40)


def test_tiles_are_told_apart_by_more_than_their_keys() -> None:
    cost = Cost(3, 2, 64, 64)
    four, two = (cut(tiles_of([9000, 8000], queries), 8, 60, cost) for queries in (4, 2))
    assert four.partial_rows == 2 * two.partial_rows and two.entry_queries == 2
    assert cut(tiles_of([9000, 8000]), 8, 60, cost, 7).partial_rows == four.partial_rows + 7


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6000), min_size=2, max_size=50), st.sampled_from([5, 132]))
def test_many_tiles_are_cut_as_few_are(keys: list[int], processors: int) -> None:
    found = list[Cut]()
    with pytest.MonkeyPatch.context() as patch:
        for many in (1, 1000):
            patch.setattr(split, "_MANY", many)
            found.append(cut(tiles_of(keys), 8, processors, Cost(4, 2, 64, 64)))
    assert same(*found)
