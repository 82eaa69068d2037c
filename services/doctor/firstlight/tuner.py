"""Which kernels are best on this GPU: attention with and without matrix units and by blocks of a multiprocessor, and
products of a few rows by our own kernel or the library's. What it finds it writes to the file that engines read.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from services.doctor.firstlight import step
from services.doctor.firstlight.bandwidth import seconds


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of ``rows`` rows of ``new`` tokens after ``cached``: ``heads`` kv heads of ``head_dim``, ``group``
    queries each; ``key`` as of `figures`."""

    key: str
    rows: int
    new: int
    cached: int
    group: int
    kv_dtype: str = "BF16"
    head_dim: int = 128
    heads: int = 8


#: Of models that people run.
CASES = (
    Case("decode-bf16-1", 64, 1, 4095, 1),
    Case("decode-bf16-4", 64, 1, 4095, 4),
    Case("decode-bf16-8", 64, 1, 4095, 8),
    Case("decode-bf16-16", 64, 1, 4095, 16),
    Case("decode-int8-4", 64, 1, 4095, 4, "INT8"),
    Case("decode-int8-8", 64, 1, 4095, 8, "INT8"),
    Case("prefill", 1, 2048, 6144, 4),
)
#: Each is a variant to compile, which takes seconds.
BLOCKS = {"full": (0, 2, 3, 4, 6), "quick": (0, 2, 6), "tiny": (0, 2)}
#: Rows, inputs, and rows of the weight: of a model of 8 G parameters.
PRODUCTS = ((1, 4096, 6144), (1, 4096, 4096), (1, 14336, 4096), (2, 4096, 4096), (4, 4096, 4096))
PRODUCT_BLOCKS = (2, 3, 4, 6, 8)
#: Bytes that are read before anything is read again.
ROUND = 1 << 29


def sized(case: Case, asked: step.Asked) -> Case:
    """The case as it is measured: on a CPU, of a few keys and heads."""
    if asked.timed:
        return case
    return replace(case, rows=2, new=min(case.new, 40), cached=min(case.cached, 40), heads=1, head_dim=64)


def cases(asked: step.Asked) -> list[Case]:
    """What is measured; on a CPU a few of them, of a few keys."""
    return [sized(case, asked) for case in CASES if asked.timed or case.key in ("decode-int8-4", "prefill")]


