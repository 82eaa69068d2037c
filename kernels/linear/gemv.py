"""Products of a few rows with gemv.hip: when to use it, and how to launch it."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.device.gpu import Gpu

#: Threads per block and outputs per wave, as in gemv.hip, and bytes per pack.
THREADS, PAIR, PACK = 256, 2, 16
#: The row counts that the kernel is compiled for: RF_ROWS.
COMPILED = (1, 2, 4)
#: From two rows on, the product is compute-bound, and libraries use matrix units: then gemv.hip only takes weights with
#: so few bytes per row that launch overhead dominates.
ROW_BYTES = 64 << 20
#: Most bytes of normalised rows in shared memory: with the kernel's own, under 48 KB, and several blocks fit.
NORMED_BYTES = 32 << 10
#: Lanes per multiprocessor that should have loads to issue; fewer where every block computes a norm first.
LANES, NORMED_LANES = 1024, 512
#: Resident blocks per multiprocessor, for one row and for more, as gemv.hip requests on CUDA.
BLOCKS = 4, 3


@dataclass(frozen=True, slots=True)
class Product:
    """A product of ``rows`` rows of ``inputs`` numbers, of ``itemsize`` bytes each, with a weight of ``outputs`` rows.

    ``normed``: the rows are normalised first. ``gated``: the weight has twice as many rows, which the activation
    reduces to ``outputs`` numbers.
    """

    rows: int
    inputs: int
    outputs: int
    itemsize: int
    normed: bool = False
    gated: bool = False

    @property
    def pairs(self) -> int:
        """The units of work of a wave."""
        return self.outputs if self.gated else -(-self.outputs // PAIR)

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows, which is also the dynamic shared memory needed to normalise them first."""
        return self.rows * self.inputs * self.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.outputs * (1 + self.gated) * self.inputs * self.itemsize


@dataclass(frozen=True, slots=True)
class Launch:
    """``split`` waves share the inputs of an output; ``blocks`` of `THREADS`; for ``rows`` rows, one of `COMPILED`."""

    split: int
    blocks: int
    rows: int


def fits(product: Product) -> bool:
    """Whether to compute a product with gemv.hip. Arrays must be aligned to `PACK`."""
    return (
        1 <= product.rows <= COMPILED[-1]
        and product.inputs * product.itemsize % PACK == 0
        and (product.rows == 1 or product.rows * product.weight_bytes <= ROW_BYTES)
        and (not product.normed or product.rows_bytes <= NORMED_BYTES)
    )


def launch(gpu: Gpu, product: Product, blocks: int | None = None) -> Launch:
    """The launch configuration of a product; ``blocks`` of a multiprocessor, by default `BLOCKS`.

    ``split`` depends only on the weight and the GPU, so that a row's sums do not depend on the number of rows.
    """
    lanes = NORMED_LANES if product.normed else LANES
    waves, packs = THREADS // gpu.wave, product.inputs * product.itemsize // PACK
    split = 1
    while (
        2 * split <= waves
        and product.pairs * split * gpu.wave < gpu.processors * lanes
        and 2 * split * gpu.wave <= packs
    ):
        split *= 2
    # No more blocks than fit, balanced over the multiprocessors.
    room = gpu.processors * (blocks or BLOCKS[product.rows > 1])
    return Launch(split, min(-(-product.pairs // (waves // split)), room), compiled_rows(product))


def compiled_rows(product: Product) -> int:
    """The number of rows, one of `COMPILED`, of the kernel that computes a product."""
    return next(rows for rows in COMPILED if rows >= product.rows)
