"""Every kernel on a GPU, against the bandwidth of a plain copy in the same run.

Times are device times: medians over replays of a captured graph of launches that cycle through more memory than any
cache holds. A kernel's bytes are the minimum that it must move, each counted once. `benchmarks.attention` covers
attention, against torch's. The last rows involve two processes: an engine attaching to a daemon's memory, and the first
launch on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import attention
from benchmarks.attention import Bench, Case, copy_bandwidth, milliseconds, torch_milliseconds
from kernels.ops_cupy import Angles, Arena, CupyOps, Places
from kernels.sampling import launch as sampling

ROOT = Path(__file__).resolve().parents[1]
#: The fewest bytes that one round of launches moves.
ROUND_BYTES = 1 << 30
HIDDEN, INNER, QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGE_SIZE = 4096, 14336, 32, 8, 128, 32, 16
TOKENS = 8192
ATTACHES = 20

#: Bars: the share of the ceiling, copy bandwidth or torch's time, that a row must reach.
MOVING, DECODE, OTHER_DECODE, PRODUCT = 0.85, 0.85, 0.75, 0.80
BARS = {"decode": DECODE, "decode, one long row": OTHER_DECODE, "decode, many short rows": OTHER_DECODE,
        "decode, no groups": OTHER_DECODE, "decode, int8 pages": OTHER_DECODE}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """``us`` of device time; ``tbps``: TB/s of the minimum bytes, and ``share`` of a copy's bandwidth.

    ``tflops`` where the kernel is compute-bound. ``bar``: the least ``share`` required, if any.
    """

    kernel: str
    shape: str
    us: float
    tbps: float | None = None
    share: float | None = None
    tflops: float | None = None
    bar: float | None = None

    @property
    def missed(self) -> bool:
        """Whether it is below its bar."""
        return self.bar is not None and (self.share or 0) < self.bar


class Elementwise:
    """Bandwidth-bound kernels, on the shapes of a model of 8 billion parameters, in bfloat16."""

    def __init__(self, copy: float) -> None:
        self._copy = copy
        self._ops = CupyOps(0, "bf16", "bf16", PAGE_SIZE)
        self._page_bytes = LAYERS * 2 * KV_HEADS * PAGE_SIZE * HEAD_DIM * 2

    def rows(self) -> Iterator[Row]:
        """All of them."""
        yield self._norm()
        yield self._silu()
        yield self._kv_write()
        yield self._page_copy()
        yield from self._packing()
        yield self._gather()
        yield self._product("gemv", INNER, HIDDEN, lambda x, w: self._ops.linear(x, w))
        yield self._normed_product()

    def _time(
        self, kernel: str, shape: str, moved: int, launch: Callable[[int], Any], sets: int, bar: float = MOVING
    ) -> Row:
        kept: dict[int, Any] = {}

        def held(number: int) -> None:
            # A freed result's memory would be reused at once: outputs must cycle through memory, too.
            kept[number] = launch(number)

        took = milliseconds(held, sets)
        rate = moved / took * 1e3
        return Row(kernel, shape, round(took * 1e3, 1), round(rate / 1e12, 3), round(rate / self._copy, 3), bar=bar)

    @staticmethod
    def _filled(shape: tuple[int, ...]) -> Any:
        """Bits of bfloat16 between 1 and 2: any finite values will do."""
        import cupy

        return cupy.random.randint(0x3F80, 0x3FFF, shape, dtype=cupy.uint16)

    def _sets(self, moved: int) -> int:
        return max(2, -(-ROUND_BYTES // moved))

    def _norm(self) -> Row:
        moved = 4 * TOKENS * HIDDEN * 2
        count = self._sets(moved)
        sets = [(self._filled((TOKENS, HIDDEN)), self._filled((TOKENS, HIDDEN))) for _ in range(count)]
        weight = self._filled((HIDDEN,))
        shape = f"{TOKENS} x {HIDDEN}, with residual"
        return self._time(
            "rms_norm", shape, moved, lambda n: self._ops.rms_norm(sets[n][0], weight, 1e-5, sets[n][1]), count
        )

    def _silu(self) -> Row:
        moved = 3 * TOKENS * INNER * 2
        count = self._sets(moved)
        sets = [self._filled((TOKENS, 2 * INNER)) for _ in range(count)]
        return self._time("silu_mul", f"{TOKENS} x {INNER}", moved, lambda n: self._ops.silu_mul(sets[n]), count)

    def _kv_write(self) -> Row:
        import cupy

        heads = QUERY_HEADS + 2 * KV_HEADS
        # Reads queries, keys and values; writes queries, and keys and values into their pages.
        moved = TOKENS * heads * HEAD_DIM * 2 * 2
        count = min(self._sets(moved), LAYERS)
        sets = [self._filled((TOKENS, heads, HEAD_DIM)) for _ in range(count)]
        pages = TOKENS // PAGE_SIZE
        arena = Arena(cupy.empty((pages, self._page_bytes), cupy.uint8), PAGE_SIZE, LAYERS, KV_HEADS, HEAD_DIM)
        order = np.random.default_rng(0).permutation(pages)
        page, slot = np.repeat(order, PAGE_SIZE), np.tile(np.arange(PAGE_SIZE), pages)
        places: Places = self._ops.places(page, slot)
        frequencies = np.linspace(1, 1e-4, HEAD_DIM // 2, dtype=np.float32)
        angles: Angles = self._ops.rotation(self._ops.rope_table(frequencies, TOKENS), np.arange(TOKENS))

        def launch(number: int) -> None:
            self._ops.rope_write_kv(sets[number], angles, arena, number, places, QUERY_HEADS)

        shape = f"{TOKENS} tokens, {QUERY_HEADS} query and {KV_HEADS} kv heads of {HEAD_DIM}"
        return self._time("rope and KV write", shape, moved, launch, count)

    def _arena(self, pages: int) -> Arena:
        import cupy

        memory = cupy.empty((pages, self._page_bytes), cupy.uint8)
        memory.data.memset(1, memory.nbytes)
        return Arena(memory, PAGE_SIZE, LAYERS, KV_HEADS, HEAD_DIM)

    def _page_copy(self) -> Row:
        import cupy

        from kernels.device import module
        from kernels.ops_cupy import COPIED, THREADS

        pages, count = 512, 4
        arena = self._arena(pages * 2)
        rng = np.random.default_rng(0)
        pairs = [cupy.asarray(rng.permutation(pages * 2).astype(np.int32).reshape(pages, 2)) for _ in range(count)]
        blocks = -(-self._page_bytes // (THREADS * COPIED))

        def launch(number: int) -> None:
            arguments = [arena.memory, pairs[number], np.int64(self._page_bytes), np.int32(blocks)]
            module.load("pages").launch("copy_pages", pages * blocks, THREADS, arguments)

        return self._time("copy_pages", f"{pages} pages of {self._page_bytes} bytes", 2 * pages * self._page_bytes,
                          launch, count)  # fmt: skip

    def _packing(self) -> Iterator[Row]:
        import cupy

        from kernels.device import module
        from kernels.ops_cupy import COPIED, THREADS

        pages, count = 512, 4
        arena = self._arena(pages * 2)
        buffer = cupy.empty(pages * self._page_bytes, cupy.uint8)
        rng = np.random.default_rng(0)
        numbers = [cupy.asarray(rng.permutation(pages * 2)[:pages].astype(np.int32)) for _ in range(count)]
        blocks = -(-self._page_bytes // (THREADS * COPIED))
        for kernel in ("pack_pages", "unpack_pages"):

            def launch(number: int, kernel: str = kernel) -> None:
                arguments = [arena.memory, numbers[number], buffer, np.int64(self._page_bytes), np.int32(blocks)]
                module.load("pages").launch(kernel, pages * blocks, THREADS, arguments)

            shape = f"{pages} pages of {self._page_bytes} bytes"
            yield self._time(kernel, shape, 2 * pages * self._page_bytes, launch, count)

    def _product(self, kernel: str, inputs: int, outputs: int, multiply: Callable[[Any, Any], Any]) -> Row:
        moved = 2 * inputs * outputs
        count = self._sets(moved)
        x, weights = self._filled((1, inputs)), [self._filled((outputs, inputs)) for _ in range(count)]
        shape = f"1 x {inputs}, to {outputs}"
        return self._time(kernel, shape, moved, lambda n: multiply(x, weights[n]), count, PRODUCT)

    def _normed_product(self) -> Row:
        residual, norm = self._filled((1, HIDDEN)), self._filled((HIDDEN,))

        def multiply(x: Any, weight: Any) -> Any:
            return self._ops.norm_gated(x, norm, 1e-5, weight, residual)

        return self._product("gemv, norm and activation", HIDDEN, 2 * INNER, multiply)

    def _gather(self) -> Row:
        vocab = 128256
        table = self._filled((vocab, HIDDEN))
        rng = np.random.default_rng(0)
        moved = 2 * TOKENS * HIDDEN * 2
        count = self._sets(moved)
        numbers = [self._ops.indices(rng.integers(0, vocab, TOKENS)) for _ in range(count)]
        shape = f"{TOKENS} rows of {HIDDEN}"
        return self._time("gather_rows", shape, moved, lambda n: self._ops.take(table, numbers[n]), count)


def sampling_rows(copy: float) -> Iterator[Row]:
    """Drawing a token from each row of logits; counts one read of them."""
    import cupy

    from kernels.device import module

    class Device:
        """CuPy, as the sampler expects it."""

        def compile(self, name: str, defines: Any) -> Any:
            return module.load(name, defines)

        def array(self, values: Any) -> Any:
            return cupy.asarray(np.ascontiguousarray(values))

        def empty(self, shape: int, dtype: Any) -> Any:
            return cupy.empty(shape, dtype)

        def get(self, array: Any) -> Any:
            return cupy.asnumpy(array)

        def fetch(self, array: Any) -> Any:
            return lambda: self.get(array)

    rows, vocab = 256, 128256
    sampler = sampling.Sampler(Device(), "F32", vocab)
    logits = cupy.random.standard_normal((rows, vocab), dtype=cupy.float32) * 3
    for name, given in (
        ("greedy", {"temperature": 0.0}),
        ("temperature 1", {}),
        ("top-k 50, top-p 0.9", {"top_k": 50, "top_p": 0.9}),
        ("temperature 1, 5 logprobs", {"logprobs": 5}),
    ):
        batch = sampling.Batch.of([sampling.settings(seed=7, **given)] * rows, list(range(rows)))
        took = []
        for _ in range(20):
            cupy.cuda.Device().synchronize()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            pending = sampler.start(logits, batch)
            end.record()
            end.synchronize()
            pending.wait()
            took.append(cupy.cuda.get_elapsed_time(start, end))
        once = statistics.median(took)
        rate = logits.nbytes / once * 1e3
        yield Row(f"sampling, {name}", f"{rows} x {vocab}", round(once * 1e3, 1), round(rate / 1e12, 3),
                  round(rate / copy, 3))  # fmt: skip


def attention_row(name: str, case: Case, took: float, copy: float, *, barred: bool) -> Row:
    """A time as a row: with bytes for few new tokens, with operations otherwise."""
    shape = f"{case.rows} x ({case.new} on {case.cached}), {case.query_heads}/{case.kv_heads} x {case.head_dim}"
    shape += f", {case.kv_dtype.lower()} pages of {case.page_size}"
    if case.new > 16:
        return Row(name, shape, round(took * 1e3, 1), tflops=round(case.operations / took / 1e9, 1))
    rate = case.kv_bytes / took * 1e3
    bar = BARS.get(case.name) if barred else None
    return Row(name, shape, round(took * 1e3, 1), round(rate / 1e12, 3), round(rate / copy, 3), bar=bar)


def attention_rows(copy: float) -> Iterator[Row]:
    """Our attention, and torch's over contiguous K and V if torch is installed."""
    import cupy

    try:
        import torch
    except ImportError:
        torch = None
    for case in attention.CASES:
        bench = Bench(case)
        yield attention_row(case.name, case, bench.milliseconds(), copy, barred=True)
        del bench
        cupy.get_default_memory_pool().free_all_blocks()
        if torch is None or case.name not in ("decode", "prefill"):
            continue
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            if took := torch_milliseconds(case, backend):
                name = f"{case.name}, torch {backend.split('_')[0].lower()}, contiguous"
                yield attention_row(name, case, took, copy, barred=False)
            torch.cuda.empty_cache()


