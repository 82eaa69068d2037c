"""Whether attention by this GPU's matrix units is right: one tile of each kernel that uses them, against NumPy.

Which lane of a matrix unit holds which number differs between architectures, and a wrong layout gives wrong numbers, no
error. So before a model's attention uses them, each kernel that it was compiled to computes one tile on the device;
where one is wrong, the model gets the scalar kernels. A kernel that hangs cannot be survived here: the process hangs
with it (`docs/gpu.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kernels.attention.plan import Attention, Geometry, decode_matrix, decode_rows, max_decode_rows, prefill_matrix
from kernels.device.gpu import MATRIX_16X16X16, NO_MATRIX, Gpu
from kernels.device.module import Launches

#: ||out - expected|| / ||expected|| that roundings explain: three times what the kernels' tests allow, since a wrong
#: layout is off by about 1.
BOUNDS = {"F16": 3e-3, "BF16": 2e-2}
#: Keys in the cache before the tile's own; no multiple of a page, nor of a step of keys.
CACHED = 37
_STORED: dict[str, DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "INT8": np.int8}


class TriedDevice(Protocol):
    """What the test needs of a device."""

    def compile(self, name: str, defines: Mapping[str, str | int]) -> Launches:
        """Kernel ``name``, as `kernels.device.module.load`."""

    def array(self, values: ArrayLike) -> Any:
        """A copy of NumPy's array on the device."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of anything."""

    def get(self, array: Any) -> NDArray[Any]:
        """A copy of the device's array in NumPy, once all that was queued has run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test of a geometry found. ``gpu`` is what its attention is to be planned and compiled for.

    ``state``: ``none`` where no kernel of the geometry uses a matrix unit, ``used``, or ``wrong``. ``kernels``: the
    error of each kernel that was tried, by name; ``wrong`` names the first whose error exceeds ``bound``.
    """

    gpu: Gpu
    state: str
    kernels: dict[str, float]
    wrong: str = ""
    bound: float = 0.0
    #: Why the runtime did not say how many blocks fit, so that plans assume it; empty if it did.
    occupancy_refused: str = ""


def tested(device: TriedDevice, geometry: Geometry, gpu: Gpu) -> Verdict:
    """Try each kernel of ``geometry`` that uses a matrix unit of ``gpu``. Raises what compiling and launching raise."""
    if geometry.head_dim > 128 and gpu.matrix == MATRIX_16X16X16 and gpu.wave == 32:
        # RDNA's prefill with heads of 256 spills registers.
        gpu = replace(gpu, matrix=NO_MATRIX)
    bound = BOUNDS["BF16" if geometry.kv_dtype == "INT8" else geometry.dtype] if geometry.dtype in BOUNDS else 0.0
    errors: dict[str, float] = {}
    for kernel, new, decode_all in _tiles(geometry, gpu):
        errors[kernel] = error_of(device, geometry, gpu, new, decode_all)
        if not errors[kernel] <= bound:  # NaN is no less
            return Verdict(replace(gpu, matrix=NO_MATRIX), "wrong", errors, kernel, bound)
    return Verdict(gpu, "used" if errors else "none", errors, "", bound)


def _tiles(geometry: Geometry, gpu: Gpu) -> Iterator[tuple[str, int, bool]]:
    """The kernels that use a matrix unit: name, tokens of the row that has it run, and whether all rows decode."""
    if decode_matrix(geometry, gpu) != NO_MATRIX:
        compiled: dict[int, int] = {}
        for tokens in range(1, max_decode_rows(geometry, gpu) + 1):
            compiled.setdefault(decode_rows(geometry, gpu, tokens * geometry.group), tokens)
        for rows, tokens in compiled.items():
            yield f"attention_decode, tiles of {rows}", tokens, True
    if prefill_matrix(geometry, gpu) != NO_MATRIX:
        # A whole tile of queries, and a few of the next.
        yield (
            "attention_prefill",
            max(geometry.prefill_tile, max_decode_rows(geometry, gpu)) // geometry.group + 3,
            False,
        )


