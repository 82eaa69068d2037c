"""`linear` on a CPU: its bits depend on no other row, and probing BLAS is cheap."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from kernels import ops_numpy as ops
from kernels.linear import cpu as linear_module
from kernels.linear.cpu import Packed, linear

F32 = NDArray[np.float32]

#: Outputs that are one block, several, blocks that overlap, odd ones, and fewer than a kernel of BLAS takes at once;
#: inputs that are one sum and several.
SHAPES = [
    *[(512, 256), (256, 768), (96, 33), (1, 7), (5, 64), (47, 576), (48, 576), (49, 641)],
    *[(100, 2500), (1023, 255), (1024, 256), (3079, 64)],
]
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 64, 100, 511, 512, 513, 600]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(autouse=True)
def forget_probes() -> Iterator[None]:
    def forget() -> None:
        linear_module.product_rows.cache_clear()
        linear_module.tile_rows.cache_clear()
        linear_module.threads.cache_clear()
        linear_module._pool.cache_clear()

    forget()
    yield
    forget()


def peak_of(call: Any) -> int:
    """The peak of allocated bytes while it ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("outputs,inputs", SHAPES)
@pytest.mark.parametrize("prepare", [linear_module.prepared, Packed])
def test_a_row_has_the_same_bits_in_any_company(prepare: Any, outputs: int, inputs: int) -> None:
    x, plain = normal(600, inputs), normal(outputs, inputs, seed=1)
    weight = prepare(plain.copy())
    expected = np.concatenate([linear(row[None], weight) for row in x])
    assert np.abs(expected - x.astype(np.float64) @ plain.T).max() < 1e-3
    for count in COUNTS:
        assert np.array_equal(linear(x[:count], weight), expected[:count]), count
        assert np.array_equal(linear(x[-count:], weight), expected[-count:]), count


def test_rows_need_not_lie_one_after_another() -> None:
    x, weight = normal(9, 200), normal(60, 100, seed=1)
    for prepared in (weight, Packed(weight.copy())):
        assert np.array_equal(linear(x[::2, :100], prepared), linear(x[::2, :100].copy(), prepared))


def test_a_plain_weight_has_the_bits_of_a_prepared_one_and_stays_as_it_is() -> None:
    x, weight = normal(5, 64), normal(100, 64, seed=1)
    before = weight.copy()
    assert np.array_equal(linear(x, weight), linear(x, linear_module.prepared(weight.copy())))
    assert np.array_equal(weight, before)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit_of_tiles(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    x, weight = normal(9, 576), Packed(normal(2000, 576, seed=1))
    monkeypatch.setattr(linear_module, "threads", lambda: 1)
    expected = linear(x, weight)
    monkeypatch.setattr(linear_module, "threads", lambda: count)
    monkeypatch.setattr(linear_module, "THREAD_WORK", 1000)
    used = set()
    honest = linear_module._share

    def share(*args: Any) -> None:
        used.add(args[3:])
        honest(*args)

    monkeypatch.setattr(linear_module, "_share", share)
    assert np.array_equal(linear(x, weight), expected)
    assert len(used) == count


def test_an_error_in_another_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "threads", lambda: 2)
    monkeypatch.setattr(linear_module, "THREAD_WORK", 1000)
    honest, here = linear_module._share, threading.get_ident()

    def share(*args: Any) -> None:
        if threading.get_ident() != here:
            raise MemoryError("no room")
        honest(*args)

    monkeypatch.setattr(linear_module, "_share", share)
    with pytest.raises(MemoryError, match="no room"):
        linear(normal(9, 576), Packed(normal(2000, 576, seed=1)))


@pytest.mark.parametrize("count", [1, 2])
def test_threads_are_as_many_as_blas_has(count: int) -> None:
    with threadpool_limits(count, user_api="blas"):
        assert linear_module.threads() == count


# --- a packed weight -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs,inputs", [(1, 7), (48, 16), (47, 16), (100, 33), (480, 64)])
def test_a_packed_weight_gives_its_rows_back(outputs: int, inputs: int) -> None:
    given = normal(outputs, inputs)
    before = given.copy()
    packed = Packed(given)
    assert np.shares_memory(packed.blocks if outputs >= 48 else packed.rest, given)
    rows = np.random.default_rng(1).integers(0, outputs, 50)
    assert np.array_equal(ops.take(packed, rows), before[rows])
    assert ops.take(packed, rows[:0]).shape == (0, inputs)
    assert (len(packed), packed.shape) == (outputs, before.shape)


def test_packing_takes_no_second_weight() -> None:
    given = normal(20_000, 64)
    assert peak_of(lambda: Packed(given)) < given.nbytes / 50


def test_a_weight_that_may_not_be_written_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "product_rows", lambda *_: ())
    given = normal(50, 16)
    given.setflags(write=False)
    before = given.copy()
    packed = linear_module.prepared(given)
    assert np.array_equal(ops.take(packed, np.arange(50)), before) and np.array_equal(given, before)


