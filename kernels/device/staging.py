"""Staging of a step's small arrays: gathers them in pinned memory and copies them to the GPU together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Initial size, and alignment of an array, in words of 4 bytes.
WORDS, ALIGNED = 1 << 16, 4
#: Maximum number of cached views of device memory.
VIEWS = 4096


class Staging:
    """Buffers for the int32 arrays of one step at a time, on the host and on the current device.

    `put` and `make` return device memory whose content arrives when `send` runs, in the order of the current stream.
    Arrays of the same shapes in the same order get the same addresses, as long as `base` is unchanged.
    """

    def __init__(self, words: int = WORDS) -> None:
        self._sent: Any = None  # the last copy
        self._late = 0  # words that did not fit
        self.shapes: list[tuple[int, ...]] = []
        self._reserve(words)

    def _reserve(self, words: int) -> None:
        import cupy

        pinned = cupy.cuda.alloc_pinned_memory(4 * words)
        self._host: NDArray[np.int32] = np.frombuffer(pinned, np.int32, words)
        self._host_at = self._host.ctypes.data
        self._device = cupy.empty(words, np.int32)
        #: Address of the device buffer.
        self.base = int(self._device.data.ptr)
        # Views of it: a step's are mostly those of the last step, and creating them takes longer than the copy.
        self._views: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._used = 0

    def begin(self) -> None:
        """Begin a step: nothing that is yet to be queued may use the previous step's arrays."""
        if self._sent is not None:
            self._sent.synchronize()  # the host buffer can be reused
        if self._late:
            self._reserve(2 * (len(self._host) + self._late))
            self._late = 0
        self._used = 0
        self.shapes = []

    def put(self, values: NDArray[Any], size: int, rest: int) -> Any:
        """Stage integers that fit in int32. Returns a device array of ``size`` elements, padded with ``rest``."""
        at, count = self._used, len(values)
        if at + size > len(self._host):
            return self._too_late(np.append(values, np.full(size - count, rest)).astype(np.int32))
        self._host[at : at + count] = values
        if count < size:
            self._host[at + count : at + size] = rest
        return self._placed(at, size, (size,))

    def make(self, shape: tuple[int, ...], write: Callable[[NDArray[np.int32]], None]) -> Any:
        """Return an int32 device array; ``write`` fills the host array that is copied to it."""
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
        """Whether all arrays of the step are in the buffer at `base`."""
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
