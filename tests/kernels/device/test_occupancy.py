"""Blocks that fit on a multiprocessor: what plans make of the runtime's answers, on an H200 what was chosen before."""

from __future__ import annotations

import pytest

from kernels.attention.plan import Attention, Geometry, decode_bound, decode_cost, prefill_cost
from kernels.device.gpu import MATRIX_16X8X16, MATRIX_16X16X16, Gpu
from kernels.device.module import Launches, Module
from kernels.device.occupancy import Occupancy, OccupancyError
from kernels.linear import gemv

H200 = Gpu(32, 132, MATRIX_16X8X16)
#: Registers of a thread and static shared memory, of sm_90 by NVRTC 13: head size, group, queries of a tile.
DECODE = {
    ("BF16", 64, 1, 8): (107, 4352), ("BF16", 64, 1, 16): (107, 7680), ("BF16", 64, 4, 8): (107, 4352),
    ("BF16", 64, 4, 16): (103, 7680), ("BF16", 64, 8, 8): (107, 4352), ("BF16", 64, 8, 16): (103, 7680),
    ("BF16", 80, 1, 8): (128, 5120),
}  # fmt: skip
#: The same of gemv.hip for bf16: kernel, rows.
GEMV = {
    ("gemv", 1): (62, 1088), ("gemv_wide", 1): (62, 1088), ("norm_gemv", 1): (64, 1120),
    ("norm_gated_gemv", 1): (64, 1120), ("gemv", 2): (78, 1152), ("gemv_wide", 2): (78, 1152),
    ("norm_gemv", 2): (78, 1184), ("norm_gated_gemv", 2): (77, 1184), ("gemv", 4): (80, 1280),
    ("gemv_wide", 4): (80, 1280), ("norm_gemv", 4): (80, 1312), ("norm_gated_gemv", 4): (80, 1312),
}  # fmt: skip


class Compiled(Module):
    """A module whose only kernel has handle 7."""

    def __init__(self) -> None:
        super().__init__(None)

    def function(self, name: str) -> int:
        return 7


def of_hopper(registers: int, static: int, threads: int, shared: int) -> int:
    """What fits on a multiprocessor of sm_90: 64 K registers, given by 256 to a warp; 228 KB, 1 KB for each block."""
    of_warp = -(-registers * 32 // 256) * 256
    return min(65536 // (of_warp * (threads // 32)), 2048 // threads, (228 << 10) // (static + shared + 1024), 32)


@pytest.mark.parametrize(("dtype", "head_dim", "group", "rows"), DECODE)
def test_decode_on_an_h200_as_measured(dtype: str, head_dim: int, group: int, rows: int) -> None:
    geometry = Geometry(2 * group, 2, head_dim, 16, 1, dtype, dtype)
    taken = DECODE[dtype, head_dim, group, rows]
    asked = Occupancy(lambda function, threads, shared: of_hopper(*taken, threads, shared), bounded=True)
    bound = decode_bound(geometry, H200, rows)
    assert asked.blocks(Compiled(), "attention_decode", 128, 0, bound) == bound == 4


@pytest.mark.parametrize(("kernel", "rows"), GEMV)
@pytest.mark.parametrize("shared", [0, gemv.NORMED_BYTES])
def test_gemv_on_an_h200_as_measured(kernel: str, rows: int, shared: int) -> None:
    taken = GEMV[kernel, rows]
    asked = Occupancy(lambda function, threads, shared: of_hopper(*taken, threads, shared), bounded=True)
    bound = gemv.BLOCKS[rows > 1]
    assert asked.blocks(Compiled(), kernel, gemv.THREADS, shared, bound) == bound


def test_more_blocks_than_the_compiler_was_asked_for_are_only_used_where_it_was_not() -> None:
    for bounded, expected in ((True, 4), (False, 7)):
        asked = Occupancy(lambda *_: 7, bounded)
        assert asked.blocks(Compiled(), "attention_decode", 256, 0, 4) == expected
    assert Occupancy(lambda *_: 1, bounded=True).blocks(Compiled(), "attention_decode", 256, 0, 4) == 1


def test_a_kernel_is_asked_for_once_and_after_a_refusal_none_is() -> None:
    asked: list[tuple[int, int, int]] = []

    def query(function: int, threads: int, shared: int) -> int:
        asked.append((function, threads, shared))
        if shared:
            raise OccupancyError("status 801")
        return 3

    occupancy, compiled = Occupancy(query, bounded=False), Compiled()
    assert [occupancy.blocks(compiled, "gemv", 256, 0, 4) for _ in range(2)] == [3, 3]
    assert [occupancy.blocks(compiled, "gemv", 256, shared, 4) for shared in (512, 1024, 0)] == [4, 4, 3]
    assert asked == [(7, 256, 0), (7, 256, 512)]
    assert occupancy.refused == "gemv: status 801"


def test_what_fits_is_planned_with_and_not_compiled_for() -> None:
    geometry = Geometry(8, 2, 128, 16, 1, "BF16", "BF16")
    gpu = Gpu(64, 304, MATRIX_16X16X16)
    asked: list[tuple[str, int]] = []

    def fits(compiled: Launches, kernel: str, threads: int, assumed: int) -> int:
        asked.append((kernel, threads))
        return 1 if kernel == "attention_prefill" else 2

    attention = Attention(lambda name, defines: Compiled(), geometry, gpu, 1.0)
    fitted = attention.fitted(fits, prefill=True)
    assert asked == [("attention_decode", 256), ("attention_prefill", 256)]
    assert (decode_cost(geometry, fitted, 16).at_once, prefill_cost(fitted).at_once) == (2, 1)
    assert (decode_cost(geometry, gpu, 16).at_once, prefill_cost(gpu).at_once) == (4, 2)
    # Blocks that do not fit share no bottleneck.
    assert (prefill_cost(fitted).enough, prefill_cost(gpu).enough) == (1, 2)
    before = attention.defines("attention_decode", 16)
    assert Attention(lambda *_: Compiled(), geometry, fitted, 1.0).defines("attention_decode", 16) == before
    assert attention.fitted(fits, prefill=False).prefill_fits == 0
