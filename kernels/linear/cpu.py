"""`linear` on a CPU: products by BLAS in which the bits of a row do not depend on other rows.

BLAS chooses the order of summation by the shapes and layout of a product, so a row's bits differ between products of
many rows and of few. There are two ways around that, chosen for each shape of weight when it is loaded:

- **Products of rows.** Where BLAS sums in the same order for any number of rows, as with AVX-512, the weight stays as
  it is and all rows are multiplied together. `product_rows` finds out by comparing bits.
- **Tiles of a packed weight.** Elsewhere the weight is rearranged, in small blocks, into the order into which BLAS
  copies it before multiplying (`Packed`, in the same memory), and every product is a tile of 4 or 8 rows by one block.
  BLAS's copy is most of the cost of a product of few rows; packing halves it.
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

#: Rows of the smallest product; of the largest one computed as ``weight @ x.T``, which is faster for few rows; and of
#: the largest one. Powers of two.
LEAST_ROWS, THIN_ROWS, MOST_ROWS = 2, 8, 512
#: Most outputs of a product of rows; a multiple of `BLOCK_STEP`.
BLOCK_OUTPUTS = 3072
#: Most bytes of the weights of those outputs, unless `BLOCK_STEP` outputs take more.
BLOCK_BYTES = 8 << 20
#: The outputs of a block are a multiple of this if the weight has that many: BLAS's kernels compute 4 to 24 at a time.
#: A block of a packed weight has exactly this many.
BLOCK_STEP = 48
#: Rows of a tile of a packed weight.
FEW, MANY = 4, 8
#: Most inputs of such a tile; longer sums are split. This keeps OpenBLAS single-threaded: it uses a second thread for
#: more than 2 ** 18 multiplications.
TILE_INPUTS = 640
#: Approximate bytes of the tiles that are computed at a time.
TILES_BYTES = 1 << 20
#: The number of multiplications that justifies another thread.
THREAD_WORK = 1 << 21


class Packed:
    """A weight ``[outputs, inputs]`` as blocks ``[inputs, BLOCK_STEP]`` and a block of the remaining outputs."""

    __slots__ = ("blocks", "rest", "shape")

    def __init__(self, tensor: F32) -> None:
        """Rearrange ``tensor``, C-contiguous, in place: its previous content is lost."""
        self.shape: tuple[int, int] = tensor.shape
        outputs, inputs = self.shape
        whole = outputs // BLOCK_STEP * BLOCK_STEP
        rows = tensor[:whole].reshape(-1, BLOCK_STEP, inputs)
        self.blocks: F32 = tensor[:whole].reshape(-1, inputs, BLOCK_STEP)
        self.rest: F32 = tensor[whole:].reshape(inputs, outputs - whole)
        for block, its_rows in zip(self.blocks, rows, strict=True):
            block[...] = its_rows.T  # NumPy detects the overlap and copies first
        self.rest[...] = tensor[whole:].T

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, rows: I64) -> F32:
        """Gather ``rows`` of the original weight, ``[n, inputs]``."""
        taken = np.empty((len(rows), self.shape[1]), np.float32)
        block, place = np.divmod(rows, BLOCK_STEP)
        inside = block < len(self.blocks)
        taken[inside] = self.blocks[block[inside], :, place[inside]]
        taken[~inside] = self.rest[:, place[~inside]].T
        return taken


def prepared(tensor: F32) -> F32 | Packed:
    """Convert a C-contiguous weight ``[outputs, inputs]`` to the form that `linear` takes. May overwrite ``tensor``."""
    outputs, inputs = tensor.shape
    if not tensor.size or product_rows(block_outputs(outputs, inputs), inputs):
        return tensor
    return Packed(tensor if tensor.flags.writeable else tensor.copy())


def linear(x: F32, weight: F32 | Packed, widen: bool = False) -> F32:
    """``x @ weight.T`` ``[n, outputs]`` for ``x`` ``[n, inputs]``, ``weight`` ``[outputs, inputs]``.

    ``weight`` comes from `prepared`; a plain C-contiguous array is copied and prepared at each call, if necessary.
    ``widen`` requests a float32 result whatever the type of ``x``; here it always is float32.
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
    """The number of outputs of a product of rows: as even a share as the limits of a block allow."""
    most = max(BLOCK_BYTES // (4 * inputs * BLOCK_STEP), 1) * BLOCK_STEP
    blocks = -(-outputs // min(most, BLOCK_OUTPUTS))
    share = -(-outputs // blocks)
    return min(-(-share // BLOCK_STEP) * BLOCK_STEP, outputs)


@functools.cache
def product_rows(outputs: int, inputs: int) -> tuple[int, ...]:
    """The row counts, ascending powers of two, for which products with a block give each row the same bits.

    Empty if none exceeds `THIN_ROWS`: then tiles of a packed weight are faster.

    The order of summation never depends on values, and two orders practically never agree in every bit of a product of
    random matrices. So one comparison decides a size, provided that it uses exactly the products that `linear` uses: a
    smaller weight would have a different kernel, different edges or a different split over threads. Therefore `linear`
    multiplies by blocks of one shape, never by a whole weight.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    weight = generator.standard_normal((outputs, inputs), np.float32)
    least = LEAST_ROWS
    while least <= THIN_ROWS:  # products of fewer rows may have their own kernel
        sizes = _alike(weight, least, generator)
        if sizes[-1] > THIN_ROWS:
            return sizes
        least *= 2
    return ()


def _alike(weight: F32, least: int, generator: np.random.Generator) -> tuple[int, ...]:
    """The row counts from ``least`` on whose products agree with those of ``least`` rows; (0,) if not even these do."""
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
    """Cover ``n`` rows by products of ``sizes`` rows, as (first row, rows); the last product may have excess rows."""
    done = 0
    while done < n:
        left = n - done
        rows = next((size for size in sizes if size >= left), sizes[-1])
        if left < rows and left > THIN_ROWS:  # a few excess rows are free, many are not
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
        first = min(first, outputs - size)  # all blocks have one shape, so the last may overlap
        block = weight[first : first + size]
        for at, rows in parts:
            y[at : at + rows, first : first + size] = multiply(x[at : at + rows], block)[: n - at]


# --- tiles of a packed weight -----------------------------------------------------------------------------------------


@functools.cache
def tile_rows(inputs: int, outputs: int) -> tuple[int, ...]:
    """The row counts for which products with a block ``[inputs, outputs]`` give each row the same bits.

    `FEW`, or `FEW` and `MANY`; or 1, which is exact by construction, if the bits depend on a row's index in the tile.
    As in `product_rows`, the products compared are those that `linear` computes.
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
    """``x`` padded with rows of zeros, ``[tiles, rows, inputs]``."""
    n, inputs = x.shape
    rows = sizes[0] if n <= sizes[0] else sizes[-1]
    if n % rows:
        x = np.concatenate([x, np.zeros((-n % rows, inputs), np.float32)])
    return np.ascontiguousarray(x).reshape(-1, rows, inputs)


def _share(tiled: F32, weight: Packed, y: F32, first: int, last: int) -> None:
    """Compute the outputs of blocks ``first`` to ``last`` - 1."""
    rows = tiled.shape[0] * tiled.shape[1]
    some = max(1, TILES_BYTES // (4 * rows * BLOCK_STEP))
    for at in range(first, last, some):
        product = tiles(tiled, weight.blocks[at : min(at + some, last)])
        found = product.transpose(1, 2, 0, 3).reshape(rows, -1)[: len(y)]
        y[:, at * BLOCK_STEP : at * BLOCK_STEP + found.shape[1]] = found


@functools.cache
def threads() -> int:
    """The number of threads that multiply: BLAS's number when the first product was computed."""
    counts = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    return max(counts, default=1)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads() - 1), thread_name_prefix="linear")
