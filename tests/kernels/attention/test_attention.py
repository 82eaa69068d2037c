"""Paged attention kernels against their definition in float64, over pages whose unused places are poisoned."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.attention.plan import HEAD_DIMS, Attention, Geometry
from kernels.attention.plan import padded as padded_plan
from kernels.device import source
from kernels.device.gpu import MATRIX_16X8X16, MATRIX_16X16X16, NO_MATRIX, Gpu, matrix_unit, this_gpu
from tests.kernels import devices
from tests.kernels.device import amdgcn

F64 = NDArray[np.float64]
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "INT8": np.int8}
#: ||out - expected|| / ||expected|| of half of a last place at the output, the weights and, where K is rounded, there.
BOUNDS = {"F32": 2e-6, "F16": 1e-3, "BF16": 7e-3}


@dataclass(frozen=True)
class Case:
    """Rows are (tokens in the cache before, new tokens)."""

    rows: tuple[tuple[int, int], ...]
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "F32"
    kv_dtype: str = "F32"
    processors: int = 1

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.query_heads, self.kv_heads, self.head_dim, self.page_size, 2, self.dtype, self.kv_dtype)

    def __str__(self) -> str:
        heads = f"{self.query_heads}of{self.kv_heads}x{self.head_dim}"
        rows = "_".join(f"{start}+{count}" for start, count in self.rows)
        return f"{self.dtype}-{self.kv_dtype}-{heads}-page{self.page_size}-{rows}-on{self.processors}"


@dataclass
class Batch:
    """Inputs of one layer as the kernels take them, and the same numbers in float64."""

    q: NDArray[Any]  # [tokens, query_heads, head_dim]
    arena: NDArray[np.uint8]
    tables: NDArray[np.int32]
    k: list[F64]  # of each row: [keys, kv_heads, head_dim]
    v: list[F64]


LAYER = 1


def batch_of(case: Case, seed: int = 0, spread: float = 1.0) -> Batch:
    """Random queries of standard deviation ``spread``; keys and values in pages taken in random order."""
    rng = np.random.default_rng(seed)
    geometry, kind = case.geometry, DTYPES[case.kv_dtype]
    counts = [-(-(start + new) // case.page_size) for start, new in case.rows]
    spare = 2
    order = rng.permutation(sum(counts) + spare)
    # Columns behind a row's last page are never looked up: the page would be far outside.
    tables = np.full((len(counts), max(counts) + 1), 2**30, np.int32)
    shape = (len(order), 2, 2, case.kv_heads, case.page_size, case.head_dim)
    numbers = np.full(shape, -128, np.int8) if kind is np.int8 else np.full(shape, np.nan, kind)
    scales = np.full(shape[:4], np.nan, np.float32)
    batch = Batch(np.empty(0), np.empty(0, np.uint8), tables, [], [])
    for row, (start, new) in enumerate(case.rows):
        pages, order = order[: counts[row]], order[counts[row] :]
        tables[row, : counts[row]] = pages
        keys = start + new
        of_key = pages[np.arange(keys) // case.page_size], np.arange(keys) % case.page_size
        for part, wide in enumerate((batch.k, batch.v)):
            if kind is np.int8:
                scales[pages, LAYER, part] = rng.uniform(0.2, 2.0, (len(pages), case.kv_heads)) / 127
                values = rng.integers(-127, 128, (keys, case.kv_heads, case.head_dim)).astype(np.int8)
                wide.append(values.astype(np.float64) * scales[of_key[0], LAYER, part][:, :, None])
            else:
                values = rng.standard_normal((keys, case.kv_heads, case.head_dim)).astype(kind)
                wide.append(values.astype(np.float64))
            numbers[of_key[0], LAYER, part, :, of_key[1]] = values
    flat = numbers.reshape(len(numbers), -1).view(np.uint8)
    if kind is np.int8:
        flat = np.concatenate([flat, scales.reshape(len(scales), -1).view(np.uint8)], axis=1)
    assert flat.shape[1] == geometry.page_bytes
    batch.arena = np.ascontiguousarray(flat)
    tokens = sum(new for _, new in case.rows)
    batch.q = (rng.standard_normal((tokens, case.query_heads, case.head_dim)) * spread).astype(DTYPES[case.dtype])
    return batch


def expected(case: Case, batch: Batch, scale: float) -> F64:
    out, token = np.empty(batch.q.shape), 0
    for (start, new), k, v in zip(case.rows, batch.k, batch.v, strict=True):
        for position in range(start, start + new):
            for head in range(case.query_heads):
                of_kv = head // (case.query_heads // case.kv_heads)
                scores = k[: position + 1, of_kv] @ batch.q[token, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ v[: position + 1, of_kv]
            token += 1
    return out


def gpu_of(device: devices.Device, case: Case) -> Gpu:
    """Every device has a matrix unit. A CPU emulates it with shuffles: NVIDIA's in waves of 32 lanes, AMD's of 64."""
    return Gpu(device.wave, case.processors, MATRIX_16X8X16 if device.wave == 32 else MATRIX_16X16X16)


def computed(
    device: devices.Device, case: Case, batch: Batch, gpu: Gpu, scale: float, gap: int = 0, rows: int = 0
) -> NDArray[Any]:
    """``rows``: the plan is padded to this many, all of them decode rows."""
    attention = Attention(device.compile, case.geometry, gpu, scale)
    starts, lengths = np.array(case.rows).T
    plan = attention.plan(starts, lengths, decode_all=rows > 0)
    if rows:
        plan = padded_plan(plan, rows)
    partials, stats = (device.empty(max(1, count), np.float32) for count in attention.scratch(plan))
    tokens = len(batch.q)
    width = case.query_heads * case.head_dim
    padded = np.full((tokens, width + gap), np.nan, batch.q.dtype)
    padded[:, :width] = batch.q.reshape(tokens, width)
    out = device.empty(batch.q.shape, batch.q.dtype)
    attention.run(
        plan,
        [device.array(plan.packed[part]) for part in plan.parts],
        device.array(padded),
        width + gap,
        device.array(batch.arena),
        LAYER,
        device.array(batch.tables),
        batch.tables.shape[1],
        out,
        partials,
        stats,
    )
    return device.get(out)


def check(
    device: devices.Device, case: Case, gpu: Gpu | None = None, seed: int = 0, spread: float = 1.0, rows: int = 0
) -> None:
    batch = batch_of(case, seed, spread)
    scale = 1 / math.sqrt(case.head_dim)
    gap = 16 if seed % 2 else 0
    found = computed(device, case, batch, gpu or gpu_of(device, case), scale, gap, rows).astype(np.float64)
    wanted = expected(case, batch, scale)
    bound = BOUNDS["BF16" if case.kv_dtype == "INT8" and case.dtype == "F16" else case.dtype]
    errors = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted), f"{case}: {errors.round(5)}"
    # No single query may hide behind the others.
    assert errors.max() <= 3 * bound, f"{case}: {np.argwhere(errors > 3 * bound).tolist()}"


DECODE = ((0, 1), (15, 1), (16, 1), (299, 1), (63, 1))
MIXED = ((0, 1), (200, 1), (0, 37), (130, 5), (47, 18))
CHUNKS = ((0, 3), (140, 9))
HALF: dict[str, Any] = {"dtype": "BF16", "kv_dtype": "BF16"}

CASES = [
    # Every type of queries with every type of pages.
    *(Case(MIXED, dtype=dtype, kv_dtype=kv, processors=8) for dtype in BOUNDS for kv in DTYPES),
    # Every head size, with groups 1, 2, 4, 7 and 8, and pages of one token, some, and more than a step of keys.
    Case(DECODE, 2, 2, 80, 1, **HALF, processors=8),
    Case(CHUNKS, 4, 1, 80, 24, "BF16", "INT8", processors=4),
    Case(MIXED, 7, 1, 96, 64, **HALF, processors=4),
    Case(MIXED, 14, 2, 128, 16, **HALF, processors=4),
    Case(DECODE, 8, 1, 128, 16, "F16", "INT8", processors=8),
    Case(CHUNKS, 8, 1, 256, 16, **HALF, processors=2),
    Case(DECODE, 1, 1, 256, 3, "F16", "INT8", processors=8),
    Case(CHUNKS, 2, 1, 256, 24),
    # More heads to a kv head than a tile has queries, and tokens of which a tile has only a part.
    Case(((70, 1), (9, 3)), 40, 2, 64, 16, **HALF, processors=4),
    Case(((33, 1), (20, 8)), 12, 1, 64, 8, "F32", "INT8"),
]


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=lambda value: str(value))
def test_attention(number: int, case: Case) -> None:
    """Alternates between wave widths: every type and size runs on one of them, most on both."""
    check(devices.get(["cpu-w64-permuted", "cpu-w32-permuted"][number % 2]), case, seed=number)


@pytest.mark.parametrize("device", ["cpu-w64", "cpu-w32-permuted", "cupy"])
@pytest.mark.parametrize("processors", [1, 8])
def test_a_plan_that_is_made_up_to_a_size_changes_no_bit(device: str, processors: int) -> None:
    case = Case(DECODE, 8, 2, 128, 16, **HALF, processors=processors)
    on, batch = devices.get(device), batch_of(case)
    gpu, scale = gpu_of(on, case), 1 / math.sqrt(case.head_dim)
    found = computed(on, case, batch, gpu, scale, rows=13)
    assert (found.view(np.uint16) == computed(on, case, batch, gpu, scale).view(np.uint16)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_on_a_gpu(case: Case) -> None:
    device = devices.get("cupy")
    check(device, case, replace(this_gpu(), processors=case.processors), seed=3)


#: The last tokens of prompts beside rows that decode: tiles that are no whole tokens, and end before the row does.
TAILS = [
    Case(((48, 16), (200, 1), (0, 16), (130, 5)), 8, 2, 128, 16, **HALF, processors=8),
    Case(((300, 16),), 28, 4, 64, 24, "F16", "F16", processors=24),
    Case(((31, 9), (62, 9), (0, 1)), 7, 1, 96, 16, "F32", "F32"),
    Case(((70, 16), (9, 3)), 40, 2, 80, 3, **HALF, processors=4),
]


@pytest.mark.parametrize("name", ["cpu-w64-permuted", "cpu-w32-permuted", "cupy"])
@pytest.mark.parametrize("case", TAILS, ids=str)
def test_rows_of_more_tokens_than_a_tile_by_decoding(name: str, case: Case) -> None:
    device = devices.get(name)
    own = replace(this_gpu(), processors=case.processors) if name == "cupy" else gpu_of(device, case)
    units = {own.matrix, NO_MATRIX} - ({MATRIX_16X16X16} if own.wave == 64 else set())
    for matrix in sorted(units):
        check(device, case, replace(own, matrix=matrix), rows=6)


@pytest.mark.parametrize("kv_dtype", ["BF16", "INT8"])
@pytest.mark.parametrize("name", ["cpu-w64-sanitised", "cpu-w32"])
def test_nothing_else_is_touched(name: str, kv_dtype: str) -> None:
    check(devices.get(name), Case(MIXED, 14, 2, 80, 16, "BF16", kv_dtype, processors=4))


@pytest.mark.parametrize(
    ("name", "matrix", "kv_dtype"),
    [
        ("cpu-w32-permuted", NO_MATRIX, "BF16"),
        ("cpu-w32-permuted", MATRIX_16X16X16, "INT8"),
        ("cpu-gfx11", MATRIX_16X16X16, "BF16"),
        ("cpu-w64-permuted", NO_MATRIX, "INT8"),
    ],
)
def test_other_matrix_units(name: str, matrix: int, kv_dtype: str) -> None:
    """Waves of 32 lanes without a matrix unit, as of RDNA 2, and with AMD's, and RDNA 3's; of 64 lanes without."""
    device = devices.get(name)
    case = Case(MIXED, 14, 2, 96, 16, "BF16", kv_dtype, processors=4)
    check(device, case, Gpu(device.wave, case.processors, matrix))


@pytest.mark.parametrize("kv_dtype", ["F32", "F16", "INT8"])
@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("cpu-w64-optimised", MATRIX_16X16X16),
        ("cpu-w64-optimised", NO_MATRIX),
        ("cpu-w32-optimised", MATRIX_16X16X16),
        ("cpu-w32-optimised", MATRIX_16X8X16),
    ],
)
def test_pages_of_another_type_are_converted(name: str, matrix: int, kv_dtype: str) -> None:
    """On the way to each matrix unit, by a compiler that may move accesses of one type past those of another.

    Prompts that begin anywhere in a page and end in the middle of one, in tiles that they do not fill.
    """
    device = devices.get(name)
    case = Case(((0, 20), (20, 29), (75, 40)), 14, 2, 64, 16, "BF16", kv_dtype)
    check(device, case, Gpu(device.wave, case.processors, matrix))


@pytest.mark.parametrize(("head_dim", "dtype"), list(zip(HEAD_DIMS, itertools.cycle(["F16", "BF16"]), strict=False)))
@pytest.mark.parametrize("name", ["cpu-w64-permuted", "cpu-w32-permuted", "cpu-gfx11"])
def test_int8_pages_on_amd_matrix_units(name: str, head_dim: int, dtype: str) -> None:
    """Every head size, whole tiles and partial results of several items of a row."""
    device = devices.get(name)
    case = Case(((130, 21), (47, 18)), 6, 2, head_dim, 24, dtype, "INT8", processors=8)
    check(device, case, Gpu(device.wave, case.processors, MATRIX_16X16X16))


@pytest.mark.parametrize("processors", [1, 24])
@pytest.mark.parametrize("name", ["cpu-w32-permuted", "cpu-w64-permuted"])
def test_scores_far_apart(name: str, processors: int) -> None:
    """Maxima that rise late and by more than the exponent range of a float, within and across items."""
    device = devices.get(name)
    case = Case(((1300, 1), (190, 20)), dtype="F16", kv_dtype="F16", processors=processors)
    for gpu in (gpu_of(device, case), Gpu(device.wave, processors, NO_MATRIX)):
        check(device, case, gpu, spread=400.0)


@pytest.mark.parametrize("name", ["cpu-w32-permuted", "cpu-w64-permuted"])
def test_the_last_key_of_a_tile_is_the_first_hidden(name: str) -> None:
    device = devices.get(name)
    case = Case(((30, 9), (62, 9), (31, 9), (63, 9)), dtype="F16", kv_dtype="F16")
    for gpu in (gpu_of(device, case), Gpu(device.wave, 1, NO_MATRIX)):
        check(device, case, gpu)


def test_a_key_is_not_seen_from_before() -> None:
    """A later token's key and value change nothing for the tokens before it, in a tile that holds them all."""
    device = devices.get("cpu-w32")
    case = Case(((20, 12),), dtype="F16", kv_dtype="F16")
    batch = batch_of(case)
    before = computed(device, case, batch, gpu_of(device, case), 0.125)
    pages = batch.arena.view(np.float16).reshape(-1, 2, 2, case.kv_heads, case.page_size, case.head_dim)
    last = 31
    pages[batch.tables[0, last // 16], LAYER, :, :, last % 16] += 9
    after = computed(device, case, batch, gpu_of(device, case), 0.125)
    assert np.array_equal(before[:-1], after[:-1])
    assert not np.array_equal(before[-1], after[-1])


@pytest.mark.needs(*amdgcn.TOOLS)
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx942", "gfx1100", "gfx1201"])
def test_amd_matrix_units_compile(gpu: str, head_dim: int, tmp_path: Path) -> None:
    """The kernel that uses them, for the GPUs that have them; on RDNA, and with heads of 256 alone, it spills some
    registers, as README.md and docs/gpu.md say.
    """
    case = Case(MIXED, 32, 8, head_dim, **HALF)
    wave = amdgcn.WAVES[gpu]
    attention = Attention(devices.get("cpu-w32").compile, case.geometry, Gpu(wave, 1, matrix_unit(gpu)), 1.0)
    defines = {name: str(value) for name, value in attention.defines("attention_prefill").items()}
    assert defines["RF_MATRIX"] == "2"
    (kernel,) = amdgcn.Toolchain(tmp_path).compile(source.read("attention_prefill"), defines, gpu)
    assert kernel.wave == wave
    if head_dim == 256 and wave == 32:
        assert 0 < kernel.spilled <= 32
    else:
        assert (kernel.spilled, kernel.private_bytes) == (0, 0)
