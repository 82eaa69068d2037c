"""Checksums of pages in GPU memory, by the project's kernel.

CuPy and NumPy are imported, and the kernel is compiled, when they are first wanted: a daemon without a GPU needs
neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocmforge.client.arena.gpu_ipc import Gpu
from services.common.errors import GpuError

if TYPE_CHECKING:
    from kernels.device.checksum import PageChecksums

_compiled: dict[int, PageChecksums] = {}


def kernel_checksums(gpu: Gpu, pointer: int, page_bytes: int, pages: list[int]) -> list[int]:
    """See ``device.ReadChecksums``; for one thread of the process."""
    from kernels.device.checksum import PageChecksums
    from kernels.device.module import KernelError

    gpu.use()
    try:
        if gpu.ordinal not in _compiled:
            _compiled[gpu.ordinal] = PageChecksums()
        return _compiled[gpu.ordinal].of(pointer, page_bytes, pages)
    except (KernelError, ImportError, RuntimeError, MemoryError) as error:  # CuPy's are RuntimeErrors and MemoryErrors
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise GpuError(f"GPU {gpu.ordinal}: checksums: {first}") from error
