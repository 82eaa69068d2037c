"""Every kernel on this GPU against its definition in NumPy, each by itself, so that the one that hangs is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels import ops_numpy
from services.doctor.firstlight import step

#: ||found - expected|| / ||expected|| that roundings explain, by type.
BOUNDS = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}
STORED: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
EPS = 1e-5
HEADS, KV_HEADS, DIM, PAGE, LAYERS = 4, 2, 64, 16, 2


class Checks:
    """The kernels for one type of activations."""

    def __init__(self, asked: step.Asked, dtype: str) -> None:
        from kernels.ops_cupy import CupyOps

        self._dtype, self._asked = dtype, asked
        self._ops = CupyOps(asked.gpu, dtype, dtype, PAGE)
        self._rng = np.random.default_rng(1)

    def all(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Each kernel's name, and what computes its error."""
        yield "rms_norm", self._norm
        yield "silu_mul", self._silu
        yield "gather_rows", self._gather
        yield "gemv", lambda: self._product(2)
        yield "gemv, norm and activation", self._gated
        yield "a product of the library", lambda: self._product(40)
        yield "rope_write", self._rope
        yield "copy_pages and zero_pages", self._pages
        yield "pack_pages and unpack_pages", self._packed
        yield "write_int8", self._int8

    def _numbers(self, *shape: int) -> tuple[Any, NDArray[np.float32]]:
        """Random numbers on the device, and the same in float32."""
        stored = self._rng.standard_normal(shape, np.float32).astype(STORED[self._dtype])
        return self._ops.weight(stored, self._dtype), stored.astype(np.float32)

    def _host(self, array: Any) -> NDArray[np.float64]:
        import cupy

        host = cupy.asnumpy(array)
        return (host.view(ml_dtypes.bfloat16) if host.dtype == np.uint16 else host).astype(np.float64)

    def _error(self, found: Any, wanted: NDArray[Any]) -> float:
        return float(np.linalg.norm(self._host(found) - wanted) / np.linalg.norm(wanted))

    def _norm(self) -> float:
        (x, x_), (r, r_), (w, w_) = self._numbers(33, 1024), self._numbers(33, 1024), self._numbers(1024)
        found, total = self._ops.rms_norm(x, w, EPS, r)
        wanted, total_ = ops_numpy.rms_norm(x_, w_, EPS, r_)
        return max(self._error(found, wanted), self._error(total, total_))

    def _silu(self) -> float:
        x, x_ = self._numbers(17, 2 * 1032)
        return self._error(self._ops.silu_mul(x), ops_numpy.silu_mul(x_))

    def _gather(self) -> float:
        x, x_ = self._numbers(50, 96)
        rows = self._rng.integers(0, 50, 23)
        return self._error(self._ops.take(x, self._ops.indices(rows)), x_[rows])

    def _product(self, rows: int) -> float:
        (x, x_), (w, w_) = self._numbers(rows, 256), self._numbers(96, 256)
        return self._error(self._ops.linear(x, w, widen=True), x_ @ w_.T)

    def _gated(self) -> float:
        (x, x_), (n, n_), (w, w_) = self._numbers(1, 256), self._numbers(256), self._numbers(2 * 96, 256)
        found, _ = self._ops.norm_gated(x, n, EPS, w)
        normed, _ = ops_numpy.rms_norm(x_, n_, EPS)
        return self._error(found, ops_numpy.silu_mul(normed @ w_.T))

    def _arena(self, pages: int) -> tuple[Any, NDArray[np.float32]]:
        """Zeroed pages: the device's, and NumPy's."""
        import cupy

        shape = (pages, LAYERS, 2, KV_HEADS, PAGE, DIM)
        memory = cupy.empty((pages, int(np.prod(shape[1:])) * np.dtype(STORED[self._dtype]).itemsize), cupy.uint8)
        memory.data.memset(0, memory.nbytes)
        return self._ops.fitted(memory, LAYERS, KV_HEADS, DIM), np.zeros(shape, np.float32)

    def _kept(self, arena: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
        import cupy

        host: NDArray[Any] = cupy.asnumpy(arena.memory).reshape(-1).view(STORED[self._dtype])
        return host.reshape(shape).astype(np.float64)

    def _rope(self) -> float:
        count = 37
        qkv, qkv_ = self._numbers(count, HEADS + 2 * KV_HEADS, DIM)
        arena, pages = self._arena(4)
        page, slot = np.arange(count) // PAGE, np.arange(count) % PAGE
        frequencies = ops_numpy.rope_frequencies(DIM, 10000.0)
        positions = np.arange(count) + 5
        table, table_ = (ops.rope_table(frequencies, 64) for ops in (self._ops, ops_numpy))
        found = self._ops.rope_write_kv(
            qkv, self._ops.rotation(table, positions), arena, 1, self._ops.places(page, slot), HEADS
        )
        wanted = ops_numpy.rope_write_kv(
            qkv_, ops_numpy.rotation(table_, positions), pages, 1, ops_numpy.places(page, slot), HEADS
        )
        kept = self._kept(arena, pages.shape) - pages
        return max(self._error(found, wanted), float(np.linalg.norm(kept) / np.linalg.norm(pages)))

    def _pages(self) -> float:
        arena, _ = self._arena(6)
        numbers = self._rng.integers(0, 256, arena.memory.shape, np.uint8)
        arena.memory.set(numbers)
        self._ops.copy_pages(arena, [(0, 3), (1, 4)])
        self._ops.zero_page(arena, 5)
        numbers[[3, 4]], numbers[5] = numbers[[0, 1]], 0
        import cupy

        return float(np.count_nonzero(cupy.asnumpy(arena.memory) != numbers))

    def _packed(self) -> float:
        import cupy

        from kernels.device import module

        size, blocks = 3 * 4096, 2
        arena = cupy.asarray(self._rng.integers(0, 256, (5, size), np.uint8))
        before, numbers = cupy.asnumpy(arena), np.array([3, 1], np.int32)
        buffer, target = cupy.empty(2 * size, cupy.uint8), cupy.asarray(np.array([0, 4], np.int32))
        sizes = [np.int64(size), np.int32(blocks)]
        pages = module.load("pages")
        pages.launch("pack_pages", 2 * blocks, 256, [arena, cupy.asarray(numbers), buffer, *sizes])
        pages.launch("unpack_pages", 2 * blocks, 256, [arena, target, buffer, *sizes])
        packed, after = cupy.asnumpy(buffer).reshape(2, size), before.copy()
        after[[0, 4]] = before[numbers]
        return float(np.count_nonzero(packed != before[numbers]) + np.count_nonzero(cupy.asnumpy(arena) != after))

    def _int8(self) -> float:
        import cupy

        from kernels.ops_cupy import CupyOps

        ops, count = CupyOps(self._asked.gpu, self._dtype, "int8", PAGE), 37
        qkv, qkv_ = self._numbers(count, HEADS + 2 * KV_HEADS, DIM)
        shape = (3, LAYERS, 2, KV_HEADS, PAGE, DIM)
        values = int(np.prod(shape[1:]))
        memory = cupy.empty((3, values + 4 * LAYERS * 2 * KV_HEADS), cupy.uint8)
        memory.data.memset(0, memory.nbytes)
        arena = ops.fitted(memory, LAYERS, KV_HEADS, DIM)
        page, slot = np.arange(count) // PAGE, np.arange(count) % PAGE
        table = ops_numpy.rope_frequencies(DIM, 10000.0)
        angles = ops.rotation(ops.rope_table(table, 64), np.arange(count))
        ops.rope_write_kv(qkv, angles, arena, 1, ops.places(page, slot), HEADS)
        pages = np.zeros(shape, np.float32)
        turned = ops_numpy.rotation(ops_numpy.rope_table(table, 64), np.arange(count))
        ops_numpy.rope_write_kv(qkv_, turned, pages, 1, ops_numpy.places(page, slot), HEADS)
        bits = cupy.asnumpy(memory)
        numbers = bits[:, :values].copy().view(np.int8).reshape(shape).astype(np.float32)
        scales = bits[:, values:].copy().view(np.float32).reshape(shape[:4])
        # What is stored is rounded to one of 255 numbers.
        error = np.linalg.norm(numbers * scales[..., None, None] - pages) / np.linalg.norm(pages)
        return float(error) if error > BOUNDS["bf16"] else 0.0


def attention(report: step.Report, asked: step.Asked) -> None:
    """Decode and prefill of each type, with matrix units and without."""
    import cupy

    from kernels.attention import selftest
    from kernels.attention.plan import Geometry
    from kernels.device import module
    from kernels.device.gpu import NO_MATRIX, this_gpu

    cupy.cuda.Device(asked.gpu).use()
    gpu = this_gpu()
    device = selftest.CupyDevice(module.load)
    types = [("BF16", "BF16"), ("BF16", "INT8"), ("F16", "F16"), ("F32", "F32")][: asked.of(4, 3, 1)]
    for dtype, kv_dtype in types:
        # Each shape is six variants to compile: other shapes of one type.
        shapes = [(4, 128), (1, 64), (8, 128), (7, 96), (2, 256)][
            : asked.of(5, 1, 1) if dtype == kv_dtype == "BF16" else 1
        ]
        for group, dim in shapes if asked.timed else [(2, 64)]:
            geometry = Geometry(group, 1, dim, PAGE, 1, dtype, kv_dtype)
            name = f"attention, {dtype} with pages of {kv_dtype}, groups of {group}, heads of {dim}"
            report.begin(f"{name}, matrix units")
            verdict = selftest.tested(device, geometry, gpu)
            if verdict.state == "wrong":
                error = verdict.kernels[verdict.wrong]
                report.failed(
                    f"{name}: {verdict.wrong} with matrix units is wrong by {error:.2g}; engines will not use them"
                )
            elif verdict.state == "used":
                report.passed(f"{name}: right with matrix units")
            report.begin(f"{name}, scalar")
            scalar = replace(gpu, matrix=NO_MATRIX)
            bound = selftest.BOUNDS.get(dtype, 1e-4) if kv_dtype != "INT8" else selftest.BOUNDS["BF16"]
            errors = {
                "decode": selftest.error_of(device, geometry, scalar, 1, True),
                "decode, its keys split and combined": selftest.error_of(device, geometry, scalar, 1, True, 1000),
                "prefill": selftest.error_of(device, geometry, scalar, 40, False),
            }
            worst = max(errors, key=lambda kernel: errors[kernel] if errors[kernel] == errors[kernel] else np.inf)
            report.check(
                errors[worst] <= bound,
                f"{name}: right with the scalar kernels",
                f"{name}: {worst} with the scalar kernel is wrong by {errors[worst]:.2g}, rounding: {bound:g}",
            )


def sampling(report: step.Report, asked: step.Asked) -> None:
    """Every filter: the very tokens that NumPy draws."""
    import cupy

    from kernels.ops_cupy import CupyOps
    from kernels.sampling import reference
    from kernels.sampling.launch import Batch, settings

    rows, vocab = asked.of(64, 64, 3), asked.of(128256, 49152, 1027)
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 3
    sampler = CupyOps(asked.gpu, "f32", "f32", PAGE).sampler(vocab)
    filters: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.7},
        "top-k": {"top_k": 50},
        "top-p": {"top_p": 0.9},
        "min-p": {"min_p": 0.02},
        "top-k, top-p and log probabilities": {"top_k": 1000, "top_p": 0.99, "logprobs": 5},
    }
    for name, given in filters.items():
        report.begin(f"sampling, {name}")
        batch = Batch.of([settings(seed=row, **given) for row in range(rows)], list(range(rows)))
        wanted = reference.sample(logits, batch)
        found = sampler.sample(cupy.asarray(logits), batch)
        wrong = int(np.count_nonzero(found.tokens != wanted.tokens))
        report.check(
            not wrong,
            f"sampling, {name}: NumPy's tokens",
            f"sampling, {name}: {wrong} of {rows} tokens are not NumPy's",
        )


def body(report: step.Report, asked: step.Asked) -> None:
    """Compare."""
    for dtype in ("f32", "f16", "bf16") if asked.timed else ("f32",):
        checks = Checks(asked, dtype)
        for name, check in checks.all():
            report.begin(f"{name}, {dtype}")
            error = check()
            report.check(
                error <= BOUNDS[dtype],
                f"{name}, {dtype}: right",
                f"{name}, {dtype}: wrong by {error:.2g}, at most {BOUNDS[dtype]:g} is rounding",
            )
    attention(report, asked)
    sampling(report, asked)


if __name__ == "__main__":
    sys.exit(step.run(body))
