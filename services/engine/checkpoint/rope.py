"""Rotary embeddings that were stretched to a longer context than a model was first trained with.

A kind of scaling is what it does to the frequencies, ``theta ** (-2i / head_dim)``: the angles that the pairs of
components turn by from one position to the next. All of it is float32, one operation after another in the order of the
code that models are trained with: a last bit of a frequency is seen in the logits some thousand tokens on.
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

    def scaled(self, frequencies: F32) -> F32:
        """What becomes of the frequencies, ``[head_dim / 2]``."""
        return frequencies / np.float32(self.factor)


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

    def scaled(self, frequencies: F32) -> F32:
        """What becomes of the frequencies, ``[head_dim / 2]``."""
        one, factor = np.float32(1), np.float32(self.factor)
        # A number divided by a tensor is, in torch, the number times the tensor's reciprocal.
        wavelengths = one / frequencies * np.float32(2 * math.pi)
        turns = one / wavelengths * np.float32(self.original_context)
        kept = (turns - np.float32(self.low)) / np.float32(self.high - self.low)
        mixed = (one - kept) * frequencies / factor + kept * frequencies
        slow = wavelengths > np.float32(self.original_context / self.low if self.low else math.inf)
        fast = wavelengths < np.float32(self.original_context / self.high)
        return np.where(slow, frequencies / factor, np.where(fast, frequencies, mixed))


@dataclass(frozen=True, slots=True)
class Divisors:
    """Each frequency is divided by a number of its own, ``[head_dim / 2]``, that the model's file has."""

    values: Sequence[float]

    def scaled(self, frequencies: F32) -> F32:
        """What becomes of the frequencies, ``[head_dim / 2]``. Raises ValueError when there are not as many."""
        if len(self.values) != len(frequencies):
            raise ValueError(f"{len(self.values)} divisors of rotary frequencies do not go with {len(frequencies)}")
        divisors: F32 = np.array(self.values, np.float32)
        return frequencies / divisors


Scaling: TypeAlias = Linear | Llama3 | Divisors


def frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> F32:
    """Return the frequencies of a model, ``[head_dim / 2]``, scaled from those it was first trained with."""
    plain = rope_frequencies(head_dim, theta)
    return plain if scaling is None else scaling.scaled(plain)
