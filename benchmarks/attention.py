"""Paged attention on a GPU: bytes per second of decode and operations per second of prefill, against the GPU's limits.

Times are device times, as medians over replays of a captured graph of launches, each of which reads a different layer
of an arena larger than any cache. ``python -m benchmarks.attention`` prints a table; if torch is installed, it includes
torch's attention over contiguous keys and values. Other benchmarks call the functions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.attention.plan import BYTES, Attention, Geometry
from kernels.device import module
from kernels.device.gpu import Gpu, this_gpu

#: The fewest bytes that one round of launches reads: several times any cache.
ROUND_BYTES = 1 << 29
REPLAYS = 15
#: The warm-up before anything is timed: an idle GPU is slower at first.
WARM_MILLISECONDS = 40.0


@dataclass(frozen=True)
class Case:
    """``rows`` rows, each of ``new`` tokens after ``cached``."""

    name: str
    rows: int
    new: int
    cached: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "BF16"
    kv_dtype: str = "BF16"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one layer, each read once."""
        keys = self.rows * (self.cached + self.new)
        return keys * self.kv_heads * self.head_dim * 2 * BYTES[self.kv_dtype]

    @property
    def operations(self) -> int:
        """Multiplications and additions of the two products, over the keys that each query attends to."""
        seen = self.rows * (self.new * self.cached + self.new * (self.new + 1) // 2)
        return 4 * seen * self.query_heads * self.head_dim


CASES = (
    Case("decode", 64, 1, 4095),
    Case("decode, one long row", 1, 1, 32767),
    Case("decode, many short rows", 256, 1, 511),
    Case("decode, no groups", 64, 1, 4095, kv_heads=32),
    Case("decode, int8 pages", 64, 1, 4095, kv_dtype="INT8"),
    Case("decode, groups of 7", 64, 1, 4095, query_heads=28, kv_heads=4),
    Case("decode, groups of 16", 64, 1, 4095, query_heads=128),
    Case("decode, head of 64", 64, 1, 4095, head_dim=64),
    Case("decode, head of 80", 64, 1, 4095, query_heads=32, kv_heads=32, head_dim=80),
    Case("decode, head of 256", 64, 1, 4095, query_heads=16, head_dim=256),
    Case("decode, pages of 1", 64, 1, 4095, page_size=1),
    Case("decode, pages of 64", 64, 1, 4095, page_size=64),
    Case("decode, 4 tokens a row", 64, 4, 4092),
    Case("decode, f32", 64, 1, 2047, dtype="F32", kv_dtype="F32"),
    Case("prefill", 1, 2048, 6144),
    Case("prefill, nothing cached", 1, 8192, 0),
    Case("prefill, short chunk", 1, 256, 8192),
    Case("prefill, many short rows", 32, 128, 512),
    Case("prefill, int8 pages", 1, 2048, 6144, kv_dtype="INT8"),
    Case("prefill, head of 64", 1, 2048, 6144, head_dim=64),
    Case("prefill, head of 80", 1, 2048, 6144, kv_heads=32, head_dim=80),
    Case("prefill, head of 96", 1, 2048, 6144, head_dim=96),
    Case("prefill, head of 256", 1, 2048, 6144, query_heads=16, head_dim=256),
    Case("prefill, f32", 1, 1024, 1024, dtype="F32", kv_dtype="F32"),
)


def milliseconds(launch: Callable[[int], None], launches: int) -> float:
    """Return the median time of one of ``launch(0)`` to ``launch(launches - 1)``, replayed as a graph."""
    import cupy

    cupy.cuda.Device().synchronize()  # this stream may read what other streams still write
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for number in range(launches):
            launch(number)
        stream.synchronize()
        stream.begin_capture()
        for number in range(launches):
            launch(number)
        graph = stream.end_capture()

        def replay() -> float:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end))

        warm = 0.0
        while warm < WARM_MILLISECONDS:
            warm += replay()
        return statistics.median(replay() for _ in range(REPLAYS)) / launches


COPY = r"""
extern "C" __global__ void copy(const uint4 *source, uint4 *target) {
    long long at = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    uint4 held[4];
    for (int i = 0; i < 4; i++) held[i] = source[at + i * blockDim.x];
    for (int i = 0; i < 4; i++) target[at + i * blockDim.x] = held[i];
}
"""


