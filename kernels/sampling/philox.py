"""Philox4x32-10, the counter-based generator of Salmon et al. (SC'11), vectorized over rows.

A draw is a function of (key, counter) alone. The generator has no state, so neither the batch nor the history of a
request can change a draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = np.uint64(0x9E3779B9)
_KEY_STEP_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32], rounds: int = 10) -> NDArray[np.uint32]:
    """Return uint32 ``[n, 4]`` for ``counter`` uint32 ``[n, 4]`` and ``key`` uint32 ``[n, 2]``."""
    # Words live in uint64 so that a 32 x 32 bit product keeps its high half.
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(rounds):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEP_0) & _LOW, (k1 + _KEY_STEP_1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def bits(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits, uint64 ``[n]``, for key ``seeds[i]`` and counter ``positions[i]``."""
    counter = np.zeros((len(positions), 4), np.uint32)
    counter[:, 0], counter[:, 1] = positions & _LOW, positions >> _HALF
    key = np.stack([seeds & _LOW, seeds >> _HALF], axis=1).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    return words[:, 1] << _HALF | words[:, 0]
