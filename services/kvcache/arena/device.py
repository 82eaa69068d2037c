"""Pages in the memory of a GPU: one allocation of the runtime, that engines open by its IPC handle.

It is exported once, whole, and neither moved nor freed while a session may have it mapped. The daemon itself touches
nothing in it but the canaries.
"""

from __future__ import annotations

import structlog

from services.common.errors import ExceedsBudget, GpuError
from services.common.gpu_ipc import Gpu
from services.kvcache.pool.budget import CANARY_BYTES, CANARY_SLOT_BYTES
from services.kvcache.pool.layout import PageLayout
from services.kvcache.pool.pool import DeviceMemory

log = structlog.get_logger()

#: What drivers take memory in, and the pages they map it by where they can. In the process that opens its handle CUDA
#: does so only for an allocation of whole ones: copies of 12 GiB and 512 bytes ran at half the speed there, on pages of
#: 4 KiB, and at full speed in the process that had allocated them.
GRANULE_BYTES = 2 << 20


class DeviceArena:
    """``total_pages`` pages, then ``canary_slots`` canaries with room for their answers; see ``pool.Arena``.

    Raises ExceedsBudget when the GPU has no room for it, GpuError when its runtime fails.
    """

    file_path = ""

    def __init__(self, gpu: Gpu, layout: PageLayout, total_pages: int, canary_slots: int) -> None:
        self._gpu = gpu
        self._canaries = total_pages * layout.page_bytes
        self._size = self._canaries + canary_slots * CANARY_SLOT_BYTES
        # An arena that is less than one granule is no place where speed matters.
        allocated = self._size + (-self._size % GRANULE_BYTES if self._size >= GRANULE_BYTES else 0)
        free, total = gpu.memory()
        try:
            if allocated > free:
                raise MemoryError
            self._pointer = gpu.allocate(allocated)
        except MemoryError as error:
            raise ExceedsBudget(
                f"the arena of {self._size} bytes does not fit GPU {gpu.ordinal}: {free} of its {total} bytes are "
                "free; lower the daemon's --memory, or end what has the GPU's memory",
                field="pool_pages",
                wanted_bytes=self._size,
                free_bytes=free,
                total_bytes=total,
            ) from error
        try:
            self._device = DeviceMemory(gpu.ordinal, gpu.id, gpu.export(self._pointer))
        except BaseException:
            gpu.free(self._pointer)
            raise

    @property
    def device(self) -> DeviceMemory:
        """Which GPU, and the handle to open it with."""
        return self._device

    @property
    def size_bytes(self) -> int:
        """The pages and the canaries behind them; what is left of the last granule is nobody's."""
        return self._size

    def canary_offset(self, slot: int) -> int:
        """Byte offset of a canary slot."""
        return self._canaries + slot * CANARY_SLOT_BYTES

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Write a session's canary and clear its answer. Raises GpuError."""
        self._gpu.write(self._pointer + self.canary_offset(slot), canary + bytes(CANARY_BYTES))

    def read_answer(self, slot: int) -> bytes:
        """What the engine wrote behind its canary. Raises GpuError."""
        return self._gpu.read(self._pointer + self.canary_offset(slot) + CANARY_BYTES, CANARY_BYTES)

    def close(self) -> None:
        """Give the memory back. A GPU that fails even that is past helping: it is logged, and others go on."""
        try:
            self._gpu.free(self._pointer)
        except GpuError as error:
            log.error("arena_not_freed", device=self._gpu.ordinal, bytes=self._size, detail=error.message)
