"""Pages in GPU memory: a single runtime allocation, which engines open by its IPC handle.

It is exported once, as a whole, and neither moved nor freed while a session may have it mapped. The daemon itself
writes only the canaries, zeroes pages that nobody was told of, and reads published ones for their checksums, in a
kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from rocmforge.client.arena.gpu_ipc import Gpu
from services.common.errors import ExceedsBudget, GpuError
from services.kvcache.arena.access import Access
from services.kvcache.arena.kernel_checksums import kernel_checksums
from services.kvcache.pool.arena import DeviceMemory
from services.kvcache.pool.budget import CANARY_BYTES, CANARY_SLOT_BYTES
from services.kvcache.pool.layout import Layout

#: ``(gpu, pointer, page_bytes, pages)`` to the checksums of those pages of the arena at ``pointer``. Raises GpuError.
ReadChecksums = Callable[[Gpu, int, int, list[int]], list[int]]

log = structlog.get_logger()

#: Granularity of driver allocations, and the large page size that drivers map with where they can. In the process that
#: opens an IPC handle, CUDA maps large pages only if the allocation is a multiple of this size: for 12 GiB and 512
#: bytes, copies ran at half speed there, on 4 KiB pages, and at full speed in the process that had allocated them.
GRANULE_BYTES = 2 << 20


class DeviceArena:
    """``total_pages`` pages, then ``canary_slots`` canaries, each with space for its answer; see ``pool.Arena``.

    Raises ExceedsBudget if it does not fit in GPU memory, and GpuError if a runtime call fails.
    """

    file_path = ""

    def __init__(
        self,
        gpu: Gpu,
        layout: Layout,
        total_pages: int,
        canary_slots: int,
        read: ReadChecksums = kernel_checksums,
    ) -> None:
        self._gpu = gpu
        self._page_bytes = layout.page_bytes
        self._read = read
        self._access = Access()
        self._canaries = total_pages * layout.page_bytes
        self._size = self._canaries + canary_slots * CANARY_SLOT_BYTES
        # Speed does not matter for an arena smaller than one granule.
        allocated = self._size + (-self._size % GRANULE_BYTES if self._size >= GRANULE_BYTES else 0)
        free, total = gpu.memory()
        try:
            if allocated > free:
                raise MemoryError
            self._pointer = gpu.allocate(allocated)
        except MemoryError as error:
            raise ExceedsBudget(
                f"the arena of {self._size} bytes does not fit on GPU {gpu.ordinal}: {free} of its {total} bytes are "
                "free; lower the daemon's --memory, or stop what uses the GPU's memory",
                field="pool_pages",
                wanted_bytes=self._size,
                free_bytes=free,
                total_bytes=total,
            ) from error
        try:
            # What was there before may be another pool's: the runtime hands freed memory out again as it is.
            gpu.zero(self._pointer, allocated)
            gpu.synchronize()
            self._device = DeviceMemory(gpu.ordinal, gpu.id, gpu.export(self._pointer))
        except BaseException:
            gpu.free(self._pointer)
            raise

    @property
    def device(self) -> DeviceMemory:
        """The GPU and the IPC handle of the allocation."""
        return self._device

    @property
    def size_bytes(self) -> int:
        """The size of the pages and the canaries after them; the rest of the last granule is unused."""
        return self._size

    def admit(self, owner: str) -> None:
        """Nothing to do: anyone who has the handle can open it."""

    def dismiss(self, owner: str) -> None:
        """Nothing to do: anyone who got the handle can still open it."""

    def canary_offset(self, slot: int) -> int:
        """Byte offset of a canary slot."""
        return self._canaries + slot * CANARY_SLOT_BYTES

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Write a session's canary and clear its answer. Raises GpuError."""
        self._gpu.write(self._pointer + self.canary_offset(slot), canary + bytes(CANARY_BYTES))

    def read_answer(self, slot: int) -> bytes:
        """The answer that the engine wrote after its canary. Raises GpuError."""
        return self._gpu.read(self._pointer + self.canary_offset(slot) + CANARY_BYTES, CANARY_BYTES)

    def checksums(self, pages: list[int]) -> list[int]:
        """Those of ``kernels.device.checksum``; see ``pool.Arena``."""
        with self._access.held():
            return self._read(self._gpu, self._pointer, self._page_bytes, pages)

    def zero(self, pages: list[int]) -> None:
        """Set pages to zero, by the runtime; see ``pool.Arena``. The arena itself begins as zeros."""
        with self._access.held():
            for page in pages:
                self._gpu.zero(self._pointer + page * self._page_bytes, self._page_bytes)
            self._gpu.synchronize()

    def close(self) -> None:
        """Free the memory. A failure is only logged, so that the other arenas can still be closed."""
        try:
            with self._access.ending():
                self._gpu.free(self._pointer)
        except GpuError as error:
            log.error("arena_not_freed", device=self._gpu.ordinal, bytes=self._size, detail=error.message)
