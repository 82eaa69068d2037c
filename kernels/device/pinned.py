"""Copies small arrays to and from a GPU, one at a time, through a persistent pinned buffer.

CuPy allocates and frees pinned memory for every array that it copies, which takes the host longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Buffer size in bytes for each direction, beyond which CuPy copies the array itself; and the alignment of an array.
BYTES, ALIGNED = 1 << 18, 16


class Pinned:
    """A pinned host buffer for copies on one stream at a time of the current device."""

    def __init__(self, size: int = BYTES) -> None:
        import cupy

        self._cupy = cupy
        runtime = cupy.cuda.runtime
        self._copy, self._there, self._back = (
            runtime.memcpyAsync,
            runtime.memcpyHostToDevice,
            runtime.memcpyDeviceToHost,
        )
        self._out, self._in = (_bytes(cupy.cuda.alloc_pinned_memory(size), size) for _ in range(2))
        self._out_at, self._in_at = self._out.ctypes.data, self._in.ctypes.data
        self._used = 0
        self._fetched: dict[int, list[tuple[NDArray[np.uint8], Any]]] = {}  # by size: idle buffers, and their events
        self._sent = cupy.cuda.Event(disable_timing=True)  # the last copy to the device

    def array(self, values: NDArray[Any]) -> Any:
        """Copy a contiguous array to the device, in the order of the current stream."""
        size = values.nbytes
        if size > len(self._out):
            return self._cupy.asarray(values)
        if self._used + size > len(self._out):
            self._sent.synchronize()
            self._used = 0
        at = self._used
        self._used = at + -(-size // ALIGNED) * ALIGNED
        self._out[at : at + size] = values.reshape(-1).view(np.uint8)
        found = self._cupy.ndarray(values.shape, values.dtype)
        stream = self._cupy.cuda.get_current_stream()
        self._copy(found.data.ptr, self._out_at + at, size, self._there, stream.ptr)
        self._sent.record(stream)
        return found

    def get(self, array: Any) -> NDArray[Any]:
        """Copy a contiguous array to the host; waits until the current stream has reached the copy."""
        size = array.nbytes
        if size > len(self._in):
            found: NDArray[Any] = self._cupy.asnumpy(array)
            return found
        stream = self._cupy.cuda.get_current_stream()
        self._copy(self._in_at, array.data.ptr, size, self._back, stream.ptr)
        stream.synchronize()
        return self._in[:size].view(array.dtype).reshape(array.shape).copy()

    def fetch(self, array: Any) -> Callable[[], NDArray[Any]]:
        """Queue a copy of a contiguous array to the host. Returns a function that waits for this copy, but for nothing
        queued later, and returns it; call it once.
        """
        size = max(ALIGNED, 1 << (array.nbytes - 1).bit_length())
        idle = self._fetched.setdefault(size, [])
        if idle:
            buffer, event = idle.pop()
        else:
            buffer = _bytes(self._cupy.cuda.alloc_pinned_memory(size), size)
            event = self._cupy.cuda.Event(disable_timing=True)
        stream = self._cupy.cuda.get_current_stream()
        self._copy(buffer.ctypes.data, array.data.ptr, array.nbytes, self._back, stream.ptr)
        event.record(stream)
        return partial(self._arrived, array, buffer, event, idle)

    @staticmethod
    def _arrived(array: Any, buffer: NDArray[np.uint8], event: Any, idle: list[Any]) -> NDArray[Any]:
        event.synchronize()
        found: NDArray[Any] = buffer[: array.nbytes].view(array.dtype).reshape(array.shape).copy()
        idle.append((buffer, event))
        return found


def _bytes(memory: Any, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8, size)
