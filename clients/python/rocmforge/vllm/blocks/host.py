"""vLLM's KV cache in the host's memory, and its copies to and from pages there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rocmforge.client.layout import PageLayout
from rocmforge.vllm.blocks.form import check_packed, run_bytes, units


def packed(layer: torch.Tensor) -> torch.Tensor:
    """A layer's cache as bytes, ``[blocks, bytes]``, whose blocks are runs of bytes."""
    item = layer.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(layer.untyped_storage())
    return storage.as_strided(
        (layer.shape[0], run_bytes(layer)), (layer.stride(0) * item, 1), storage_offset=layer.storage_offset() * item
    )


class HostBlocks:
    """vLLM's blocks in the host's memory, ``count`` of them: one tensor a layer, ``[blocks, ...]``.

    Raises BlockInvalid for a page that is not a whole number of blocks, or a form that cannot be copied.
    """

    order = "packed"

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout, block_size: int, count: int) -> None:
        for layer in layers:
            check_packed(layer, layout, block_size, count)
        self._page_size, self._block_size = layout.page_size, block_size
        self._layers = [packed(layer) for layer in layers]
        self._pages: torch.Tensor | None = None

    def attach(self, pages: Any) -> None:
        """Take the pages of a session, ``rocmforge.client.HostPages``."""
        raw = torch.from_numpy(pages.array)
        self._pages = raw.view(len(raw), len(self._layers), self._page_size // self._block_size, -1)

    def detach(self) -> None:
        """Keep nothing of them."""
        self._pages = None

    def mark(self) -> None:
        """Nothing to wait for: what a step computes on a CPU is there when it ends."""

    def load(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: None) -> int:
        """Copy tokens [start, stop) of a block table into blocks; returns the bytes."""
        page, part, block, _ = self._units(table, start, stop, blocks).unbind(1)
        pages = self._attached()
        for nth, layer in enumerate(self._layers):
            layer[block] = pages[page, nth, part]
        return len(block) * sum(layer.shape[1] for layer in self._layers)

    def save(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: None) -> int:
        """Copy tokens [start, stop) from blocks into the pages of a block table; returns the bytes."""
        page, part, block, _ = self._units(table, start, stop, blocks).unbind(1)
        pages = self._attached()
        for nth, layer in enumerate(self._layers):
            pages[page, nth, part] = layer[block]
        return len(block) * sum(layer.shape[1] for layer in self._layers)

    def _units(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(units(table, start, stop, blocks, self._page_size, self._block_size))

    def _attached(self) -> torch.Tensor:
        if self._pages is None:
            raise RuntimeError("no session's pages are attached")
        return self._pages
