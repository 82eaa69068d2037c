"""Pages as arrays of NumPy, CuPy or torch. None of them owns the memory, and none is a copy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from rocmforge.client.errors import InvalidConfiguration
from rocmforge.client.layout import Layout, PageLayout

#: Types of array libraries, by the layout's. NumPy and CuPy have no bf16 of their own: its bits are uint16.
_PLAIN = {"f32": "float32", "f16": "float16", "bf16": "uint16", "int8": "int8"}
_TORCH = {**_PLAIN, "bf16": "bfloat16"}


class Views:
    """All pages of a session as arrays of one library.

    ``raw`` is uint8 ``[page, page_bytes]``. Write only to pages that were granted, and keep no array beyond the
    session: its pages go to others then.
    """

    def __init__(self, raw: Any, layout: Layout) -> None:
        self.raw = raw
        self.layout = layout

    @cached_property
    def kv(self) -> Any:
        """K and V, ``[page, layer, (k, v), kv_head, slot, head_dim]``, in the layout's dtype: float32, float16, int8;
        bf16 is bfloat16 in torch, and uint16 in NumPy and CuPy.

        Raises InvalidConfiguration for an opaque layout.
        """
        layout = self._known()
        return self._cut(0, layout.kv_bytes, _PLAIN[layout.dtype], layout.shape)

    @cached_property
    def scales(self) -> Any:
        """The scales of int8 pages, float32 ``[page, layer, (k, v), kv_head]``. Raises InvalidConfiguration for pages
        without.
        """
        layout = self._known()
        if not layout.scale_bytes:
            raise InvalidConfiguration(f"pages of {layout.dtype} have no scales; dtype must be int8")
        return self._cut(layout.kv_bytes, layout.page_bytes, "float32", layout.shape[:3])

    def layer(self, layer: int) -> Any:
        """K and V of one layer, ``[page, (k, v), kv_head, slot, head_dim]``. Raises IndexError."""
        return self.kv[:, layer]

    def _known(self) -> PageLayout:
        if not isinstance(self.layout, PageLayout):
            raise InvalidConfiguration(
                f"pages laid out as {self.layout.label!r} have raw bytes only; the client does not know their inside"
            )
        return self.layout

    def _cut(self, begin: int, end: int, dtype: str, shape: tuple[int, ...]) -> Any:
        return self.raw[:, begin:end].view(dtype).reshape(len(self.raw), *shape)


class TorchViews(Views):
    """All pages of a session as torch tensors."""

    @cached_property
    def kv(self) -> Any:
        """See `Views.kv`."""
        layout = self._known()
        return self._cut(0, layout.kv_bytes, _TORCH[layout.dtype], layout.shape)

    def _cut(self, begin: int, end: int, dtype: str, shape: tuple[int, ...]) -> Any:
        import torch

        return self.raw[:, begin:end].view(getattr(torch, dtype)).unflatten(1, shape)


def as_torch(array: Any, layout: Layout) -> TorchViews:
    """The raw pages of NumPy or CuPy as tensors on the same memory, by DLPack. Raises InvalidConfiguration without
    torch.
    """
    try:
        import torch
    except ImportError as error:
        raise InvalidConfiguration(f"torch is not installed: {error}") from error
    return TorchViews(torch.from_dlpack(array), layout)
