"""How many blocks of a kernel a multiprocessor (on AMD a compute unit) holds at a time, by the runtime's own query."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kernels.device import libraries
from kernels.device.module import Module

#: A query: function, threads of a block, bytes of its dynamic shared memory -> blocks. Raises OccupancyError.
Query = Callable[[int, int, int], int]


class OccupancyError(Exception):
    """The runtime did not answer."""


class Occupancy:
    """Answers for one device, each asked for once. After the first refusal nothing is asked again.

    ``bounded``: the compiler was given a least number of blocks (launch bounds on CUDA). Plans were tuned with it, so
    that more are not used even where they fit.
    """

    def __init__(self, query: Query, bounded: bool) -> None:
        self._query, self.bounded = query, bounded
        self._known: dict[tuple[Module, str, int, int], int] = {}
        #: Why the runtime did not answer; empty as long as it does.
        self.refused = ""

    def blocks(self, module: Module, kernel: str, threads: int, shared: int, assumed: int) -> int:
        """Return the blocks of ``kernel`` that fit at a time; ``assumed`` if the runtime does not say."""
        key = module, kernel, threads, shared
        if key not in self._known:
            self._known[key] = self._asked(module, kernel, threads, shared, assumed)
        return self._known[key]

    def _asked(self, module: Module, kernel: str, threads: int, shared: int, assumed: int) -> int:
        if self.refused:
            return assumed
        try:
            found = self._query(module.function(kernel), threads, shared)
        except OccupancyError as error:
            self.refused = f"{kernel}: {error}"
            return assumed
        if found < 1:
            # A launch would fail, and say so better.
            return assumed
        return min(found, assumed) if self.bounded else found


def of_device() -> Occupancy:
    """Return the occupancy on CuPy's current device."""
    import cupy

    hip = bool(cupy.cuda.runtime.is_hip)
    library, name = (
        ("libamdhip64.so", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor")
        if hip
        else ("libcuda.so", "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    )

    def query(function: int, threads: int, shared: int) -> int:
        try:
            call = getattr(libraries.loaded(library), name)
        except (libraries.LibraryError, AttributeError) as error:
            raise OccupancyError(str(error)) from error
        blocks = ctypes.c_int()
        arguments = ctypes.c_void_p(function), ctypes.c_int(threads), ctypes.c_size_t(shared)
        if status := call(ctypes.byref(blocks), *arguments):
            raise OccupancyError(f"{name}: status {status}")
        return blocks.value

    return Occupancy(query, bounded=not hip)
