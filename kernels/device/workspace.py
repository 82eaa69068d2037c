"""Memory for the results of a step that is to be replayed at the same addresses."""

from __future__ import annotations

from typing import Any

#: Minimum number of bytes that a workspace allocates from the device at a time.
SLAB = 64 << 20
ALIGNED = 512


class Workspace:
    """An allocator for CuPy whose freed blocks return to it, never to the device.

    A step computed in it can be replayed at the same addresses, as long as steps run one after another on one stream;
    they may then share the memory.
    """

    def __init__(self, slab: int = SLAB) -> None:
        self._slab = slab
        self._slabs: list[Any] = []
        self._used = 0  # bytes of the last slab
        self._free: dict[int, list[tuple[int, int]]] = {}  # by size: (slab, offset)

    def malloc(self, size: int) -> Any:
        """Allocate, as `cupy.cuda.set_allocator` expects."""
        import cupy

        size = max(1, -(-size // ALIGNED)) * ALIGNED
        free = self._free.setdefault(size, [])
        slab, offset = free.pop() if free else self._carve(size)
        block = _Block(free, (slab, offset))
        at = self._slabs[slab].data
        memory = cupy.cuda.UnownedMemory(at.ptr + offset, size, block, at.device_id)
        return cupy.cuda.MemoryPointer(memory, 0)

    def _carve(self, size: int) -> tuple[int, int]:
        import cupy

        if not self._slabs or self._used + size > self._slabs[-1].nbytes:
            whole = max(self._slab, size)
            # Bypass the current allocator, which is this one.
            memory = cupy.get_default_memory_pool().malloc(whole)
            self._slabs.append(cupy.ndarray((whole,), cupy.uint8, memory))
            self._used = 0
        self._used += size
        return len(self._slabs) - 1, self._used - size


class _Block:
    """The owner object of an array's memory; when it is collected, the memory can be reused."""

    def __init__(self, free: list[tuple[int, int]], place: tuple[int, int]) -> None:
        self._free, self._place = free, place

    def __del__(self) -> None:
        self._free.append(self._place)
