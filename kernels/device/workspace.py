"""Memory for what a step computes when the step is to come again with the same addresses."""

from __future__ import annotations

from typing import Any

#: Bytes that a workspace takes from the device at a time, at least.
SLAB = 64 << 20
ALIGNED = 512


class Workspace:
    """An allocator for CuPy whose blocks return to it, never to the device.

    What was computed in it once can be computed again at the same addresses, as long as one step follows the other on
    one stream: all of them may then use the same of it.
    """

    def __init__(self, slab: int = SLAB) -> None:
        self._slab = slab
        self._slabs: list[Any] = []
        self._used = 0  # bytes of the last slab
        self._free: dict[int, list[tuple[int, int]]] = {}  # by size: (slab, offset)

    def malloc(self, size: int) -> Any:
        """Memory as `cupy.cuda.set_allocator` wants it."""
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
            # Not by the allocator in force, which is this one.
            memory = cupy.get_default_memory_pool().malloc(whole)
            self._slabs.append(cupy.ndarray((whole,), cupy.uint8, memory))
            self._used = 0
        self._used += size
        return len(self._slabs) - 1, self._used - size


class _Block:
    """What an array keeps alive; when it goes, its memory may be another's."""

    def __init__(self, free: list[tuple[int, int]], place: tuple[int, int]) -> None:
        self._free, self._place = free, place

    def __del__(self) -> None:
        self._free.append(self._place)
