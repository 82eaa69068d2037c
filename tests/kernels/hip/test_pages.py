"""pages.hip against ops_numpy: whole pages, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import ops_numpy as ops
from tests.kernels.devices import Device

PAGES = 23
# Of a page: a multiple of 16 bytes, of 4, and odd; less than a thread's unit, and more than all threads take at once.
SIZES = [16, 4096, 36864, 2052, 20, 1, 77, 3001]


def arena(page_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(page_bytes).integers(0, 256, (PAGES, page_bytes)).astype(np.uint8)


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_pages(device: Device, page_bytes: int, blocks: int) -> None:
    module = device.compile("pages")
    host = arena(page_bytes)
    pages = device.array(host)
    shape = [np.int64(page_bytes), np.int32(blocks)]
    # One source may have several targets.
    pairs = np.array([[0, 22], [0, 3], [7, 8], [21, 1]], np.int32)
    module.launch("copy_pages", len(pairs) * blocks, 64, [pages, device.array(pairs), *shape])
    for source, target in pairs.tolist():
        ops.copy_page(host, source, target)  # type: ignore[arg-type]
    assert np.array_equal(device.get(pages), host)

    numbers = np.array([5, 22, 0, 11], np.int32)
    packed = device.empty((len(numbers), page_bytes), np.uint8)
    module.launch("pack_pages", len(numbers) * blocks, 64, [pages, device.array(numbers), packed, *shape])
    assert np.array_equal(device.get(packed), ops.pack_pages(host, numbers))  # type: ignore[arg-type]

    module.launch("zero_pages", len(numbers) * blocks, 64, [pages, device.array(numbers), *shape])
    for number in numbers:
        ops.zero_page(host, number)  # type: ignore[arg-type]
    assert np.array_equal(device.get(pages), host)

    elsewhere = np.array([2, 4, 21, 22], np.int32)
    module.launch("unpack_pages", len(numbers) * blocks, 64, [pages, device.array(elsewhere), packed, *shape])
    ops.unpack_pages(host, elsewhere, device.get(packed))  # type: ignore[arg-type]
    assert np.array_equal(device.get(pages), host)
