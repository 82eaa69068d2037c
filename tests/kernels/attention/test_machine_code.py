"""Paged attention as AMD's machine code: without and with matrix units, on GPUs with waves of 64 and of 32 lanes."""

from __future__ import annotations

import itertools

import pytest

from kernels.attention.plan import HEAD_DIMS
from kernels.device.gpu import MATRIX_16X16X16, NO_MATRIX, Gpu
from tests.kernels import devices
from tests.kernels.attention.test_attention import CASES, HALF, TAILS, Case, check

UNITS = {"scalar": NO_MATRIX, "matrix": MATRIX_16X16X16}
#: RDNA 2 has no matrix unit.
ON = [(gpu, unit) for gpu in devices.MACHINES for unit in UNITS if unit == "scalar" or "gfx1030" not in gpu]
#: Every head size, with pages that are converted on the way to a matrix unit.
INT8 = [
    Case(((130, 21), (47, 18)), 6, 2, head_dim, 24, dtype, "INT8", processors=8)
    for head_dim, dtype in zip(HEAD_DIMS, itertools.cycle(["F16", "BF16"]), strict=False)
]
#: Prompts that begin anywhere in a page and end in the middle of one, in tiles that they do not fill.
CONVERTED = [Case(((0, 20), (20, 29), (75, 40)), 14, 2, 64, 16, "BF16", kv) for kv in ("F32", "F16", "INT8")]
ALL = [*CASES, *INT8, *CONVERTED, Case(((1300, 1), (190, 20)), dtype="F16", kv_dtype="F16", processors=24)]


@pytest.mark.parametrize(("device", "unit"), ON)
@pytest.mark.parametrize(("number", "case"), list(enumerate(ALL)), ids=lambda value: str(value))
def test_attention(device: str, unit: str, number: int, case: Case) -> None:
    on = devices.get(device)
    check(on, case, Gpu(on.wave, case.processors, UNITS[unit]), seed=number)


@pytest.mark.parametrize(("device", "unit"), ON)
@pytest.mark.parametrize("case", TAILS, ids=str)
def test_rows_of_more_tokens_than_a_tile_by_decoding(device: str, unit: str, case: Case) -> None:
    on = devices.get(device)
    check(on, case, Gpu(on.wave, case.processors, UNITS[unit]), rows=6)


@pytest.mark.parametrize(("device", "unit"), ON)
def test_scores_far_apart(device: str, unit: str) -> None:
    """Maxima that rise late and by more than the exponent range of a float."""
    on = devices.get(device)
    case = Case(((1300, 1), (190, 20)), dtype="F16", kv_dtype="F16", processors=24)
    check(on, case, Gpu(on.wave, 24, UNITS[unit]), spread=400.0)


@pytest.mark.parametrize(("device", "unit"), ON)
def test_heads_of_256_numbers(device: str, unit: str) -> None:
    on = devices.get(device)
    check(on, Case(((140, 9), (0, 3)), 8, 1, 256, 16, **HALF, processors=2), Gpu(on.wave, 2, UNITS[unit]))
