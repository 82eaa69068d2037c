"""Pages in memory of this process's own, for an engine without a daemon."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from rocmforge.client.arena.device import DevicePages
from rocmforge.client.arena.gpu_ipc import Gpu
from services.engine.pages.source import PageLayout

#: ``[page, layer, (k, v), kv_head, slot, head_dim]``
Pages: TypeAlias = NDArray[np.float32]

log = structlog.get_logger()


def private_pages(layout: PageLayout, total_pages: int) -> Pages:
    """Allocates pages of f32. Raises MemoryError when there is not enough memory."""
    return np.zeros((total_pages, *layout.shape), np.float32)


def private_device_pages(layout: PageLayout, total_pages: int, gpu: Gpu) -> DevicePages:
    """Allocates uninitialized pages.

    Raises MemoryError when the GPU has too little free memory, GpuError when its runtime fails.
    """
    pointer = gpu.allocate(total_pages * layout.page_bytes)
    return DevicePages(gpu, pointer, total_pages, layout, gpu.free, log)