def attach_rows() -> Iterator[Row]:
    """Milliseconds from opening a session until its memory is verified, and of the first launch on it."""
    import cupy

    from rocmforge.client.arena.gpu_ipc import Runtime
    from services.engine.model.backend import Backend
    from services.engine.pages.daemon import GrpcPageSource
    from services.engine.pages.source import PageLayout
    from services.healthcheck import wait_serving

    geometry = PageLayout(PAGE_SIZE, LAYERS, KV_HEADS, HEAD_DIM, "bf16")
    ops = CupyOps(0, "bf16", "bf16", PAGE_SIZE)
    with tempfile.TemporaryDirectory(prefix="rf-bench-") as name:
        address = f"unix:{name}/k.sock"
        command = [sys.executable, "-m", "services.kvcache", "--listen", address, "--device", "gpu", "--memory", "8GiB"]
        daemon = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_serving(address, alive=lambda: daemon.poll() is None, timeout_s=60)
            source = GrpcPageSource(address, "bench", geometry, pool_pages=2048, gpu=Runtime.load().gpu(0))
            attaches, firsts = list[float](), list[float]()
            for _ in range(ATTACHES):
                began = time.perf_counter()
                source.reopen()
                attached = time.perf_counter()
                view = ops.fitted(Backend.view(source.memory), LAYERS, KV_HEADS, HEAD_DIM)
                ops.zero_page(view, 2047)
                cupy.cuda.Device().synchronize()
                firsts.append(time.perf_counter() - attached)
                attaches.append(attached - began)
                del view
            source.close()
        finally:
            daemon.terminate()
            daemon.wait(30)
    shape = "4 GiB of pages, daemon in another process"
    # The first one loads libraries and creates the arena.
    yield Row("attach, the first", shape, round(attaches[0] * 1e6, 1))
    yield Row("attach, later ones", shape, round(statistics.median(attaches[1:]) * 1e6, 1))
    yield Row("first launch after it", "zero_page, host time", round(statistics.median(firsts[1:]) * 1e6, 1))


