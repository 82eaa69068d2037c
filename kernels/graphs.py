"""Steps that come again, replayed as CUDA graphs: the host queues one launch instead of hundreds.

A graph holds addresses. What its kernels read is put at the same place every time (`staging.Staging`); what they write
is memory of a `Workspace`, which gives none of it back as long as it lives and serves nothing but captures. Replays
follow each other on one stream, so all graphs may use the same of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

#: Bytes that a workspace takes from the device at a time, at least.
SLAB = 64 << 20
ALIGNED = 512
#: Graphs that are kept; the one unused for longest goes first.
KEPT = 128


class Workspace:
    """Memory for captures: an allocator for CuPy whose blocks return to it, never to the device."""

    def __init__(self, slab: int = SLAB) -> None:
        self._slab = slab
        self._slabs: list[Any] = []
        self._used = 0  # bytes of the last slab
        self._free: dict[int, list[tuple[int, int]]] = {}  # by size: (slab, offset)

    @property
    def held_bytes(self) -> int:
        """What it has taken from the device."""
        return sum(int(slab.nbytes) for slab in self._slabs)

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


class Graphs:
    """Graphs by keys. Raises ValueError on ROCm, where CuPy has none."""

    def __init__(self, kept: int = KEPT) -> None:
        import cupy

        if cupy.cuda.runtime.is_hip:
            raise ValueError("graphs: CuPy supports CUDA graphs on NVIDIA GPUs only, not on ROCm")
        self._kept = kept
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._workspace = Workspace()
        self._seen: OrderedDict[Hashable, tuple[Any, Any] | None] = OrderedDict()
        self.captures = self.replays = 0

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns: an array, which the next call of `run` may write to.

        ``compute`` queues work on the current stream, on data whose places and shapes ``key`` determines, and neither
        waits nor copies from or to the host. The first time it is called; the second time it is captured, which does
        not pay for what never comes again; from then on that is replayed.
        """
        import cupy

        if key not in self._seen:
            self._remember(key, None)
            return compute()
        self._seen.move_to_end(key)
        found = self._seen[key]
        if found is None:
            found = self._seen[key] = self._capture(compute)
            self.captures += 1
        else:
            self.replays += 1
        graph, result = found
        graph.launch(cupy.cuda.get_current_stream())
        return result

    def _remember(self, key: Hashable, value: tuple[Any, Any] | None) -> None:
        self._seen[key] = value
        if len(self._seen) > self._kept:
            self._seen.popitem(last=False)

    def _capture(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        import cupy

        with cupy.cuda.using_allocator(self._workspace.malloc), self._stream:
            self._stream.begin_capture()
            try:
                result = compute()
            except BaseException:
                self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        return graph, result
