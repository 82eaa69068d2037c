"""RoPE scaling: rotary embeddings extended beyond the context that a model was first trained with.

Scaling modifies the frequencies, ``theta ** (-2i / head_dim)``: the angles by which component pairs rotate per
position. Everything is float32, in the operation order of the training code: an error in the last bit of a frequency
becomes visible in the logits after some thousand tokens.
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
        """Returns the scaled frequencies, ``[head_dim / 2]``."""
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1 scaling: low frequencies are divided by ``factor``, high ones are kept, with a ramp in between.

    A pair that rotates ``high`` times or more within ``original_context`` tokens is kept; one that rotates ``low``
    times or less is divided; in between, the two are interpolated by the number of rotations. As in ``apply_scaling``
    of Meta's ``llama_models`` (models/llama3/model.py).
    """

    factor: float
    low: float
    high: float
    original_context: int

    def scaled(self, frequencies: F32) -> F32:
        """Returns the scaled frequencies, ``[head_dim / 2]``."""
        one, factor = np.float32(1), np.float32(self.factor)
        # torch computes scalar / tensor as the scalar times the tensor's reciprocal.
        wavelengths = one / frequencies * np.float32(2 * math.pi)
        turns = one / wavelengths * np.float32(self.original_context)
        kept = (turns - np.float32(self.low)) / np.float32(self.high - self.low)
        mixed = (one - kept) * frequencies / factor + kept * frequencies
        slow = wavelengths > np.float32(self.original_context / self.low if self.low else math.inf)
        fast = wavelengths < np.float32(self.original_context / self.high)
        return np.where(slow, frequencies / factor, np.where(fast, frequencies, mixed))


@dataclass(frozen=True, slots=True)
class Divisors:
    """Each frequency has its own divisor, ``[head_dim / 2]``, from the model's file."""

    values: Sequence[float]

    def scaled(self, frequencies: F32) -> F32:
        """Returns the scaled frequencies, ``[head_dim / 2]``. Raises ValueError when the lengths differ."""
        if len(self.values) != len(frequencies):
            raise ValueError(f"there are {len(self.values)} frequency divisors for {len(frequencies)} frequencies")
        divisors: F32 = np.array(self.values, np.float32)
        return frequencies / divisors


Scaling: TypeAlias = Linear | Llama3 | Divisors


def frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> F32:
    """Returns a model's rotary frequencies, ``[head_dim / 2]``, with its scaling applied."""
    plain = rope_frequencies(head_dim, theta)
    return plain if scaling is None else scaling.scaled(plain)
