"""Pages in GPU memory: the daemon's, opened by their IPC handle, or this process's own.

Arrays of CuPy and torch on them do not own the memory. The caller must release in this order: stop launching, drop the
arrays, ``close``. ``close`` synchronizes the device before it unmaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rocmforge.client.arena.announced import CANARY_BYTES, Announced, answer
from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.client.arena.views import TorchViews, Views, as_torch
from rocmforge.client.errors import AttachMismatch, GpuError
from rocmforge.client.events import LOGGED, EventLog
from rocmforge.client.layout import Layout


class _Mapping:
    """Kept alive by a view, to detect views that outlive ``close``."""


@dataclass(slots=True, eq=False)
class DevicePages:
    """Page ``p`` is the ``page_bytes`` bytes at ``pointer + p * page_bytes``, a device address of ``gpu``."""

    gpu: Gpu
    pointer: int
    total_pages: int
    layout: Layout
    _release: Callable[[int], None]
    _log: EventLog = LOGGED
    _views: weakref.WeakSet[_Mapping] = field(default_factory=weakref.WeakSet)
    _closed: bool = False
    _clean: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layout.page_bytes

    @property
    def array(self) -> Any:
        """The pages as a new non-owning ``cupy.ndarray``, uint8 ``[total_pages, page_bytes]``.

        Drop it before ``close``. Raises GpuError after ``close``.
        """
        if self._closed:
            raise GpuError("the pages are unmapped")
        import cupy

        size = self.total_pages * self.page_bytes
        viewed = _Mapping()
        self._views.add(viewed)
        memory = cupy.cuda.UnownedMemory(self.pointer, size, viewed, self.gpu.ordinal)
        return cupy.ndarray((self.total_pages, self.page_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def numpy(self) -> Views:
        """Raises AttachMismatch: NumPy does not reach GPU memory."""
        raise AttachMismatch("the pages are in GPU memory, which has no NumPy arrays; use cupy() or torch()")

    def cupy(self) -> Views:
        """The pages as CuPy arrays. Raises GpuError after ``close``."""
        return Views(self.array, self.layout)

    def torch(self) -> TorchViews:
        """The pages as tensors on the GPU. Raises GpuError after ``close``, InvalidConfiguration without torch."""
        return as_torch(self.array, self.layout)

    def close(self) -> bool:
        """Synchronize the device, then unmap or free the pages; whether both were done, so that nothing of this process
        can touch the pages any more. Idempotent.

        Never raises: a device that fails here has already failed a step, which reported the error.
        """
        if self._closed:
            return self._clean
        self._closed = True
        if self._views:
            self._log.error("pages_still_viewed", device=self.gpu.ordinal, views=len(self._views))
        for step in (self.gpu.synchronize, lambda: self._release(self.pointer)):
            try:
                step()
            except GpuError as error:
                self._clean = False
                self._log.error("pages_not_unmapped", device=self.gpu.ordinal, detail=error.message)
        return self._clean


def map_device_pages(
    handle: bytes,
    layout: Layout,
    announced: Announced,
    gpu: Gpu,
    *,
    device_ordinal: int | None,
    device_id: str,
    log: EventLog = LOGGED,
) -> tuple[DevicePages, bytes]:
    """Open an arena on ``gpu`` by its 64-byte IPC handle and answer its canary. Returns the pages and the canary read.

    ``device_ordinal`` and ``device_id`` name the daemon's GPU. The pages come first. At ``canary_offset`` the daemon
    wrote 32 bytes; their complement is written directly after them. Raises AttachMismatch when the arena is on another
    GPU, cannot be opened or does not match what is announced.
    """
    if device_id.lower() != gpu.id or (gpu.runtime.is_hip and device_ordinal != gpu.ordinal):
        # A HIP handle holds the exporter's ordinal, so both processes must number the GPUs alike.
        raise AttachMismatch(
            f"device_ordinal is {gpu.ordinal}: this engine's GPU {gpu.ordinal} is {gpu.id}, but the daemon's pages are "
            f"on {device_id or 'an unnamed GPU'}, its GPU {device_ordinal}; start both with the same "
            "HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES",
            field="device_ordinal",
        )
    announced.check(layout)
    canary = announced.canary_offset
    try:
        pages = DevicePages(gpu, gpu.open(handle), announced.total_pages, layout, gpu.close, log)
    except GpuError as error:
        raise AttachMismatch(
            f"the daemon's pages cannot be opened: {error.message}; `rocmforge doctor engine --peer "
            "PID_OF_THE_DAEMON` diagnoses the cause"
        ) from error
    try:
        seen = gpu.read(pages.pointer + canary, CANARY_BYTES)
        gpu.write(pages.pointer + canary + CANARY_BYTES, answer(seen))
    except GpuError as error:
        pages.close()
        raise AttachMismatch(f"the daemon's pages cannot be used: {error.message}") from error
    return pages, seen
