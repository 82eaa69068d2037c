"""Numbers as kernels store them, and how far from exact a result may be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kernels import ops_numpy

#: RF_TYPE and RF_KV by name; INT8 has its scales elsewhere.
TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

#: Bounds of `error` for one rounding to the type after a computation in float32: half its spacing at 1.
ROUNDED = {"F32": 1e-6, "F16": 2.0**-11, "BF16": 2.0**-8}


def normal(shape: tuple[int, ...], dtype: DTypeLike = np.float32, seed: int = 0) -> NDArray[Any]:
    """Standard normal numbers, rounded to ``dtype``."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def wide(values: ArrayLike) -> NDArray[np.float32]:
    """The values in float32."""
    return np.asarray(values).astype(np.float32)


def rope_angles(
    positions: NDArray[np.int64], head_dim: int, theta: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What rotates tokens at ``positions`` of a model that is not stretched: cosine and sine, ``[n, head_dim / 2]``."""
    table = ops_numpy.rope_table(ops_numpy.rope_frequencies(head_dim, theta), int(positions.max()) + 1)
    return ops_numpy.rotation(table, positions)


def error(found: ArrayLike, expected: ArrayLike) -> float:
    """The length of the difference over the length of ``expected``; NaN if a number is not finite."""
    exact = np.asarray(expected).astype(np.float64)
    return float(np.linalg.norm((np.asarray(found).astype(np.float64) - exact).ravel()) / np.linalg.norm(exact.ravel()))