def error_of(
    device: TriedDevice, geometry: Geometry, gpu: Gpu, new: int, decode_all: bool, cached: int = CACHED
) -> float:
    """||out - expected|| / ||expected|| of a row of ``new`` tokens after ``cached`` others, of one kv head."""
    one = replace(geometry, query_heads=geometry.group, kv_heads=1, layers=1)
    rng = np.random.default_rng(new)
    scale = one.head_dim**-0.5
    q = rng.standard_normal((new, one.group, one.head_dim)).astype(_STORED[one.dtype])
    keys = cached + new
    pages = -(-keys // one.page_size)
    table = rng.permutation(pages).astype(np.int32)
    arena, k, v = _pages(one, rng, pages, table, keys)
    attention = Attention(device.compile, one, gpu, scale)
    plan = attention.plan(np.array([cached]), np.array([new]), decode_all=decode_all)
    out = device.empty(q.shape, q.dtype)
    partials, stats = (device.empty(max(1, count), np.float32) for count in attention.scratch(plan))
    parts = [device.array(plan.packed[part]) for part in plan.parts]
    width = one.query_heads * one.head_dim
    attention.run(
        plan, parts, device.array(q), width, device.array(arena), 0, device.array(table), pages, out, partials, stats
    )
    found, expected = device.get(out).astype(np.float64), _expected(q.astype(np.float64), k, v, cached, scale)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _pages(
    geometry: Geometry, rng: np.random.Generator, pages: int, table: NDArray[np.int32], keys: int
) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.float64]]:
    """An arena of random numbers, and K and V of ``keys`` tokens as ``table`` finds them, ``[keys, head_dim]``."""
    shape = (pages, 2, geometry.page_size, geometry.head_dim)
    if geometry.kv_dtype == "INT8":
        stored = rng.integers(-127, 128, shape).astype(np.int8)
        scales = (rng.uniform(0.2, 2.0, (pages, 2)) / 127).astype(np.float32)
        bits = [stored.reshape(pages, -1).view(np.uint8), scales.view(np.uint8)]
        wide = stored.astype(np.float64) * scales[:, :, None, None]
    else:
        stored = rng.standard_normal(shape).astype(_STORED[geometry.kv_dtype])
        bits, wide = [stored.reshape(pages, -1).view(np.uint8)], stored.astype(np.float64)
    k, v = (wide[table, part].reshape(-1, geometry.head_dim)[:keys] for part in (0, 1))
    return np.ascontiguousarray(np.concatenate(bits, axis=1)), k, v


def _expected(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], cached: int, scale: float
) -> NDArray[np.float64]:
    scores = np.einsum("tgd,kd->tgk", q, k) * scale
    hidden = np.arange(len(k))[None, :] > cached + np.arange(len(q))[:, None]
    scores = np.where(hidden[:, None, :], -math.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: NDArray[np.float64] = np.einsum("tgk,kd->tgd", weights / weights.sum(axis=-1, keepdims=True), v)
    return mixed


class CupyDevice:
    """CuPy's current device. Arrays are kept as bytes, since CuPy has no bfloat16."""

    def __init__(self, compile: Callable[[str, Mapping[str, str | int]], Launches]) -> None:
        import cupy

        self._cupy = cupy
        self._compile = compile
        self._kinds: dict[int, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def compile(self, name: str, defines: Mapping[str, str | int]) -> Launches:
        """See `TriedDevice`."""
        return self._compile(name, defines)

    def array(self, values: ArrayLike) -> Any:
        """See `TriedDevice`."""
        host = np.ascontiguousarray(values)
        made = self._cupy.asarray(host.reshape(-1).view(np.uint8))
        self._kinds[made.data.ptr] = host.shape, host.dtype
        return made

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        """See `TriedDevice`; all bytes are 0xFF, which is NaN: a kernel that writes nothing is wrong."""
        host = np.empty(shape, dtype)
        host.view(np.uint8).reshape(-1)[:] = 0xFF
        return self.array(host)

    def get(self, array: Any) -> NDArray[Any]:
        """See `TriedDevice`."""
        shape, dtype = self._kinds[array.data.ptr]
        found: NDArray[Any] = self._cupy.asnumpy(array).view(dtype).reshape(shape)
        return found
