"""`linear` on a CPU: products by BLAS in which the bits of a row depend on no other row.

BLAS chooses the order of a sum by the shapes and the layout of a product, so a row has other bits in a product of many
rows than in one of few. There are two ways around that, chosen for each shape of weight when it is loaded:

- **Products of rows.** Where BLAS sums in one order whatever the number of rows, as it does with AVX-512, the weight
  stays as it is and rows are multiplied together, as many as there are. `product_rows` finds out by comparing bits.
- **Tiles of a packed weight.** Elsewhere the weight is turned by small blocks into the order in which BLAS copies it
  before it multiplies (`Packed`, in the same memory), and every product is a tile of 4 or 8 rows by one block. The copy
  is most of what a product of few rows costs, and this way it is half of that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

F32: TypeAlias = NDArray[np.float32]
I64: TypeAlias = NDArray[np.int64]

#: Rows of the smallest product; of the largest one that is computed as ``weight @ x.T``, which is faster for few rows;
#: and of the largest one at all. Powers of two.
LEAST_ROWS, THIN_ROWS, MOST_ROWS = 2, 8, 512
#: Outputs of a product of rows, at most; a multiple of `BLOCK_STEP`.
BLOCK_OUTPUTS = 3072
#: What the weights of those outputs take, at most; `BLOCK_STEP` of them may take more.
BLOCK_BYTES = 8 << 20
#: Outputs of a block are a multiple of this wherever a weight has as many: BLAS's kernels take 4 to 24 at once. A block
#: of a packed weight has just so many.
BLOCK_STEP = 48
#: Rows of a tile of a packed weight.
FEW, MANY = 4, 8
#: Inputs of such a tile, at most; longer sums are made of several. OpenBLAS takes no second thread for it then: it
#: would for more than 2 ** 18 multiplications.
TILE_INPUTS = 640
#: Bytes of the tiles that are computed at once, about.
TILES_BYTES = 1 << 20
#: Multiplications that are worth another thread.
THREAD_WORK = 1 << 21


class Packed:
    """A weight ``[outputs, inputs]`` in blocks ``[inputs, BLOCK_STEP]``, and one of the outputs left over."""

    __slots__ = ("blocks", "rest", "shape")

    def __init__(self, tensor: F32) -> None:
        """Turn ``tensor``, C-contiguous, in place: it holds nothing that anyone else could read afterwards."""
        self.shape: tuple[int, int] = tensor.shape
        outputs, inputs = self.shape
        whole = outputs // BLOCK_STEP * BLOCK_STEP
        rows = tensor[:whole].reshape(-1, BLOCK_STEP, inputs)
        self.blocks: F32 = tensor[:whole].reshape(-1, inputs, BLOCK_STEP)
        self.rest: F32 = tensor[whole:].reshape(inputs, outputs - whole)
        for block, its_rows in zip(self.blocks, rows, strict=True):
            block[...] = its_rows.T  # NumPy sees that they overlap
        self.rest[...] = tensor[whole:].T

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, rows: I64) -> F32:
        """Those rows of the weight as it was, ``[n, inputs]``."""
        taken = np.empty((len(rows), self.shape[1]), np.float32)
        block, place = np.divmod(rows, BLOCK_STEP)
        inside = block < len(self.blocks)
        taken[inside] = self.blocks[block[inside], :, place[inside]]
        taken[~inside] = self.rest[:, place[~inside]].T
        return taken


def prepared(tensor: F32) -> F32 | Packed:
    """A weight ``[outputs, inputs]`` as `linear` takes it; ``tensor``, C-contiguous, is given up and may be changed."""
    outputs, inputs = tensor.shape
    if not tensor.size or product_rows(block_outputs(outputs, inputs), inputs):
        return tensor
    return Packed(tensor if tensor.flags.writeable else tensor.copy())


def linear(x: F32, weight: F32 | Packed, widen: bool = False) -> F32:
    """``x @ weight.T`` ``[n, outputs]`` for ``x`` ``[n, inputs]``, ``weight`` ``[outputs, inputs]``.

    The weight is what `prepared` returns; a plain C-contiguous array is prepared, by a copy, wherever it must be.
    ``widen`` asks for float32 whatever the type of ``x``, which here it always is.
    """
    y = np.empty((len(x), len(weight)), np.float32)
    if not y.size:
        return y
    if not isinstance(weight, Packed):
        size = block_outputs(*weight.shape)
        if sizes := product_rows(size, weight.shape[1]):
            _products(x, weight, y, size, sizes)
            return y
        weight = Packed(weight.copy())
    _tiles(x, weight, y)
    return y


# --- products of rows ------------------------------------------------------------------------------------------------


def block_outputs(outputs: int, inputs: int) -> int:
    """How many outputs a product of rows has: as even a share of them as the bounds on a block allow."""
    most = max(BLOCK_BYTES // (4 * inputs * BLOCK_STEP), 1) * BLOCK_STEP
    blocks = -(-outputs // min(most, BLOCK_OUTPUTS))
    share = -(-outputs // blocks)
    return min(-(-share // BLOCK_STEP) * BLOCK_STEP, outputs)


@functools.cache
def product_rows(outputs: int, inputs: int) -> tuple[int, ...]:
    """Numbers of rows, rising powers of two, that a block may be multiplied by with the same bits for each row.

    Empty where no product of more than `THIN_ROWS` is among them: then tiles of a packed weight are faster.

    The order of a sum never depends on values, and two orders give the same bits all over a product of random matrices
    only by a miracle. So one comparison settles a size, provided that it is made of the very products that `linear`
    makes: a smaller weight would have another kernel, other edges or another split over threads. That is why `linear`
    multiplies by blocks of one shape, and never by a whole weight.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    weight = generator.standard_normal((outputs, inputs), np.float32)
    least = LEAST_ROWS
    while least <= THIN_ROWS:  # products of fewer may have a kernel of their own
        sizes = _alike(weight, least, generator)
        if sizes[-1] > THIN_ROWS:
            return sizes
        least *= 2
    return ()


