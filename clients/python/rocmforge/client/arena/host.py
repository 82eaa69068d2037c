"""Pages in host memory: the daemon's arena file, mapped shared."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocmforge.client.arena.announced import CANARY_BYTES, Announced, answer
from rocmforge.client.arena.views import TorchViews, Views, as_torch
from rocmforge.client.errors import AttachMismatch, SessionExpired
from rocmforge.client.layout import Layout
from rocmforge.client.transport.paths import open_file


@dataclass(slots=True, eq=False)
class HostPages:
    """The pages of a session on a mapped file. The mapping goes with the last array on it.

    A call that failed may be kept by its error's frames, in a cycle, and keeps this, but after ``close`` no mapping:
    beside it the next daemon's arena may not fit.
    """

    layout: Layout
    _views: Views | None

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        return len(self.numpy().raw)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layout.page_bytes

    @property
    def array(self) -> NDArray[np.uint8]:
        """The pages as uint8 ``[page, page_bytes]``. Raises SessionExpired after ``close``."""
        array: NDArray[np.uint8] = self.numpy().raw
        return array

    def numpy(self) -> Views:
        """The pages as NumPy arrays. Raises SessionExpired after ``close``."""
        if self._views is None:
            raise SessionExpired("the session of these pages was closed")
        return self._views

    def cupy(self) -> Views:
        """Raises AttachMismatch: CuPy does not reach host memory."""
        raise AttachMismatch("the pages are in host memory, which has no CuPy arrays; open the session with a GPU")

    def torch(self) -> TorchViews:
        """The pages as tensors. Raises SessionExpired after ``close``, InvalidConfiguration without torch."""
        return as_torch(self.array, self.layout)

    def close(self) -> bool:
        """Drop the arrays held here; always true, since nothing but code of this process writes a mapped file."""
        self._views = None
        return True


def map_pages(path: Path, layout: Layout, announced: Announced, *, owner: int | None = None) -> tuple[HostPages, bytes]:
    """Map an arena file and answer its canary. Returns the pages and the canary read.

    The pages come first. At ``canary_offset`` the daemon wrote 32 bytes; their complement is written directly after
    them. The file must be this user's, root's or that of ``owner``, a uid. Raises AttachMismatch when it is not, cannot
    be mapped or does not match what is announced.
    """
    announced.check(layout)
    size, canary = announced.size_bytes, announced.canary_offset
    try:
        file = open_file(path, *(() if owner is None else (owner,)))
        try:
            if os.fstat(file).st_size < size:  # access past the end raises SIGBUS
                raise AttachMismatch(f"{path} is shorter than the {size} bytes announced")
            memory = mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError as error:
        raise AttachMismatch(f"the arena {path} cannot be mapped: {error.strerror or error}") from error
    seen = memory[canary : canary + CANARY_BYTES]
    memory[canary + CANARY_BYTES : canary + 2 * CANARY_BYTES] = answer(seen)
    # Only the arrays keep the mapping alive.
    raw: Any = np.frombuffer(memory, np.uint8, announced.total_pages * announced.page_bytes)
    return HostPages(layout, Views(raw.reshape(announced.total_pages, announced.page_bytes), layout)), seen