class Bench:
    """Attention of one case over random pages. ``gpu``: what it is planned and compiled for."""

    def __init__(self, case: Case, asked: step.Asked) -> None:
        import cupy
        import numpy as np

        from kernels.attention.plan import Geometry

        self.case = case
        keys = case.cached + case.new
        bytes_of_layer = case.rows * keys * case.heads * case.head_dim * (2 if case.kv_dtype == "INT8" else 4)
        self.kv_bytes = bytes_of_layer
        self.layers = min(8, max(2, -(-ROUND // bytes_of_layer))) if asked.timed else 1
        self.geometry = Geometry(
            case.heads * case.group, case.heads, case.head_dim, 16, self.layers, "BF16", case.kv_dtype
        )
        pages = -(-keys // 16)
        rng = np.random.default_rng(0)
        self._tables = cupy.asarray(rng.permutation(case.rows * pages).astype(np.int32).reshape(case.rows, pages))
        self._pages = _numbers(case.rows * pages * self.geometry.page_bytes // 2)
        self._q = _numbers(case.rows * case.new * case.heads * case.group * case.head_dim)
        self._out = cupy.empty_like(self._q)

    def seconds(self, gpu: Any, repeats: int) -> float:
        """Of a layer."""
        import cupy
        import numpy as np

        from kernels.attention.plan import Attention
        from kernels.device import module

        case = self.case
        attention = Attention(module.load, self.geometry, gpu, case.head_dim**-0.5)
        plan = attention.plan(np.full(case.rows, case.cached), np.full(case.rows, case.new))
        packed = cupy.asarray(plan.packed)
        parts = [packed[part] for part in plan.parts]
        scratch = [cupy.empty(max(1, count), cupy.float32) for count in attention.scratch(plan)]
        width = case.heads * case.group * case.head_dim

        def launch(number: int) -> None:
            columns = self._tables.shape[1]
            layer = number % self.layers
            attention.run(plan, parts, self._q, width, self._pages, layer, self._tables, columns, self._out, *scratch)

        return seconds(launch, self.layers, repeats)

    @property
    def operations(self) -> int:
        """Multiplications and additions of a layer."""
        case = self.case
        seen = case.rows * (case.new * case.cached + case.new * (case.new + 1) // 2)
        return 4 * seen * case.heads * case.group * case.head_dim


def _numbers(count: int) -> Any:
    """``count`` numbers of bfloat16 between 1 and 2, which are any bytes of int8, and scales between 1 and 2.

    What they are does not matter, that they are finite does.
    """
    import cupy

    block = (cupy.arange(min(count, 1 << 20), dtype=cupy.uint32) & 0x7F | 0x3F80).astype(cupy.uint16)
    numbers = cupy.empty(count, cupy.uint16)
    for at in range(0, count, len(block)):
        numbers[at : at + len(block)] = block[: count - at]
    return numbers


def body(report: step.Report, asked: step.Asked) -> None:
    """Try them all."""
    import cupy

    from kernels.attention import selftest
    from kernels.attention.plan import decode_matrix, prefill_matrix
    from kernels.device import module, tuning
    from kernels.device.gpu import NO_MATRIX, target, this_gpu

    cupy.cuda.Device(asked.gpu).use()
    gpu, repeats = this_gpu(), asked.of(9, 3, 1)
    attention: dict[tuple[str, str, int, int], tuple[bool, bool, int]] = {}
    for case in cases(asked):
        bench = Bench(case, asked)
        report.begin(f"the self-test of {case.key}")
        verdict = selftest.tested(selftest.CupyDevice(module.load), bench.geometry, gpu)
        if verdict.state == "wrong":
            report.failed(
                f"{verdict.wrong} is wrong on this GPU's matrix units by {verdict.kernels[verdict.wrong]:.2g}, "
                f"at most {verdict.bound:g} is rounding; engines use the scalar kernels"
            )
        decode = case.new == 1
        matrix_of = decode_matrix if decode else prefill_matrix
        units = {"scalar": NO_MATRIX}
        if matrix_of(bench.geometry, verdict.gpu) != NO_MATRIX:
            units["matrix units"] = verdict.gpu.matrix
        last = list(units)[-1]
        key = "BF16", case.kv_dtype, case.head_dim, case.group
        tried: list[tuple[float, bool, int]] = []
        for name, unit in units.items():
            report.begin(f"{case.key}, {name}")
            # Where there are matrix units for it, scalar decode is only set beside them.
            for blocks in BLOCKS[asked.size] if decode and unit == units[last] else (0,):
                took = bench.seconds(replace(gpu, matrix=unit, decode_blocks=blocks), repeats)
                tried.append((took, unit != NO_MATRIX, blocks))
            if not decode and asked.timed:
                rate = bench.operations / tried[-1][0] / 1e12
                kind = "prefill-matrix" if unit else "prefill-scalar"
                report.number(kind, f"prefill of 2048 behind 6144, {name}", round(rate, 1), "TFLOP/s")
        took, matrix, blocks = min(tried)
        how = f"{'matrix units' if matrix else 'scalar'}, {blocks or 'the default number of'} blocks a multiprocessor"
        before = attention.get(key, (True, True, 0))
        if decode:
            report.passed(f"{case.key}: best is {how}, {tried[0][0] / took:.2f} times as fast as the scalar default")
            attention[key] = before[0], matrix or len(units) == 1, blocks
        else:
            report.passed(f"{case.key}: best is {'matrix units' if matrix else 'scalar'}")
            attention[key] = matrix or len(units) == 1, *before[1:]
        del bench
        cupy.get_default_memory_pool().free_all_blocks()
    products = _products(report, asked, repeats)
    path, arch = step.tuning_path(target(asked.gpu)), target(asked.gpu)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(tuning.Tuning(attention, products).as_json(arch), encoding="utf-8")
    new.replace(path)
    tuning.read(path, arch)
    report.passed(f"{len(attention)} shapes of attention and {len(products)} products are in the tuning file, {path}")


def _products(report: step.Report, asked: step.Asked, repeats: int) -> dict[tuple[int, int, int, int], int]:
    """The best blocks of each product; 0 for the library."""
    import cupy

    from kernels.device import tuning
    from kernels.ops_cupy import CupyOps

    best: dict[tuple[int, int, int, int], int] = {}
    for rows, inputs, outputs in PRODUCTS if asked.timed else ((1, 64, 64), (2, 64, 64)):
        report.begin(f"a product of {rows} x {inputs} with {outputs} x {inputs}")
        count = max(2, ROUND // (2 * inputs * outputs)) if asked.timed else 1
        weights = [cupy.full((outputs, inputs), 0x3F80, cupy.uint16) for _ in range(count)]
        x = cupy.full((rows, inputs), 0x3F80, cupy.uint16)
        tried = []
        for blocks in (0, *PRODUCT_BLOCKS):
            key = rows, inputs, outputs, 2
            ops = CupyOps(asked.gpu, "bf16", "bf16", 16, tuned=tuning.Tuning({}, {key: blocks}))
            tried.append((seconds(lambda at: ops.linear(x, weights[at]), count, repeats), blocks))  # noqa: B023
        took, best[key] = min(tried)
        how = f"{best[key]} blocks a multiprocessor" if best[key] else "the library"
        fast = f"{tried[0][0] / took:.2f} times as fast as the library"
        report.passed(f"{rows} x {inputs} with {outputs} x {inputs}: best is {how}, {fast}")
        if asked.timed and (rows, inputs) == (1, 14336):
            report.number(
                "gemv", "product of 1 x 14336 with 4096 rows", round(2 * inputs * outputs / took / 1e12, 3), "TB/s"
            )
    return best


if __name__ == "__main__":
    sys.exit(step.run(body))
