"""Records the launches of a step, so that they can be queued again.

Launching a kernel through Python and CuPy takes the host several times longer than the driver call. A tape holds each
kernel's handle, extents and arguments as the driver takes them, and each product's arguments as the library takes them,
so that queuing everything again is a loop of calls. `tapes.Tapes` decides when a tape can be replayed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Tape:
    """Launches and products in order, for the stream and the library handle that they were first queued with.

    It keeps no array alive; the caller of `play` must.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], int | None]] = []
        self._arguments: list[NDArray[np.uint64]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def kernel(
        self, function: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int, stream: int
    ) -> None:
        """Record a launch of CuPy's ``function``; ``args`` as for `module.Module.launch`."""
        from cupy_backends.cuda.api import driver

        values = np.zeros(2 * len(args), np.uint64)
        bits = values.view(np.uint8)
        for at, one in enumerate(args):
            stored = one if isinstance(one, np.generic) else np.uint64(0 if one is None else one.data.ptr)
            bits[8 * at : 8 * at + stored.itemsize] = np.frombuffer(stored.tobytes(), np.uint8)
        # The values, then the address of each: the driver reads both before a launch returns.
        where = values.ctypes.data
        values[len(args) :] = [where + 8 * at for at in range(len(args))]
        self._arguments.append(values)
        extents = (*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)))
        parameters = where + 8 * len(args)
        self._calls.append(
            functools.partial(driver.launchKernel, function.ptr, *extents, shared, stream, parameters, 0)
        )

    def product(self, function: Any, args: Sequence[Any]) -> None:
        """Record a library call that returns a status."""
        # Converted to ctypes' types now, so that replaying need not.
        self._calls.append(
            functools.partial(function, *(of(one) for of, one in zip(function.argtypes, args, strict=True)))
        )

    def play(self) -> int:
        """Queue everything. Returns the status of the first product that failed, or 0. Raises CuPy's own errors."""
        for call in self._calls:
            status = call()
            if status:
                return status
        return 0


class _Written(threading.local):
    """The tape that records the current thread's launches, if any."""

    tape: Tape | None = None


writing = _Written()