def _alike(weight: F32, least: int, generator: np.random.Generator) -> tuple[int, ...]:
    """Numbers of rows from ``least`` on with the bits of products of ``least`` rows; (0,) if not even those agree."""
    x = generator.standard_normal((least, weight.shape[1]), np.float32)
    same = multiply(np.repeat(x[:1], least, axis=0), weight)
    if not np.array_equal(same, np.repeat(same[:1], least, axis=0)):
        return (0,)
    sizes, product = [least], multiply(x, weight)
    while (half := sizes[-1]) < MOST_ROWS:
        more = generator.standard_normal((half, weight.shape[1]), np.float32)
        x = np.concatenate([x, more])
        whole = multiply(x, weight)
        if not (np.array_equal(whole[:half], product) and np.array_equal(whole[half:], multiply(more, weight))):
            break
        sizes.append(2 * half)
        product = whole
    return tuple(sizes)


def multiply(x: F32, weight: F32) -> F32:
    """The product of some rows and a block of the weight, ``[rows, outputs]``."""
    return np.matmul(weight, x.T).T if len(x) <= THIN_ROWS else np.matmul(x, weight.T)


def spans(n: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cover ``n`` rows by products of ``sizes`` rows, as (first row, rows); the last product may have rows too many."""
    done = 0
    while done < n:
        left = n - done
        rows = next((size for size in sizes if size >= left), sizes[-1])
        if left < rows and left > THIN_ROWS:  # few rows too many cost nothing, many do
            rows = next(size for size in reversed(sizes) if size <= left)
        yield done, rows
        done += rows


def _products(x: F32, weight: F32, y: F32, size: int, sizes: tuple[int, ...]) -> None:
    """Multiply by blocks of ``size`` outputs."""
    n, outputs = y.shape
    parts = list(spans(n, sizes))
    missing = sum(rows for _, rows in parts) - n
    if missing:
        x = np.concatenate([x, np.zeros((missing, x.shape[1]), np.float32)])
    for first in range(0, outputs, size):
        first = min(first, outputs - size)  # the last block may overlap the one before: all have one shape
        block = weight[first : first + size]
        for at, rows in parts:
            y[at : at + rows, first : first + size] = multiply(x[at : at + rows], block)[: n - at]


# --- tiles of a packed weight -----------------------------------------------------------------------------------------


@functools.cache
def tile_rows(inputs: int, outputs: int) -> tuple[int, ...]:
    """Numbers of rows that a block ``[inputs, outputs]`` may be multiplied by with the same bits for each row.

    `FEW`, or `FEW` and `MANY`; 1, each row by itself, which is exact by construction, where BLAS tells the rows of a
    tile apart. What is compared is what `linear` computes, as for `product_rows`.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    block = generator.standard_normal((1, inputs, outputs), np.float32)
    x = generator.standard_normal((MANY, inputs), np.float32)
    same = tiles(np.repeat(x[:1], FEW, axis=0)[None], block)
    if not np.array_equal(same, np.repeat(same[:, :, :1], FEW, axis=2)):
        return (1,)
    few = tiles(x.reshape(-1, FEW, inputs), block).reshape(MANY, outputs)
    return (FEW, MANY) if np.array_equal(tiles(x[None], block)[0, 0], few) else (FEW,)


def tiles(x: F32, blocks: F32) -> F32:
    """Multiply tiles ``[t, rows, inputs]`` by blocks ``[b, inputs, outputs]``: ``[b, t, rows, outputs]``."""
    inputs = x.shape[2]
    step = -(-inputs // -(-inputs // TILE_INPUTS))
    product: F32 = np.matmul(x[..., :step], blocks[:, None, :step])
    for at in range(step, inputs, step):
        product += np.matmul(x[..., at : at + step], blocks[:, None, at : at + step])
    return product


def _tiles(x: F32, weight: Packed, y: F32) -> None:
    """Multiply by a packed weight, its blocks shared out among threads."""
    inputs, count = weight.shape[1], len(weight.blocks)
    if count:
        tiled = _tiled(x, tile_rows(inputs, BLOCK_STEP))
        shares = max(1, min(threads(), tiled.size * len(weight) // THREAD_WORK, count))
        bounds = [count * share // shares for share in range(shares + 1)]
        others = [_pool().submit(_share, tiled, weight, y, *bounds[at : at + 2]) for at in range(1, shares)]
        try:
            _share(tiled, weight, y, *bounds[:2])
        finally:
            for other in others:
                other.result()
    if width := weight.rest.shape[1]:
        last = tiles(_tiled(x, tile_rows(inputs, width)), weight.rest[None])
        y[:, -width:] = last.reshape(-1, width)[: len(x)]


def _tiled(x: F32, sizes: tuple[int, ...]) -> F32:
    """``x`` with rows of zeros after it, ``[tiles, rows, inputs]``."""
    n, inputs = x.shape
    rows = sizes[0] if n <= sizes[0] else sizes[-1]
    if n % rows:
        x = np.concatenate([x, np.zeros((-n % rows, inputs), np.float32)])
    return np.ascontiguousarray(x).reshape(-1, rows, inputs)


def _share(tiled: F32, weight: Packed, y: F32, first: int, last: int) -> None:
    """Compute the outputs of the blocks ``first`` to ``last``."""
    rows = tiled.shape[0] * tiled.shape[1]
    some = max(1, TILES_BYTES // (4 * rows * BLOCK_STEP))
    for at in range(first, last, some):
        product = tiles(tiled, weight.blocks[at : min(at + some, last)])
        found = product.transpose(1, 2, 0, 3).reshape(rows, -1)[: len(y)]
        y[:, at * BLOCK_STEP : at * BLOCK_STEP + found.shape[1]] = found


@functools.cache
def threads() -> int:
    """How many threads multiply: as many as BLAS had when the first product was computed."""
    counts = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    return max(counts, default=1)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads() - 1), thread_name_prefix="linear")
