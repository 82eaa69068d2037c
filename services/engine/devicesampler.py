"""Tokens from logits that lie on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.engine.sampling import SamplingParams, sample
from services.errors import ServiceError


class DeviceSampler:
    """As `sampling.sample`, of logits float32 ``[n, vocab_size]`` in a CuPy array."""

    def __call__(
        self, logits: Any, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int | ServiceError]:
        """See `sampling.sample`."""
        return sample(logits.get(), params, positions)
