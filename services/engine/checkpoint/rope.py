"""Rotary embeddings that were stretched to a longer context than a model was first trained with.

A kind of scaling is what it does to the frequencies, ``theta ** (-2i / head_dim)``: the angles that the pairs of
components turn by from one position to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.ops_numpy import rope_frequencies

F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """Positions are divided by ``factor`` (Chen et al., 2023, arXiv:2306.15595)."""

    factor: float

    def divisors(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """What each frequency is divided by."""
        return np.full(frequencies.shape, self.factor)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's: what turns slowly is divided by ``factor``, what turns fast is kept, with a ramp between.

    A pair that makes ``high`` turns or more within ``original_context`` tokens is kept, one that makes ``low`` or fewer
    is divided; between, both are mixed by the number of turns. As in ``apply_scaling`` of Meta's ``llama_models``
    (models/llama3/model.py).
    """

    factor: float
    low: float
    high: float
    original_context: int

    def divisors(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """What each frequency is divided by."""
        turns = self.original_context * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return 1.0 / (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class Divisors:
    """Each frequency is divided by a number of its own, ``[head_dim / 2]``, that the model's file has."""

    values: Sequence[float]

    def divisors(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """What each frequency is divided by. Raises ValueError when there are not as many."""
        if len(self.values) != len(frequencies):
            raise ValueError(f"{len(self.values)} divisors of rotary frequencies do not go with {len(frequencies)}")
        return np.array(self.values, np.float64)


Scaling: TypeAlias = Linear | Llama3 | Divisors


def frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> F32:
    """Return the frequencies of a model, ``[head_dim / 2]``, scaled in float64 from those it was first trained with."""
    plain = rope_frequencies(head_dim, theta)
    if scaling is None:
        return plain
    wide = plain.astype(np.float64)
    scaled: F32 = (wide / scaling.divisors(wide)).astype(np.float32)
    return scaled
