"""checksum.hip against its definition, and what the definition is worth."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.device import checksum
from tests.kernels.devices import Device

PAGES = 9
#: Of a page: a multiple of 16 bytes, of 8, of 4, and odd; less than a thread's unit, and more than all threads take.
SIZES = [16, 4096, 36864, 2056, 20, 1, 77, 3001]


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize(("blocks", "threads"), [(1, 64), (3, 256)])
def test_checksums(device: Device, page_bytes: int, blocks: int, threads: int) -> None:
    host = np.random.default_rng(page_bytes).integers(0, 256, (PAGES, page_bytes)).astype(np.uint8)
    numbers = np.array([8, 0, 3, 3], np.int32)
    partials = device.empty((len(numbers), blocks), np.uint64)
    arguments = [device.array(host), device.array(numbers), partials, np.int64(page_bytes), np.int32(blocks)]
    device.compile("checksum").launch("checksum_pages", len(numbers) * blocks, threads, arguments)
    found = device.get(partials).sum(axis=1, dtype=np.uint64)
    assert np.array_equal(found, checksum.reference(host)[numbers])


def test_the_definition_in_plain_integers() -> None:
    page = bytes(range(1, 20))
    total = 0
    for number, at in enumerate(range(0, len(page), 8), 1):
        z = (int.from_bytes(page[at : at + 8], "little") + number * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        total += z ^ (z >> 31)
    assert checksum.reference(np.frombuffer(page, np.uint8)[None])[0] == total % 2**64
    # SplitMix64 of seed 0, as its authors' C code prints it: 3 words of zeros are its first three numbers.
    first = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert checksum.reference(np.zeros((1, 24), np.uint8))[0] == sum(first) % 2**64


def test_every_bit_counts_and_so_does_every_place() -> None:
    page = np.random.default_rng(0).integers(0, 256, 264).astype(np.uint8)
    flipped = np.repeat(page[None], 8 * len(page), axis=0)
    for bit in range(8 * len(page)):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    moved = [np.roll(page, by) for by in (1, 8, 16, 128)]
    swapped = page.reshape(-1, 8)[::-1].reshape(-1)
    double = page.copy()
    double[[7, 15]] ^= 0x80  # the top bits of two words
    everything = np.concatenate([page[None], flipped, moved, swapped[None], double[None]])
    assert len(set(checksum.reference(everything).tolist())) == len(everything)
