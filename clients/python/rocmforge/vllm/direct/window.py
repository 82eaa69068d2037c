"""The addresses of vLLM's KV cache: they stay, and the memory there changes with the session.

Block 0, which vLLM never hands out, is private memory in front of the pages: block b is page b - 1. Without a session
the pages are private memory, too, so that whatever is still written reaches nobody.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = _LIBC.mremap.restype = ctypes.c_void_p
_PAGE = mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class Window:
    """Addresses of ``pages`` pages of ``page_bytes`` each and of block 0. They are never given back, since tensors are
    on them. Raises OSError when the system has no room for them.
    """

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.pages, self.page_bytes = pages, page_bytes
        self._length = _whole(pages * page_bytes)
        front = _whole(page_bytes)
        base = _mapped(_LIBC.mmap(None, _sized(front + self._length), _READ_WRITE, _PRIVATE, -1, ctypes.c_long(0)))
        self._pages_at = base + front
        size = (pages + 1) * page_bytes
        raw = (ctypes.c_uint8 * size).from_address(self._pages_at - page_bytes)
        self.blocks: NDArray[np.uint8] = np.ctypeslib.as_array(raw).reshape(pages + 1, page_bytes)

    def attach(self, pages: NDArray[np.uint8]) -> None:
        """Have the pages of a session there: the shared mapping that the array ``[pages, page_bytes]`` begins.

        Raises ValueError for another number of pages, and for memory that does not begin with a page of the system.
        """
        if pages.shape != (self.pages, self.page_bytes) or pages.ctypes.data % _PAGE:
            raise ValueError(f"pages {pages.shape} at {pages.ctypes.data:#x} do not fit {self.pages, self.page_bytes}")
        # Of a shared mapping, a length of 0 makes a second one of the same memory.
        there = ctypes.c_void_p(self._pages_at)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        _mapped(_LIBC.mremap(ctypes.c_void_p(pages.ctypes.data), _sized(0), _sized(self._length), flags, there))

    def detach(self) -> None:
        """Have private memory there, all zero. Idempotent."""
        there, flags = ctypes.c_void_p(self._pages_at), _PRIVATE | _MAP_FIXED
        _mapped(_LIBC.mmap(there, _sized(self._length), _READ_WRITE, flags, -1, ctypes.c_long(0)))


def _whole(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _sized(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)


def _mapped(address: int | None) -> int:
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"the KV cache cannot be mapped: {os.strerror(error)}")
    return address