def copy_bandwidth() -> float:
    """Bytes per second read and written by a copy of 2 GiB."""
    import cupy

    source = _random(1 << 30, "BF16")
    target = cupy.empty_like(source)
    kernel = cupy.RawKernel(COPY, "copy")
    blocks = source.nbytes // (16 * 4 * 256)
    return 2 * source.nbytes / milliseconds(lambda _: kernel((blocks,), (256,), (source, target)), 3) * 1e3


class Bench:
    """One case, its memory filled with random numbers."""

    def __init__(
        self, case: Case, load: Callable[[str, Mapping[str, str | int]], Any] = module.load, gpu: Gpu | None = None
    ) -> None:
        import cupy

        self.case = case
        self.layers = max(2, min(8, -(-ROUND_BYTES // case.kv_bytes)))
        self.geometry = Geometry(
            case.query_heads, case.kv_heads, case.head_dim, case.page_size, self.layers, case.dtype, case.kv_dtype
        )
        rng = np.random.default_rng(len(case.name))
        pages = -(-(case.cached + case.new) // case.page_size)
        self.tables = rng.permutation(case.rows * pages).astype(np.int32).reshape(case.rows, pages)
        self.pages = self._arena(case.rows * pages)
        tokens = case.rows * case.new
        self.q = _random(tokens * case.query_heads * case.head_dim, case.dtype)
        self.out = cupy.empty_like(self.q)
        self._tables = cupy.asarray(self.tables)
        self._gpu = gpu or this_gpu()
        self.replan(load)

    def replan(self, load: Callable[[str, Mapping[str, str | int]], Any]) -> None:
        """Switch to the kernels that ``load`` compiles, and plan again: to compare variants on the same memory."""
        import cupy

        case = self.case
        self.attention = Attention(load, self.geometry, self._gpu, 1 / math.sqrt(case.head_dim))
        self.plan = self.attention.plan(np.full(case.rows, case.cached), np.full(case.rows, case.new))
        packed = cupy.asarray(self.plan.packed)
        self._arrays = [packed[part] for part in self.plan.parts]
        self._scratch = [cupy.empty(max(1, count), cupy.float32) for count in self.attention.scratch(self.plan)]

    def launch(self, number: int) -> None:
        """Attention of one layer."""
        case = self.case
        self.attention.run(
            self.plan,
            self._arrays,
            self.q,
            case.query_heads * case.head_dim,
            self.pages,
            number % self.layers,
            self._tables,
            self.tables.shape[1],
            self.out,
            *self._scratch,
        )

    def milliseconds(self) -> float:
        """Device time of one layer."""
        return milliseconds(self.launch, self.layers)

    def error(self, queries: int = 24) -> float:
        """||out - expected|| / ||expected|| for some queries of the last layer, computed in float64."""
        import cupy

        case, layer = self.case, self.layers - 1
        self.out.view(cupy.uint8)[:] = 0xFF
        self.launch(layer)
        rng = np.random.default_rng(1)
        found, wanted = [], []
        shape = (-1, case.query_heads, case.head_dim)
        out, q = (_wide(array, case.dtype).reshape(shape) for array in (self.out, self.q))
        for _ in range(queries):
            row, token, head = rng.integers(case.rows), rng.integers(case.new), rng.integers(case.query_heads)
            k, v = (self._keys(int(row), layer, part, int(head) * case.kv_heads // case.query_heads) for part in (0, 1))
            seen = case.cached + int(token) + 1
            number = int(row * case.new + token)
            scores = k[:seen] @ q[number, head] / math.sqrt(case.head_dim)
            weights = cupy.exp(scores - scores.max())
            wanted.append((weights / weights.sum()) @ v[:seen])
            found.append(out[number, head])
        difference = cupy.linalg.norm(cupy.stack(found) - cupy.stack(wanted))
        return float(difference / cupy.linalg.norm(cupy.stack(wanted)))

    def _arena(self, pages: int) -> Any:
        import cupy

        case = self.case
        values = self.layers * 2 * case.kv_heads * case.page_size * case.head_dim
        if case.kv_dtype != "INT8":
            return _random(pages * values, case.kv_dtype)
        arena = cupy.empty((pages, self.geometry.page_bytes), cupy.uint8)
        arena[:, :values] = _random(pages * values, "INT8").view(cupy.uint8).reshape(pages, -1)
        scales = cupy.random.uniform(0.2, 2.0, (pages, (self.geometry.page_bytes - values) // 4)) / 127
        arena[:, values:] = scales.astype(cupy.float32).view(cupy.uint8)
        return arena

    def _keys(self, row: int, layer: int, part: int, head: int) -> Any:
        """K or V of a row, ``[keys, head_dim]`` in float64."""
        import cupy

        case, kind = self.case, _storage(self.case.kv_dtype)
        pages = cupy.asarray(self.tables[row])
        arena = self.pages.view(cupy.uint8).reshape(-1, self.geometry.page_bytes)[pages]
        shape = (len(pages), self.layers, 2, case.kv_heads, case.page_size, case.head_dim)
        values = math.prod(shape[1:])
        bits = arena[:, : values * BYTES[case.kv_dtype]].copy().view(kind).reshape(shape)[:, layer, part, head]
        wide = _wide(bits, case.kv_dtype)
        if case.kv_dtype == "INT8":
            scales = arena[:, values:].copy().view(cupy.float32).reshape(shape[:4])
            wide *= scales[:, layer, part, head, None, None]
        return wide.reshape(-1, case.head_dim)


def _storage(dtype: str) -> Any:
    return {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "INT8": np.int8}[dtype]


def _random(count: int, dtype: str) -> Any:
    import cupy

    if dtype == "INT8":
        return cupy.random.randint(-127, 128, count, dtype=cupy.int8)
    out = cupy.empty(count, _storage(dtype))
    for at in range(0, count, 1 << 26):
        normal = cupy.random.standard_normal(min(1 << 26, count - at), dtype=cupy.float32)
        # Truncated: half a unit in the last place does not matter here.
        out[at : at + normal.size] = (normal.view(cupy.uint32) >> 16) if dtype == "BF16" else normal
    return out


def _wide(array: Any, dtype: str) -> Any:
    import cupy

    if dtype == "BF16":
        return (array.astype(cupy.uint32) << 16).view(cupy.float32).astype(cupy.float64)
    return array.astype(cupy.float64)


def torch_milliseconds(case: Case, backend: str) -> float | None:
    """Time torch's attention of the same shape over contiguous K and V; None if ``backend`` does not support it."""
    import torch
    from torch.nn import attention
    from torch.nn.attention.bias import causal_lower_right

    keys = case.cached + case.new
    sets = max(2, min(4, -(-ROUND_BYTES // case.kv_bytes)))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[case.dtype]

    def tensor(heads: int, tokens: int) -> Any:
        return torch.randn(case.rows, heads, tokens, case.head_dim, device="cuda", dtype=dtype)

    q = tensor(case.query_heads, case.new)
    kv = [(tensor(case.kv_heads, keys), tensor(case.kv_heads, keys)) for _ in range(sets)]
    mask = causal_lower_right(case.new, keys) if case.new > 1 else None
    groups = case.query_heads != case.kv_heads

    def run(number: int) -> None:
        k, v = kv[number]
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups)

    try:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            for number in range(sets * 4):
                run(number % sets)
            times = []
            for _ in range(REPLAYS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for number in range(sets):
                    run(number)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / sets)
        return statistics.median(times)
    except RuntimeError:
        return None


def line(case: Case, milliseconds: float, copy: float) -> str:
    """Convert a time to a rate: bytes per second for decode, operations per second for prefill."""
    if case.new <= 16:
        rate = case.kv_bytes / milliseconds * 1e3
        return f"{milliseconds * 1e3:9.1f} us {rate / 1e12:6.2f} TB/s {rate / copy:5.0%} of copy"
    return f"{milliseconds * 1e3:9.1f} us {case.operations / milliseconds / 1e9:6.0f} TFLOP/s"


def main() -> None:
    """Print the table."""
    import cupy

    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s, read and written")
    try:
        import torch
    except ImportError:
        torch = None
    for case in CASES:
        bench = Bench(case)
        print(f"{case.name:26} {line(case, bench.milliseconds(), copy)}  error {bench.error():.1e}", flush=True)
        del bench
        cupy.get_default_memory_pool().free_all_blocks()
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if torch and case.kv_dtype == case.dtype else ():
            took = torch_milliseconds(case, backend)
            if took:
                print(f"  torch {backend.split('_')[0].lower():18}  {line(case, took, copy)}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
