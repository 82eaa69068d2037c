"""vLLM's KV tensors, put on other memory while whoever has them keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rocmforge.vllm.direct.window import Window
from rocmforge.vllm.model import Unsupported

#: Blocks begin at a multiple of this, as vLLM's own do.
ALIGNMENT = 64


def block_bytes(layers: Sequence[torch.Tensor]) -> int:
    """Bytes of a block of all layers, one after the other. Raises Unsupported for tensors that have none."""
    total = 0
    for layer in layers:
        if not layer[0].is_contiguous():
            raise Unsupported(f"direct: a block of a layer is no run of bytes: {tuple(layer.shape)}, {layer.stride()}")
        total += layer[0].numel() * layer.element_size()
        if total % ALIGNMENT:
            raise Unsupported(f"direct: a layer's block must have a multiple of {ALIGNMENT} bytes, and ends at {total}")
    if len({layer.data_ptr() for layer in layers}) != len(layers):
        raise Unsupported("direct: layers that share a KV cache are not supported")
    return total


class Tensors:
    """The tensors of vLLM's layers, in order, on the blocks of a window as soon as pages are attached."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)
        self._block_bytes = block_bytes(layers)
        self._window: Window | None = None

    def attach(self, pages: Any) -> None:
        """Have the pages of a session there, ``rocmforge.client.HostPages``."""
        if self._window is None or self._window.pages != pages.total_pages:
            self.detach()
            self._window = Window(pages.total_pages, self._block_bytes)
            self._put(self._window)
        self._window.attach(pages.array)

    def detach(self) -> None:
        """Have private memory there."""
        if self._window is not None:
            self._window.detach()

    def _put(self, window: Window) -> None:
        memory, at = torch.from_numpy(window.blocks), 0
        for layer in self._layers:
            item, inner = layer.element_size(), layer.shape[1:]
            stride = (self._block_bytes // item, *layer.stride()[1:])
            layer.set_(memory.untyped_storage(), at // item, (window.pages + 1, *inner), stride)
            at += layer[0].numel() * item
