"""The small arrays of a step on their way to a GPU: gathered in pinned memory, and copied together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Words, of 4 bytes, to begin with, and what an array is aligned to.
WORDS, ALIGNED = 1 << 16, 4
#: Views of the device's memory that are kept.
VIEWS = 4096


class Staging:
    """Room for the int32 arrays of one step at a time, on the host and on the current device.

    `put` and `make` hand out device memory that has its content once `send` has run, in the order of the current
    stream. It is the same memory again for arrays of the same shapes in the same order, as long as `base` is the same.
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
        self._host_at = self._host.ctypes.data
        self._device = cupy.empty(words, np.int32)
        #: Where the device's memory is.
        self.base = int(self._device.data.ptr)
        # Of it: those of one step are mostly those of the last, and making them takes longer than the copy.
        self._views: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._used = 0

    def begin(self) -> None:
        """Start anew: what was made before is no longer needed by anything that is not queued yet."""
        if self._sent is not None:
            self._sent.synchronize()  # the host's memory is free again
        if self._late:
            self._reserve(2 * (len(self._host) + self._late))
            self._late = 0
        self._used = 0
        self.shapes = []

    def put(self, values: NDArray[Any], size: int, rest: int) -> Any:
        """Whole numbers that int32 has room for: an array on the device of ``size``, made up with ``rest``."""
        at, count = self._used, len(values)
        if at + size > len(self._host):
            return self._too_late(np.append(values, np.full(size - count, rest)).astype(np.int32))
        self._host[at : at + count] = values
        if count < size:
            self._host[at + count : at + size] = rest
        return self._placed(at, size, (size,))

    def make(self, shape: tuple[int, ...], write: Callable[[NDArray[np.int32]], None]) -> Any:
        """An int32 array on the device, of what ``write`` is to write to one of the host that it is given."""
        at, size = self._used, math.prod(shape)
        if at + size > len(self._host):
            late = np.empty(shape, np.int32)
            write(late)
            return self._too_late(late)
        write(self._host[at : at + size].reshape(shape))
        return self._placed(at, size, shape)

    def _placed(self, at: int, size: int, shape: tuple[int, ...]) -> Any:
        self._used = at + -(-size // ALIGNED) * ALIGNED
        self.shapes.append(shape)
        found = self._views.get((at, shape))
        if found is None:
            if len(self._views) >= VIEWS:
                self._views.clear()
            found = self._views[at, shape] = self._device[at : at + size].reshape(shape)
        return found

    def _too_late(self, values: NDArray[np.int32]) -> Any:
        import cupy

        self._late += values.size + ALIGNED
        return cupy.asarray(values)

    @property
    def whole(self) -> bool:
        """Whether all that was made is in the memory at `base`."""
        return not self._late

    def send(self) -> None:
        """Queue the copy."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        to_device = cupy.cuda.runtime.memcpyHostToDevice
        cupy.cuda.runtime.memcpyAsync(self.base, self._host_at, 4 * self._used, to_device, stream.ptr)
        if self._sent is None:
            self._sent = cupy.cuda.Event(disable_timing=True)
        self._sent.record(stream)
