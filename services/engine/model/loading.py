"""Reads a model's weights from their files, one by one, and logs progress."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import structlog
from numpy.typing import NDArray

from services.engine.checkpoint.tensor import Encoding
from services.engine.checkpoint.weights import Weights

log = structlog.get_logger()

#: Seconds between progress events.
EVERY_S = 5.0
_DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Loading:
    """One pass over all weights. `take` returns the only copy of a tensor, which the caller owns.

    Logs the bytes and tensors read and the estimated seconds left, at the start, every ``every_s`` seconds of
    ``clock``, and at the end.
    """

    def __init__(self, weights: Weights, clock: Callable[[], float] = time.monotonic, every_s: float = EVERY_S) -> None:
        self._weights = weights
        self._clock = clock
        self._every_s = every_s
        self._total_bytes = weights.stored_bytes
        self._bytes = 0
        # Decoding time is proportional to the number of values, not to their stored bytes.
        self._total_numbers = weights.parameters
        self._numbers = 0
        self._tensors = 0
        self._begun = self._told = clock()
        self._words = {"model": str(weights.path)}
        log.info("weights_loading", **self._words, total_bytes=self._total_bytes, total_tensors=len(weights))

    def take(self, *names: str, dtype: str) -> NDArray[Any]:
        """Read tensors, concatenated along their first axis, into a new array.

        It has ``dtype`` if all of them are stored in it, float32 otherwise: no value is rounded. Raises
        ``ModelInvalid``.
        """
        tensors = [self._weights[name] for name in names]
        stored = {tensor.encoding.dtype for tensor in tensors}
        kind = _DTYPES[dtype] if stored == {_DTYPES[dtype]} else np.dtype(np.float32)
        lengths = [tensor.shape[0] for tensor in tensors]
        joined = np.empty((sum(lengths), *tensors[0].shape[1:]), kind)
        at = 0
        for tensor, length in zip(tensors, lengths, strict=True):
            tensor.read_into(joined[at : at + length], functools.partial(self._read, tensor.encoding))
            at += length
            self._tensors += 1
        return joined

    def end(self) -> None:
        """Log the end of the pass."""
        seconds = round(self._clock() - self._begun, 3)
        log.info("weights_loaded", **self._words, bytes=self._bytes, tensors=self._tensors, seconds=seconds)

    def _read(self, encoding: Encoding, size: int) -> None:
        self._bytes += size
        self._numbers += size // encoding.block_bytes * encoding.block_values
        now = self._clock()
        if now - self._told < self._every_s:
            return
        self._told = now
        left = (now - self._begun) / self._numbers * (self._total_numbers - self._numbers)
        log.info(
            "weights_progress",
            **self._words,
            bytes=self._bytes,
            total_bytes=self._total_bytes,
            tensors=self._tensors,
            total_tensors=len(self._weights),
            eta_s=math.ceil(left),
        )
