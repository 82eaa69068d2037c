"""The small arrays of a step on their way to a GPU: gathered in pinned memory, and copied together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Words, of 4 bytes, to begin with, and what an array is aligned to.
WORDS, ALIGNED = 1 << 16, 4


class Staging:
    """Room for the int32 arrays of one step at a time, on the host and on the current device.

    `put` hands out device memory that has its content once `send` has run, in the order of the current stream. It is
    the same memory again for arrays of the same shapes in the same order, as long as `base` is the same.
    """

    def __init__(self, words: int = WORDS) -> None:
        self._sent: Any = None  # the last copy
        self._late = 0  # words that found no room
        self.shapes: list[tuple[int, ...]] = []
        self._reserve(words)

    def _reserve(self, words: int) -> None:
        import cupy

        pinned = cupy.cuda.alloc_pinned_memory(4 * words)
        self._host: NDArray[np.int32] = np.frombuffer(pinned, np.int32, words)
        self._device = cupy.empty(words, np.int32)
        self._used = 0

    @property
    def base(self) -> int:
        """Where the device's memory is."""
        return int(self._device.data.ptr)

    def begin(self) -> None:
        """Start anew: what was put before is no longer needed by anything that is not queued yet."""
        if self._sent is not None:
            self._sent.synchronize()  # the host's memory is free again
        if self._late:
            self._reserve(2 * (len(self._host) + self._late))
            self._late = 0
        self._used = 0
        self.shapes = []

    def put(self, values: NDArray[Any]) -> Any:
        """Whole numbers that int32 has room for: an array of the same shape on the device."""
        import cupy

        self.shapes.append(values.shape)
        at, size = self._used, values.size
        if at + size > len(self._host):
            self._late += size + ALIGNED
            return cupy.asarray(values.astype(np.int32))
        self._used = at + -(-size // ALIGNED) * ALIGNED
        self._host[at : at + size] = values.reshape(-1)
        placed = self._device[at : at + size]
        return placed if values.ndim == 1 else placed.reshape(values.shape)

    @property
    def whole(self) -> bool:
        """Whether all that was put is in the memory at `base`."""
        return not self._late

    def send(self) -> None:
        """Queue the copy."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        size = 4 * self._used
        cupy.cuda.runtime.memcpyAsync(
            self.base, self._host.ctypes.data, size, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr
        )
        if self._sent is None:
            self._sent = cupy.cuda.Event(disable_timing=True)
        self._sent.record(stream)
