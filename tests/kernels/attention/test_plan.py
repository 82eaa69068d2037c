# mypy: disable-error-code="arg-type"
"""The plan of a batch: every query attends to each of its keys exactly once, whatever the batch and the GPU."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.attention.plan import Attention, Geometry, Plan, decode_cost, padded, plan, size_class
from kernels.device.gpu import MATRIX_16X8X16, MATRIX_16X16X16, NO_MATRIX, Gpu, matrix_unit

Numbers = NDArray[np.int32]


def geometry(query_heads: int = 32, kv_heads: int = 8, **kwargs: Any) -> Geometry:
    given = {"head_dim": 128, "page_size": 16, "layers": 2, "dtype": "BF16", "kv_dtype": "BF16"} | kwargs
    return Geometry(query_heads, kv_heads, **given)


H200 = Gpu(32, 132, MATRIX_16X8X16)


def items_of(found: Plan) -> tuple[Numbers, Numbers, Numbers]:
    """Items of decode and prefill, entries of combine: [n, 5] each."""
    decode, prefill, entries = (found.packed[part].reshape(-1, 5) for part in found.parts[2:])
    assert (len(decode), len(prefill), len(entries)) == (found.decode_items, found.prefill_items, found.entries)
    return decode, prefill, entries


rows = st.lists(
    st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 700))),
    min_size=0,
    max_size=9,
)


@settings(deadline=None, max_examples=60)
@given(
    rows=rows,
    heads=st.sampled_from([(1, 1), (8, 8), (32, 8), (28, 4), (40, 2), (71, 1)]),
    processors=st.sampled_from([1, 2, 60, 132, 304]),
    unit=st.sampled_from([(32, NO_MATRIX), (32, MATRIX_16X8X16), (64, NO_MATRIX), (64, MATRIX_16X16X16)]),
    dtype=st.sampled_from(["F32", "BF16"]),
    decode_all=st.booleans(),
)
def test_every_query_meets_its_keys_once(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    processors: int,
    unit: tuple[int, int],
    dtype: str,
    decode_all: bool,
) -> None:
    shape = geometry(*heads, dtype=dtype, kv_dtype=dtype)
    starts = np.array([start for start, _ in rows], np.int64)
    lengths = np.array([count for _, count in rows], np.int64)
    found = plan(shape, Gpu(unit[0], processors, unit[1]), starts, lengths, decode_all=decode_all)
    assert found.packed.dtype == np.int32 and not (decode_all and found.prefill_items)
    assert np.array_equal(found.packed[found.parts[0]], starts)
    assert np.array_equal(np.diff(found.packed[found.parts[1]]), lengths)

    decode, prefill, entries = items_of(found)
    tiles: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    sizes = {}
    for items, tile in ((decode, found.decode_rows), (prefill, shape.prefill_tile)):
        for row, query, *rest in items.tolist():
            tiles[row, query].append(tuple(rest))
            sizes[row, query] = min(tile, int(lengths[row]) * shape.group - query)
        # The longest first, so that the last to begin are short.
        assert (np.diff(items[:, 3] - items[:, 2]) <= 0).all()

    for row, count in enumerate(lengths):
        queries = sorted(query for of, query in tiles if of == row)
        assert queries[0] == 0
        assert [query + sizes[row, query] for query in queries] == [*queries[1:], count * shape.group]

    combined = {(row, query): rest for row, query, *rest in entries.tolist()}
    taken = []
    for (row, query), pieces in tiles.items():
        pieces.sort()
        last_token = (query + sizes[row, query] - 1) // shape.group
        assert pieces[0][0] == 0
        assert [end for _, end, _ in pieces] == [*(begin for begin, _, _ in pieces[1:]), starts[row] + last_token + 1]
        # Where a step of a wave begins, in a page too if pages are steps.
        assert all(begin % 64 == 0 and begin < end for begin, end, _ in pieces)
        partials = [partial for _, _, partial in pieces]
        if len(pieces) == 1:
            assert partials == [-1]
            assert (row, query) not in combined
        else:
            queries, first, splits = combined.pop((row, query))
            assert (queries, splits) == (sizes[row, query], len(pieces))
            assert partials == [first + number * queries for number in range(splits)]
            assert queries <= found.entry_queries
            taken += [range(first, first + queries * splits)]
    assert not combined
    assert sorted(number for one in taken for number in one) == list(range(found.partial_rows))


def test_few_rows_are_cut_and_many_are_not() -> None:
    shape = geometry()
    decode, _, _ = items_of(plan(shape, H200, np.array([32767]), np.array([1])))
    blocks = len(decode) * shape.kv_heads
    assert 132 <= blocks <= 132 * decode_cost(shape, H200, 8).at_once
    assert plan(shape, H200, np.full(256, 511), np.ones(256, int)).entries == 0


def test_one_long_row_among_short_ones_is_cut_to_their_measure() -> None:
    decode, _, _ = items_of(plan(geometry(), H200, np.array([30000] + [300] * 63), np.ones(64, int)))
    assert (decode[:, 3] - decode[:, 2]).max() < 3000


def test_items_of_a_number_of_keys_do_not_depend_on_the_batch() -> None:
    alone, _, _ = items_of(plan(geometry(), H200, np.array([1999]), np.array([1]), 512))
    among, _, _ = items_of(plan(geometry(), H200, np.array([700] * 255 + [1999]), np.ones(256, int), 512))
    assert sorted(alone[:, 2:4].tolist()) == [[0, 512], [512, 1024], [1024, 1536], [1536, 2000]]
    assert sorted(among[among[:, 0] == 255][:, 2:4].tolist()) == sorted(alone[:, 2:4].tolist())
    for keys in (0, -64, 100):
        with pytest.raises(ValueError, match=f"item_keys={keys}: must be a multiple of 64, and at least that"):
            plan(geometry(), H200, np.array([5]), np.array([1]), keys)


def test_rows_of_a_few_tokens_are_decoded_together() -> None:
    found = plan(geometry(), H200, np.full(3, 100), np.array([1, 4, 5]))
    decode, prefill, _ = items_of(found)
    assert found.decode_rows == 16
    assert set(decode[:, 0].tolist()) == {0, 1}
    assert set(prefill[:, 0].tolist()) == {2}


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"query_heads": 12, "kv_heads": 8}, "query_heads=12: must be a multiple of kv_heads=8"),
        ({"kv_heads": 0}, "kv_heads=0: must be at least 1"),
        ({"page_size": 0}, "page_size=0: must be at least 1"),
        ({"head_dim": 72}, "head_dim=72: must be one of 64, 80, 96, 128, 256"),
        ({"dtype": "INT8"}, "dtype=INT8: must be F32, F16 or BF16"),
        ({"kv_dtype": "FP8"}, "kv_dtype=FP8: must be one of F32, F16, BF16, INT8"),
    ],
)
def test_a_geometry_that_no_kernel_is_for(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        geometry(**kwargs)


@pytest.mark.parametrize(
    ("starts", "lengths", "text"),
    [
        ([0], [0], "lengths at least 1"),
        ([-1], [1], "starts must be at least 0"),
        ([0, 1], [1], "one number a row"),
        ([2**30], [1], "must be below"),
    ],
)
def test_a_batch_that_cannot_be(starts: list[int], lengths: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(geometry(), H200, np.array(starts), np.array(lengths))


@pytest.mark.parametrize(
    ("wave", "processors", "matrix", "text"),
    [(16, 1, 0, "wave=16"), (32, 0, 0, "processors=0"), (32, 1, 3, "matrix=3"), (64, 1, 1, "waves of 32 lanes")],
)
def test_a_gpu_that_cannot_be(wave: int, processors: int, matrix: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Gpu(wave, processors, matrix)


@pytest.mark.parametrize(
    ("target", "unit"),
    [
        ("sm_75", NO_MATRIX),
        ("sm_80", MATRIX_16X8X16),
        ("sm_90a", MATRIX_16X8X16),
        ("gfx90a:sramecc+:xnack-", MATRIX_16X16X16),
        ("gfx942", MATRIX_16X16X16),
        ("gfx1201", MATRIX_16X16X16),
        ("gfx1030", NO_MATRIX),
        ("gfx906", NO_MATRIX),
    ],
)
def test_matrix_units_of_targets(target: str, unit: int) -> None:
    assert matrix_unit(target) == unit


def test_a_launch_that_the_kernels_would_not_survive() -> None:
    attention = Attention(lambda *_: pytest.fail("compiled"), geometry(), H200, 0.1)
    found = attention.plan(np.array([5]), np.array([1]))
    nothing = [None] * 5
    with pytest.raises(ValueError, match="layer=2: must be 0 to 1"):
        attention.run(found, nothing, None, 4096, None, 2, None, 1, None, None, None)
    with pytest.raises(ValueError, match="q_stride=4095: must be at least 4096"):
        attention.run(found, nothing, None, 4095, None, 0, None, 1, None, None, None)
    with pytest.raises(ValueError, match="scale=0"):
        Attention(lambda *_: pytest.fail("compiled"), geometry(), H200, 0)


def test_compile_is_all_that_a_batch_can_need() -> None:
    asked: list[tuple[str, Any]] = []

    class Launched:
        def launch(self, name: str, grid: Any, block: Any, args: Any, shared: int = 0) -> None:
            """Launch nothing."""

    def load(name: str, defines: Any) -> Launched:
        asked.append((name, dict(defines)))
        return Launched()

    attention = Attention(load, geometry(), H200, 0.1)
    attention.compile()
    before = len(asked)
    for rows in ([(100, 1)], [(100, 4)], [(100, 1), (0, 300)], [(30000, 1)], [(30000, 2), (9000, 100)]):
        found = attention.plan(*np.array(rows).T)
        attention.run(found, [None] * 5, None, 4096, None, 0, None, 1, None, None, None)
    assert len(asked) == before


def test_size_classes_are_few_and_near() -> None:
    classes = [size_class(count) for count in range(2000)]
    assert all(count <= found <= max(2 * count, 1) for count, found in enumerate(classes))
    assert all(found <= max(count + 8, 1.25 * count) for count, found in enumerate(classes))
    assert classes == sorted(classes) and len(set(classes)) < 45 and [size_class(found) for found in classes] == classes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40000), st.integers(1, 16)), min_size=1, max_size=60), st.integers(0, 30))
def test_a_plan_that_is_made_up_to_a_size_has_the_same_items(rows: list[tuple[int, int]], more: int) -> None:
    starts, lengths = (list(column) for column in zip(*rows, strict=True))
    found = plan(geometry(), H200, np.array(starts), np.array(lengths), decode_all=True)
    larger = padded(found, len(starts) + more)
    for part, whole, rest in zip(items_of(found), items_of(larger), (-1, 0, 0), strict=True):
        assert (whole[: len(part)] == part).all() and (whole[len(part) :] == rest).all()
    assert (larger.decode_items, larger.entries) == (len(items_of(larger)[0]), len(items_of(larger)[2]))
    assert larger.partial_rows >= found.partial_rows
    assert larger.entry_queries >= found.entry_queries
    begins, offsets = larger.packed[larger.parts[0]], larger.packed[larger.parts[1]]
    assert len(begins) == len(offsets) - 1 == len(starts) + more
    assert begins[: len(starts)].tolist() == starts and np.diff(offsets).tolist() == lengths + [0] * more


def test_what_cannot_be_made_up_to_a_size() -> None:
    with pytest.raises(ValueError, match="a plan of 2 rows and 0 prefill items: not to be padded to 1"):
        padded(plan(geometry(), H200, np.array([3, 4]), np.array([1, 1])), 1)
    with pytest.raises(ValueError, match="prefill items: not to be padded"):
        padded(plan(geometry(), H200, np.array([3]), np.array([100])), 4)
