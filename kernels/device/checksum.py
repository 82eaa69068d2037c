"""Checksums of pages on a GPU, and what they are, in NumPy.

The words of a page, 8 bytes each in little-endian order, the last one filled up with zeros, are numbered from 1. The
checksum is the sum modulo 2^64 of ``mix(word + number * GAMMA)``, where GAMMA and mix are SplitMix64's (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014). The mix is a bijection, so a page with one word changed
has another checksum for certain; one with several has the same with a chance of 2^-64. A sum may be taken in any order,
which a CRC may not. It is no cryptographic hash: who may write a page can find another with the same checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.device import module
from kernels.device.pinned import Pinned

GAMMA = 0x9E3779B97F4A7C15
#: Threads of a block, and bytes of a page for each of them.
THREADS, BYTES_EACH = 256, 128


def reference(pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The checksum of each of ``pages``, ``[n, page_bytes]``: ``[n]``."""
    padded = np.pad(pages, ((0, 0), (0, -pages.shape[1] % 8)))
    words = padded.view("<u8").astype(np.uint64)
    z: Any = words + np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    checksums: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))).sum(axis=1, dtype=np.uint64)
    return checksums


def blocks_of(page_bytes: int) -> int:
    """Blocks that share a page."""
    return max(1, -(-page_bytes // (THREADS * BYTES_EACH)))


class PageChecksums:
    """Checksums on CuPy's current device, on a stream of their own. Raises KernelError if the kernel does not compile.

    For one thread, which has the device as its current one in every call.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._module = module.load("checksum")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned = Pinned()

    def of(self, pointer: int, page_bytes: int, pages: Sequence[int]) -> list[int]:
        """The checksums of these pages of the arena at ``pointer``; waits for the GPU."""
        blocks = blocks_of(page_bytes)
        with self._stream:
            numbers = self._pinned.array(np.asarray(pages, np.int32))
            partials: Any = self._cupy.ndarray((len(pages), blocks), np.uint64)
            arguments = [np.intp(pointer), numbers, partials, np.int64(page_bytes), np.int32(blocks)]
            self._module.launch("checksum_pages", len(pages) * blocks, THREADS, arguments, stream=self._stream)
            found = self._pinned.get(partials)
        return [int(one) for one in found.sum(axis=1, dtype=np.uint64)]
