"""Units of K and V between pages and blocks: where they lie, and the kernel that moves them, run thread by thread."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rocmforge.client import PageLayout
from rocmforge.vllm.blocks.form import BlockInvalid, Form, units
from tests import tools

KERNEL = Path(__file__).parents[2] / "clients" / "python" / "rocmforge" / "vllm" / "blocks" / "move.hip"
HARNESS = """
struct uint4 {{ unsigned x, y, z, w; }};
static struct {{ unsigned x; }} blockIdx, threadIdx, blockDim;
#define __global__
#include "{kernel}"
extern "C" void run(int grid, int threads, unsigned char *pages, const long long *layers, const long long *where,
                    const Side *sides, const int *counts) {{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < (unsigned)grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < (unsigned)threads; threadIdx.x++)
            move_units(pages, layers, where, sides, counts[0], counts[1], counts[2], counts[3], counts[4], counts[5]);
}}
"""


@dataclass
class Tensor:
    """What `Form` reads of a torch tensor, on an array."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def stride(self, nth: int | None = None) -> Any:
        strides = tuple(one // self.array.itemsize for one in self.array.strides)
        return strides if nth is None else strides[nth]

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    tools.need("g++")
    folder = tmp_path_factory.mktemp("move")
    (folder / "harness.cpp").write_text(HARNESS.format(kernel=KERNEL))
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    subprocess.run([*command, "-x", "c++", "harness.cpp", "-o", "move.so"], cwd=folder, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "move.so"))


def aligned(shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Zeros at an address that is a multiple of 16."""
    size = int(np.prod(shape))
    raw = np.zeros(size + 8, np.uint16)
    skip = -raw.ctypes.data % 16 // 2
    return raw[skip : skip + size].reshape(shape)


def move(
    kernel: ctypes.CDLL, form: Form, layers: list[Tensor], pages: NDArray[Any], where: NDArray[np.int64], saves: bool
) -> None:
    bases = np.array([layer.data_ptr() for layer in layers], np.int64)
    sides = np.array([form.page, form.block], np.int64)
    counts = np.array([len(layers), form.kvs, form.heads, form.slots, form.vectors, saves], np.int32)
    pointers = (ctypes.c_void_p(one.ctypes.data) for one in (pages, bases, where, sides, counts))
    kernel.run(len(where) * len(layers), 32, *pointers)


LAYERS, HEADS, DIM, COUNT = 2, 2, 24, 9  # 3 vectors a head: no power of 2


def layer(order: str, size: int) -> NDArray[np.uint16]:
    """A layer's cache, as a view ``[block, (k, v), slot, head, dim]`` of memory in the order of a backend."""
    if order == "NHD":
        return aligned((COUNT, 2, size, HEADS, DIM))
    if order == "HND":
        return aligned((COUNT, 2, HEADS, size, DIM)).transpose(0, 1, 3, 2, 4)
    if order == "K and V apart":
        return aligned((2, COUNT, size, HEADS, DIM))
    return aligned((COUNT, 1 + 2, 2, size, HEADS, DIM))[:, 1]  # layers lie between


@pytest.mark.parametrize("order", ["NHD", "HND", "K and V apart", "layers between blocks"])
@pytest.mark.parametrize(("size", "page"), [(16, 16), (16, 4), (4, 16)])
def test_tokens_are_moved_between_a_backend_and_pages(kernel: ctypes.CDLL, order: str, size: int, page: int) -> None:
    layout = PageLayout(page, LAYERS, HEADS, DIM, "bf16")
    draw = np.random.default_rng(1)
    caches = [layer(order, size) for _ in range(LAYERS)]
    form = Form.of(Tensor(caches[0]), layout, size, COUNT)
    assert form.order == "native"
    pages = aligned((12, LAYERS, 2, HEADS, page, DIM))
    table = [7, 2, 11, 5, 1, 9, 3, 8]
    first, stop = 16, 32  # blocks begin with the one of the first token
    for cache in caches:
        cache[...] = draw.integers(1, 60000, cache.shape)
    before = [cache.copy() for cache in caches]
    owned = [4, 8, 1, 6][: max(1, (stop - first) // size)]
    where = units(table, first, stop, owned, page, size)
    move(kernel, form, [Tensor(cache) for cache in caches], pages, where, True)
    kv = {"K and V apart": lambda cache, b: cache[:, b]}.get(order, lambda cache, b: cache[b])
    for nth, cache in enumerate(before):
        for at in range(first, stop):
            expected = kv(cache, owned[at // size - first // size])[:, at % size]
            assert np.array_equal(pages[table[at // page], nth, :, :, at % page], expected)
    assert np.count_nonzero(pages) == LAYERS * 2 * HEADS * DIM * (stop - first)  # and nothing else
    for cache in caches:
        cache[...] = 0
    move(kernel, form, [Tensor(cache) for cache in caches], pages, where, False)
    for cache, old in zip(caches, before, strict=True):
        for block in range(COUNT):
            wanted = kv(old, block) if block in owned else 0 * kv(old, block)
            assert np.array_equal(kv(cache, block), wanted)


def test_packed_blocks_are_moved_as_they_are(kernel: ctypes.CDLL) -> None:
    layout = PageLayout(16, LAYERS, HEADS, DIM, "bf16")
    caches = [aligned((COUNT, HEADS, 8, 2 * DIM)) for _ in range(LAYERS)]
    for nth, cache in enumerate(caches):
        cache[...] = np.arange(cache.size).reshape(cache.shape) + nth
    form = Form.of(Tensor(caches[0]), layout, 8, COUNT)
    assert form.order == "packed"
    pages = aligned((4, LAYERS, 2, HEADS * 8 * 2 * DIM))
    where = units([3, 0, 2], 8, 32, [5, 6, 1], 16, 8)
    move(kernel, form, [Tensor(cache) for cache in caches], pages, where, True)
    for nth, cache in enumerate(caches):
        for page, part, block in ((3, 1, 5), (0, 0, 6), (0, 1, 1)):
            assert np.array_equal(pages[page, nth, part], cache[block].reshape(-1))


@pytest.mark.parametrize(
    ("shape", "size", "why"),
    [
        ((COUNT, HEADS, 32, 2 * DIM), 32, "must be a multiple of vLLM's block size, 32"),
        ((COUNT, HEADS, 16, DIM), 16, "only 9 of"),
        ((COUNT + 1, HEADS, 16, 2 * DIM), 16, "is 10 blocks"),
    ],
)
def test_other_forms_are_refused(shape: tuple[int, ...], size: int, why: str) -> None:
    with pytest.raises(BlockInvalid, match=why):
        Form.of(Tensor(aligned(shape)), PageLayout(16, LAYERS, HEADS, DIM, "bf16"), size, COUNT)


def test_heads_that_are_no_whole_vectors_are_refused() -> None:
    with pytest.raises(BlockInvalid, match="not a multiple of 16 bytes"):
        Form.of(Tensor(aligned((COUNT, 2, 16, HEADS, 4))), PageLayout(16, LAYERS, HEADS, 4, "bf16"), 16, COUNT)
    with pytest.raises(BlockInvalid, match="not one run of bytes"):
        whole = aligned((COUNT, 2 * HEADS, 16, 2 * DIM))[:, ::2]
        Form.of(Tensor(whole), PageLayout(16, LAYERS, HEADS, DIM, "bf16"), 16, COUNT)