def plot(rows: list[Row], path: Path) -> None:
    """Plot the shares with their bars, and operations per second. Needs matplotlib, which is in the extra ``bench``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    moving = [row for row in rows if row.share is not None and row.us]
    computing = [row for row in rows if row.tflops is not None]
    sizes = {"height_ratios": [len(moving), len(computing)]}
    figure, (left, right) = pyplot.subplots(2, 1, figsize=(8, 0.26 * len(rows) + 1.5), gridspec_kw=sizes)
    for axes, kept, values in (
        (left, moving, [row.share or 0 for row in moving]),
        (right, computing, [row.tflops or 0 for row in computing]),
    ):
        colours = ["tab:gray" if "torch" in row.kernel else "tab:blue" for row in kept]
        axes.barh([row.kernel for row in kept], values, color=colours)
        axes.invert_yaxis()
        axes.grid(True, axis="x", alpha=0.3)
    for place, row in enumerate(moving):
        if row.bar is not None:
            left.plot([row.bar, row.bar], [place - 0.45, place + 0.45], color="tab:red")
    left.set_xlabel("share of what a copy moves; red: what is demanded")
    right.set_xlabel("TFLOP/s")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    """Returns the exit status: 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows too")
    flags = parser.parse_args()
    # Clocks take a moment to rise; the ceiling is the best rate observed.
    copy = max(copy_bandwidth() for _ in range(4))
    rows = [Row("copy", "2 GiB, read and written", 0.0, round(copy / 1e12, 3), 1.0)]
    print_row(rows[0], as_json=flags.json, first=True)
    everything = itertools.chain(Elementwise(copy).rows(), sampling_rows(copy), attention_rows(copy), attach_rows())
    for row in everything:
        rows.append(row)
        print_row(row, as_json=flags.json)
    if flags.plot is not None:
        plot(rows, flags.plot)
    missed = [row.kernel for row in rows if row.missed]
    if missed:
        print(f"below their bars: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def print_row(row: Row, *, as_json: bool, first: bool = False) -> None:
    """One line."""
    if as_json:
        print(json.dumps(dataclasses.asdict(row)), flush=True)
        return
    if first:
        print(f"{'kernel':34} {'us':>10} {'TB/s':>7} {'of copy':>8} {'bar':>5} {'TFLOP/s':>8}  shape")
    shown = [
        f"{row.us:10.1f}",
        f"{row.tbps:7.3f}" if row.tbps is not None else " " * 7,
        f"{row.share:8.3f}" if row.share is not None else " " * 8,
        f"{row.bar:5.2f}" if row.bar is not None else " " * 5,
        f"{row.tflops:8.1f}" if row.tflops is not None else " " * 8,
    ]
    print(f"{row.kernel:34} {' '.join(shown)}  {row.shape}{'  MISSED' if row.missed else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