@pytest.mark.parametrize("sizes", [(1,), (4,), (4, 8)])
def test_all_rows_are_covered_by_the_tiles_there_may_be(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(linear_module, "tile_rows", lambda *_: sizes)
    for count in [1, 3, 4, 5, 8, 9, 100]:
        x, weight = normal(count, 24), normal(70, 24, seed=1)
        assert np.abs(linear(x, Packed(weight.copy())) - x.astype(np.float64) @ weight.T).max() < 1e-4


@pytest.mark.parametrize("rows,expected", [(4, (1,)), (8, (4,))])
def test_a_tile_whose_rows_blas_tells_apart_is_not_used(
    monkeypatch: pytest.MonkeyPatch, rows: int, expected: tuple[int, ...]
) -> None:
    honest = linear_module.tiles

    def crooked(x: F32, blocks: F32) -> F32:
        product = honest(x, blocks)
        if x.shape[1] == rows:
            product *= 1 + np.arange(rows, dtype=np.float32)[:, None] * np.float32(1e-6)
        return product

    monkeypatch.setattr(linear_module, "tiles", crooked)
    assert linear_module.tile_rows(64, 48) == expected
    x, weight = normal(40, 64), Packed(normal(100, 64, seed=1))
    assert np.array_equal(linear(x, weight), np.concatenate([linear(row[None], weight) for row in x]))


# --- products of rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs,inputs", [*SHAPES, (49152, 576), (128256, 4096), (4096, 14336), (8, 1 << 20)])
def test_blocks_of_a_weight_are_few_even_and_small(outputs: int, inputs: int) -> None:
    size = linear_module.block_outputs(outputs, inputs)
    assert 1 <= size <= min(outputs, linear_module.BLOCK_OUTPUTS)
    assert size == outputs or size % linear_module.BLOCK_STEP == 0
    assert size <= linear_module.BLOCK_STEP or 4 * size * inputs <= linear_module.BLOCK_BYTES
    blocks = -(-outputs // size)
    assert blocks * size < outputs + linear_module.BLOCK_STEP * blocks


@pytest.mark.parametrize("outputs,inputs", [(49152, 576), (128256, 4096)])
def test_a_probe_takes_a_fraction_of_the_weight_it_is_for(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int
) -> None:
    # Products of most rows are compared only where BLAS gives them the bits of few: here it always does.
    monkeypatch.setattr(np, "array_equal", lambda *_: True)
    size = linear_module.block_outputs(outputs, inputs)
    sizes: list[int] = []
    peak = peak_of(lambda: sizes.extend(linear_module.product_rows(size, inputs)))
    assert sizes == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert peak < min(4 * outputs * inputs / 4, 48 << 20)
    assert peak_of(lambda: linear_module.tile_rows(inputs, 48)) < 4 << 20


@pytest.mark.parametrize("prepare", [lambda weight: weight, Packed])
def test_a_product_takes_no_memory_to_speak_of_beside_its_result(prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "product_rows", lambda *_: (2, 4, 8, 16))
    x, weight = normal(1, 64), prepare(normal(100_000, 64, seed=1))
    linear(x, weight)  # the probe is over
    result = 4 * len(weight)
    assert peak_of(lambda: linear(x, weight)) - result < 4 << 20


@pytest.mark.parametrize("least", [16, 32, 512])
def test_larger_products_are_made_only_where_they_have_the_bits_of_smaller(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    def crooked(x: F32, weight: F32) -> F32:
        """A BLAS that sums in one order below ``least`` rows."""
        product = np.stack([weight @ row for row in x])
        return product if len(x) < least else product * np.float32(1.0001)

    monkeypatch.setattr(linear_module, "multiply", crooked)
    sizes = linear_module.product_rows(32, 64)
    assert sizes == tuple(size for size in [2, 4, 8, 16, 32, 64, 128, 256] if size < least and least > 16)


@pytest.mark.parametrize("least", [2, 4, 8])
def test_few_rows_may_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    def crooked(x: F32, weight: F32) -> F32:
        """A BLAS that sums in one order from ``least`` rows on."""
        product = np.stack([weight @ row for row in x])
        return product * np.float32(1.0001) if len(x) < least else product

    monkeypatch.setattr(linear_module, "multiply", crooked)
    assert linear_module.product_rows(32, 64) == tuple(2**power for power in range(1, 10) if 2**power >= least)


def test_no_product_is_made_whose_rows_blas_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = linear_module.multiply
    monkeypatch.setattr(
        linear_module,
        "multiply",
        lambda x, weight: honest(x, weight) * (1 + np.arange(len(x), dtype=np.float32)[:, None] * np.float32(1e-6)),
    )
    assert linear_module.product_rows(32, 64) == ()


@pytest.mark.parametrize("sizes", [(2, 4, 8, 16, 32), (8, 16), (4, 8, 16, 32, 64, 128, 256, 512)])
def test_all_rows_are_covered_by_the_products_there_may_be(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(linear_module, "product_rows", lambda *_: sizes)
    for count in [1, 2, 3, 7, 8, 9, 15, 16, 31, 33, 64, 79, 100]:
        parts = list(linear_module.spans(count, sizes))
        assert [at for at, _ in parts] == [sum(rows for _, rows in parts[:i]) for i in range(len(parts))]
        assert {rows for _, rows in parts} <= {*sizes}
        assert 0 <= sum(rows for _, rows in parts) - count < max(sizes[0], linear_module.THIN_ROWS / 2)
        x, weight = normal(count, 24), normal(10, 24, seed=1)
        assert np.abs(linear(x, weight) - x.astype(np.float64) @ weight.T).max() < 1e-4


def test_linear_of_no_rows() -> None:
    for weight in (normal(3, 8), Packed(normal(3, 8))):
        assert linear(normal(0, 8), weight).shape == (0, 3)
