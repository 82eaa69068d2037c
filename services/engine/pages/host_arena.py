"""Maps the daemon's memory into this process, and identifies this process to the daemon."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.common.edge.paths import open_file
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
    """Returns the bytes of one page; int8 pages end with one f32 scale per [layer][k, v][kv_head]."""
    heads = geometry.layers * 2 * geometry.kv_heads
    scales = heads * _SCALE_BYTES if geometry.dtype == "int8" else 0
    return heads * geometry.page_size * geometry.head_dim * ITEM_BYTES[geometry.dtype] + scales


def check_announced(geometry: Geometry, total_pages: int, page_bytes: int, size_bytes: int, canary_offset: int) -> None:
    """Check the announced layout of an arena for consistency. Raises AttachMismatch."""
    expected = page_bytes_of(geometry)
    if page_bytes != expected:
        raise AttachMismatch(f"the arena's pages have {page_bytes} bytes; the model's have {expected}")
    if total_pages < 1 or total_pages * expected > canary_offset or canary_offset + 2 * CANARY_BYTES > size_bytes:
        raise AttachMismatch(
            f"{total_pages} pages of {expected} bytes and a canary at {canary_offset} do not fit in {size_bytes} bytes"
        )


def map_pages(
    path: Path,
    geometry: Geometry,
    *,
    total_pages: int,
    page_bytes: int,
    size_bytes: int,
    canary_offset: int,
    owner: int | None = None,
) -> tuple[Pages, bytes]:
    """Map an arena file of f32 pages and answer its canary. Returns the pages and the canary read.

    The pages come first. At ``canary_offset`` the daemon wrote 32 bytes; their complement is written directly after
    them. The file must be this user's, root's or that of ``owner``, a uid. Raises AttachMismatch when it is not, cannot
    be mapped or does not match the announced layout.
    """
    check_announced(geometry, total_pages, page_bytes, size_bytes, canary_offset)
    try:
        file = open_file(path, *(() if owner is None else (owner,)))
        try:
            if os.fstat(file).st_size < size_bytes:  # access past the end raises SIGBUS
                raise AttachMismatch(f"{path} is shorter than the {size_bytes} bytes announced")
            memory = mmap.mmap(file, size_bytes)
        finally:
            os.close(file)
    except OSError as error:
        raise AttachMismatch(f"the arena {path} cannot be mapped: {error.strerror or error}") from error
    seen = memory[canary_offset : canary_offset + CANARY_BYTES]
    memory[canary_offset + CANARY_BYTES : canary_offset + 2 * CANARY_BYTES] = bytes(byte ^ 0xFF for byte in seen)
    # Only the array keeps the mapping alive.
    pages = np.frombuffer(memory, np.float32, total_pages * page_bytes // 4)
    return pages.reshape(total_pages, *page_shape(geometry)), seen


def private_pages(geometry: Geometry, total_pages: int) -> Pages:
    """Allocates private pages. Raises MemoryError when there is not enough memory."""
    return np.zeros((total_pages, *page_shape(geometry)), np.float32)


def process_identity(proc: Path = Path("/proc/self")) -> tuple[int, int, str] | None:
    """Returns pid, start time in clock ticks since boot, and pid namespace of this process; None when unavailable."""
    try:
        # The fields after the command, which may contain spaces and parentheses: state is the 3rd, start time the 22nd.
        start_time = int((proc / "stat").read_text().rpartition(")")[2].split()[19])
        return os.getpid(), start_time, os.readlink(proc / "ns" / "pid")
    except (OSError, ValueError, IndexError):
        return None
