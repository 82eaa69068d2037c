"""Pages in the memory of a GPU: the daemon's, opened by their IPC handle, or this process's own.

What is handed on is an address and the shape; the view that CuPy makes of it owns nothing. So the order of ending is
the caller's to keep: launch nothing more, drop the views, ``close``. ``close`` waits for the device before it unmaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.common.errors import AttachMismatch, GpuError
from services.common.gpu_ipc import Gpu
from services.engine.pages.host_arena import CANARY_BYTES, check_announced, page_bytes_of
from services.engine.pages.source import Geometry

log = structlog.get_logger()


class _Mapping:
    """What a view keeps alive: nothing but the knowledge that there still is one."""


@dataclass(slots=True, eq=False)
class DevicePages:
    """Page ``p`` is the ``page_bytes`` bytes at ``pointer + p * page_bytes``, a device address of ``gpu``."""

    gpu: Gpu
    pointer: int
    total_pages: int
    page_bytes: int
    _release: Callable[[int], None]
    _views: weakref.WeakSet[_Mapping] = field(default_factory=weakref.WeakSet)
    _closed: bool = False

    @property
    def array(self) -> Any:
        """The pages as a new ``cupy.ndarray``, uint8 ``[total_pages, page_bytes]``, that owns nothing.

        It must be gone before ``close``. Raises GpuError afterwards.
        """
        if self._closed:
            raise GpuError("these pages were unmapped")
        import cupy

        size = self.total_pages * self.page_bytes
        viewed = _Mapping()
        self._views.add(viewed)
        memory = cupy.cuda.UnownedMemory(self.pointer, size, viewed, self.gpu.ordinal)
        return cupy.ndarray((self.total_pages, self.page_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Wait for what runs on the device, then unmap or free. Closing twice changes nothing.

        Never raises: a device that fails here has failed before, and whoever ran on it was told.
        """
        if self._closed:
            return
        self._closed = True
        if self._views:
            log.error("pages_still_viewed", device=self.gpu.ordinal, views=len(self._views))
        for step in (self.gpu.synchronize, lambda: self._release(self.pointer)):
            try:
                step()
            except GpuError as error:
                log.error("pages_not_unmapped", device=self.gpu.ordinal, detail=error.message)


def map_device_pages(
    handle: bytes,
    geometry: Geometry,
    gpu: Gpu,
    *,
    device_ordinal: int | None,
    device_id: str,
    total_pages: int,
    page_bytes: int,
    size_bytes: int,
    canary_offset: int,
) -> tuple[DevicePages, bytes]:
    """Open an arena on ``gpu`` by its 64-byte handle and answer its canary; returns the pages and the canary read.

    ``device_ordinal`` and ``device_id`` say where the daemon has it. The pages come first; at ``canary_offset`` are 32
    bytes of the daemon's, whose complement is written right behind them. Raises AttachMismatch when it is on another
    GPU, cannot be opened or is not what was announced.
    """
    if device_id.lower() != gpu.id or (gpu.runtime.is_hip and device_ordinal != gpu.ordinal):
        # A handle of HIP holds the exporter's ordinal, so there both have to number alike.
        raise AttachMismatch(
            f"device_ordinal is {gpu.ordinal}: this engine's GPU {gpu.ordinal} is {gpu.id}, and the daemon's pages are "
            f"on {device_id or 'none that it names'}, its GPU {device_ordinal}; start both with the same "
            "HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES",
            field="device_ordinal",
        )
    check_announced(geometry, total_pages, page_bytes, size_bytes, canary_offset)
    try:
        pages = DevicePages(gpu, gpu.open(handle), total_pages, page_bytes, gpu.close)
    except GpuError as error:
        raise AttachMismatch(
            f"the daemon's pages cannot be opened: {error.message}; `python -m services.engine doctor --peer "
            "PID_OF_THE_DAEMON` looks for the cause"
        ) from error
    try:
        seen = gpu.read(pages.pointer + canary_offset, CANARY_BYTES)
        gpu.write(pages.pointer + canary_offset + CANARY_BYTES, bytes(byte ^ 0xFF for byte in seen))
    except GpuError as error:
        pages.close()
        raise AttachMismatch(f"the daemon's pages cannot be used: {error.message}") from error
    return pages, seen


def private_device_pages(geometry: Geometry, total_pages: int, gpu: Gpu) -> DevicePages:
    """Pages of this process's own, with whatever is in them.

    Raises MemoryError when the GPU has no room for them, GpuError when its runtime fails.
    """
    size = page_bytes_of(geometry)
    return DevicePages(gpu, gpu.allocate(total_pages * size), total_pages, size, gpu.free)
