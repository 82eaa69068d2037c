"""The properties of a GPU that determine kernel layout: wave size, multiprocessors, matrix units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Values of RF_MATRIX: scalar multiplications, NVIDIA's mma.sync, AMD's MFMA or WMMA.
NO_MATRIX, MATRIX_16X8X16, MATRIX_16X16X16 = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that determine kernel layout.

    ``matrix`` selects the matrix unit of common.h: `matrix_unit` of the target, or on a CPU any, for tests.
    ``decode_blocks``: blocks of `attention_decode` that a multiprocessor runs at a time, if that was tuned; else 0.
    ``decode_fits``, ``prefill_fits``: the blocks that fit at a time, by the runtime's occupancy query; of decode for
    each number of queries of a tile. Empty and 0 if they are not known.
    ``decode_scalar``, ``prefill_scalar``: the kernel leaves the matrix unit alone, which was measured to be faster.
    """

    wave: int
    processors: int
    matrix: int
    decode_blocks: int = 0
    decode_fits: tuple[tuple[int, int], ...] = ()
    prefill_fits: int = 0
    decode_scalar: bool = False
    prefill_scalar: bool = False

    def __post_init__(self) -> None:
        if self.wave not in (32, 64):
            raise ValueError(f"wave={self.wave}: must be 32 or 64")
        if self.processors < 1:
            raise ValueError(f"processors={self.processors}: must be at least 1")
        if self.decode_blocks < 0:
            raise ValueError(f"decode_blocks={self.decode_blocks}: must be at least 0")
        if self.matrix not in (NO_MATRIX, MATRIX_16X8X16, MATRIX_16X16X16):
            raise ValueError(f"matrix={self.matrix}: must be {NO_MATRIX}, {MATRIX_16X8X16} or {MATRIX_16X16X16}")
        if self.matrix == MATRIX_16X8X16 and self.wave != 32:
            raise ValueError(f"wave={self.wave}: multiply_16x8x16 needs waves of 32 lanes")


def matrix_unit(target: str) -> int:
    """Return the matrix unit of a compiler's target: ``sm_90``, or ``gfx942`` with or without features appended."""
    if target.startswith("sm_"):
        return MATRIX_16X8X16 if int(target.removeprefix("sm_").rstrip("af")) >= 80 else NO_MATRIX
    processor = target.split(":")[0]
    if processor in ("gfx90a", "gfx942", "gfx950") or processor.startswith(("gfx11", "gfx12")):
        return MATRIX_16X16X16
    return NO_MATRIX


def target_of(properties: Mapping[str, Any]) -> str:
    """Return the compiler's target without features, ``gfx942`` or ``sm_90``, of a device's properties."""
    arch = properties.get("gcnArchName", b"")
    if arch:
        return str(arch.decode().split(":")[0])
    return f"sm_{properties['major']}{properties['minor']}"


def target(device: int) -> str:
    """Return `target_of` CuPy's ``device``."""
    import cupy

    return target_of(cupy.cuda.runtime.getDeviceProperties(device))


def this_gpu(device: int | None = None, matrix: bool = True) -> Gpu:
    """Return CuPy's ``device``, by default the current one; without ``matrix``, as if it had no matrix unit."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id if device is None else device)
    unit = matrix_unit(target_of(properties)) if matrix else NO_MATRIX
    return Gpu(int(properties["warpSize"]), int(properties["multiProcessorCount"]), unit)
