"""The daemon's memory, mapped into this process, and what the daemon is told of this process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.common.errors import AttachMismatch
from services.engine.pages.source import Geometry

#: ``[page, layer, (k, v), kv_head, slot, head_dim]``
Pages: TypeAlias = NDArray[np.float32]

CANARY_BYTES = 32

#: Bytes of one element of K or V.
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}

_SCALE_BYTES = 4


def page_shape(geometry: Geometry) -> tuple[int, int, int, int, int]:
    """The dimensions of one page."""
    return (geometry.layers, 2, geometry.kv_heads, geometry.page_size, geometry.head_dim)


def page_bytes_of(geometry: Geometry) -> int:
    """The size of one page; int8 pages end with one f32 scale for each [layer][k, v][kv_head]."""
    heads = geometry.layers * 2 * geometry.kv_heads
    scales = heads * _SCALE_BYTES if geometry.dtype == "int8" else 0
    return heads * geometry.page_size * geometry.head_dim * ITEM_BYTES[geometry.dtype] + scales


def check_announced(geometry: Geometry, total_pages: int, page_bytes: int, size_bytes: int, canary_offset: int) -> None:
    """Whether an arena can be what it was announced to be. Raises AttachMismatch."""
    expected = page_bytes_of(geometry)
    if page_bytes != expected:
        raise AttachMismatch(f"the arena's pages have {page_bytes} bytes, the model's {expected}")
    if total_pages < 1 or total_pages * expected > canary_offset or canary_offset + 2 * CANARY_BYTES > size_bytes:
        raise AttachMismatch(
            f"{total_pages} pages of {expected} bytes, a canary at {canary_offset}: they do not fit {size_bytes} bytes"
        )


def map_pages(
    path: Path, geometry: Geometry, *, total_pages: int, page_bytes: int, size_bytes: int, canary_offset: int
) -> tuple[Pages, bytes]:
    """Map an arena file of f32 pages and answer its canary; returns the pages and the canary read.

    The pages come first; at ``canary_offset`` are 32 bytes of the daemon's, whose complement is written right behind
    them. Raises AttachMismatch when the file cannot be had or is not what was announced.
    """
    check_announced(geometry, total_pages, page_bytes, size_bytes, canary_offset)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_size < size_bytes:  # touching what lies behind the end would kill the process
                raise AttachMismatch(f"{path} is shorter than the {size_bytes} bytes announced")
            memory = mmap.mmap(file, size_bytes)
        finally:
            os.close(file)
    except OSError as error:
        raise AttachMismatch(f"the arena {path} cannot be mapped: {error.strerror or error}") from error
    seen = memory[canary_offset : canary_offset + CANARY_BYTES]
    memory[canary_offset + CANARY_BYTES : canary_offset + 2 * CANARY_BYTES] = bytes(byte ^ 0xFF for byte in seen)
    # The array keeps the mapping alive, and is all that does.
    pages = np.frombuffer(memory, np.float32, total_pages * page_bytes // 4)
    return pages.reshape(total_pages, *page_shape(geometry)), seen


def private_pages(geometry: Geometry, total_pages: int) -> Pages:
    """Pages of this process's own. Raises MemoryError when there is no room for them."""
    return np.zeros((total_pages, *page_shape(geometry)), np.float32)


def process_identity(proc: Path = Path("/proc/self")) -> tuple[int, int, str] | None:
    """Pid, start time in clock ticks after boot, and pid namespace of this process; None where they cannot be told."""
    try:
        # Fields behind the command, which may hold spaces and parentheses: state is the 3rd, the start time the 22nd.
        start_time = int((proc / "stat").read_text().rpartition(")")[2].split()[19])
        return os.getpid(), start_time, os.readlink(proc / "ns" / "pid")
    except (OSError, ValueError, IndexError):
        return None
