"""How K and V lie in vLLM's blocks and in the daemon's pages, and where each unit of tokens is in both.

NumPy alone: a tensor is anything with torch's ``shape``, ``stride``, ``element_size`` and ``data_ptr``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocmforge.client.layout import PageLayout

#: What is copied at once on a GPU, in bytes.
VECTOR = 16


class BlockInvalid(ValueError):
    """The KV cache has a form that the connector cannot copy."""


def units(
    table: Sequence[int], start: int, stop: int, blocks: Sequence[int], page_size: int, block_size: int
) -> NDArray[np.int64]:
    """Where the units of tokens [start, stop) lie: ``[units, 4]``, the page, the unit in it, the block, the unit in it.

    ``blocks`` begins with the one that holds ``start``.
    """
    unit = min(page_size, block_size)
    at = np.arange(start, stop, unit, dtype=np.int64)
    page, block = at // page_size, at // block_size - start // block_size
    pages, owned = np.asarray(table, np.int64), np.asarray(blocks, np.int64)
    return np.stack([pages[page], at % page_size // unit, owned[block], at % block_size // unit], axis=1)


def run_bytes(layer: Any) -> int:
    """The bytes of a block of a layer, ``[blocks, ...]``. Raises BlockInvalid unless they are one run."""
    run = 1
    for size, stride in zip(reversed(layer.shape[1:]), reversed(layer.stride()[1:]), strict=True):
        if size > 1 and stride != run:
            raise BlockInvalid(
                f"a block of this attention backend is not one run of bytes: {tuple(layer.shape)} at {layer.stride()}"
            )
        run *= size
    return int(run * layer.element_size())


def check_packed(layer: Any, layout: PageLayout, block_size: int, count: int) -> None:
    """Raise BlockInvalid unless a page is the bytes of whole blocks of such layers, and nothing else."""
    if layout.page_size % block_size:
        raise BlockInvalid(
            f"page_size is {layout.page_size}: on this attention backend it must be a multiple of vLLM's block size, "
            f"{block_size}"
        )
    found, expected = run_bytes(layer), layout.page_bytes // layout.layers * block_size // layout.page_size
    if len(layer) != count or found != expected:
        raise BlockInvalid(
            f"the KV cache of a layer is {len(layer)} blocks of {found} bytes: only {count} of {expected} are supported"
        )


@dataclass(frozen=True, slots=True)
class Form:
    """How a unit lies in a page and in a block: rows of ``vectors`` of 16 bytes by k or v, head and slot.

    ``page`` and ``block`` are a ``Side`` of move.hip.
    """

    order: str
    kvs: int
    heads: int
    slots: int
    vectors: int
    page: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, layer: Any, layout: PageLayout, block_size: int, count: int) -> Form:
        """The form of a layer's tensor, all of whose layers are alike.

        ``native`` where K and V, heads and slots are dimensions of it, in any order of memory; ``packed`` where a block
        is one run of bytes. Raises BlockInvalid for neither.
        """
        unit, item = min(layout.page_size, block_size), layer.element_size()
        heads, dim, page_size = layout.kv_heads, layout.head_dim, layout.page_size
        row = dim * item
        shapes = ((count, 2, block_size, heads, dim), (2, count, block_size, heads, dim))
        if tuple(layer.shape) in shapes and layer.stride(4) == 1:
            blocks, kv = (0, 1) if tuple(layer.shape) == shapes[0] else (1, 0)
            strides = [layer.stride(nth) * item for nth in (blocks, kv, 3, 2)]
            page = (
                2 * heads * page_size * row,
                layout.page_bytes,
                unit * row,
                heads * page_size * row,
                page_size * row,
                row,
            )
            block = (0, strides[0], unit * strides[3], strides[1], strides[2], strides[3])
            form = cls("native", 2, heads, unit, row // VECTOR, page, block)
        else:
            check_packed(layer, layout, block_size, count)
            row = run_bytes(layer)
            page = (page_size // block_size * row, layout.page_bytes, row, 0, 0, 0)
            form = cls("packed", 1, 1, 1, row // VECTOR, page, (0, layer.stride(0) * item, 0, 0, 0, 0))
        steps = [row, layout.page_bytes, *form.page, *form.block, layer.data_ptr()]
        if any(step % VECTOR for step in steps):
            raise BlockInvalid(
                f"a head of {dim} numbers of {item} bytes is not a multiple of {VECTOR} bytes, or not aligned"
            )
        return form
