"""The shape of a page. Pure Python: nothing here imports gRPC or NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rocmforge.client.errors import InvalidConfiguration

#: Bytes of one element of K or V, by the name of its type.
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The shape of one page, ``[layer][k, v][kv_head][slot][head_dim]``, contiguous; ``page_size`` slots.

    ``dtype`` is a key of `ITEM_BYTES`. An int8 page ends with one f32 scale per ``[layer][k, v][kv_head]``. The daemon
    checks the numbers.
    """

    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The dimensions of one page: layers, 2, kv_heads, page_size, head_dim."""
        return (self.layers, 2, self.kv_heads, self.page_size, self.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V in one page, which come first. Raises InvalidConfiguration for an unknown dtype."""
        if self.dtype not in ITEM_BYTES:
            raise InvalidConfiguration(
                f"pages of {self.dtype} are not supported; dtype must be one of {', '.join(ITEM_BYTES)}",
                field="layout.data_type",
            )
        return self.layers * 2 * self.kv_heads * self.page_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales after K and V; 0 unless ``dtype`` is int8."""
        return self.layers * 2 * self.kv_heads * _SCALE_BYTES if self.dtype == "int8" else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page. Raises InvalidConfiguration for an unknown dtype."""
        return self.kv_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """Pages of ``page_bytes`` bytes for ``page_size`` tokens, of which only their engines know the inside.

    Engines share a pool if they name the same ``label``, 1 to 128 characters: it names the inner layout and all numbers
    that it depends on. The daemon checks the numbers.
    """

    page_size: int
    label: str
    page_bytes: int


Layout: TypeAlias = PageLayout | OpaqueLayout
