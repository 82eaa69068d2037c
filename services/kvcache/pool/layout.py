"""The shape of a pool's pages, and their exact size in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.common.errors import InvalidConfiguration

#: Bytes per element. int8 pages end with one f32 scale for each [layer][k, v][kv_head].
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}

_SCALE_BYTES = 4

#: Upper limits, far above any model's values, so that a huge number is rejected by name before it is multiplied.
LIMITS = {"page_size": 4096, "layers": 1024, "kv_heads": 1024, "head_dim": 1024}

#: The most bytes of an opaque page: those of the largest page of the other layouts.
MAX_PAGE_BYTES = 1 << 45


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """``[layer][k, v][kv_head][slot][head_dim]`` with ``page_size`` slots; ``dtype`` is a key of ``ITEM_BYTES``.

    Raises InvalidConfiguration if a number is 0 or above its limit, or the dtype is unknown.
    """

    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            _check(f"layout.{name}", getattr(self, name), limit)
        if self.dtype not in ITEM_BYTES:
            raise InvalidConfiguration(
                f"layout.data_type is {self.dtype or 'unset'}; it must be one of {', '.join(ITEM_BYTES)}",
                field="layout.data_type",
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of all layers, and the scales of int8 pages."""
        heads = self.layers * 2 * self.kv_heads
        scales = heads * _SCALE_BYTES if self.dtype == "int8" else 0
        return heads * self.page_size * self.head_dim * ITEM_BYTES[self.dtype] + scales

    def __str__(self) -> str:
        return (
            f"page_size={self.page_size} layers={self.layers} kv_heads={self.kv_heads} "
            f"head_dim={self.head_dim} dtype={self.dtype}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueLayout:
    """``page_bytes`` bytes for ``page_size`` tokens, laid out as those who know the ``label`` know.

    Raises InvalidConfiguration if a number is 0 or above its limit.
    """

    page_size: int
    label: str
    page_bytes: int

    def __post_init__(self) -> None:
        _check("layout.page_size", self.page_size, LIMITS["page_size"])
        _check("layout.opaque.page_bytes", self.page_bytes, MAX_PAGE_BYTES)

    def __str__(self) -> str:
        return f"page_size={self.page_size} label={self.label} page_bytes={self.page_bytes}"


#: Two sessions share a pool if their layouts are equal.
Layout: TypeAlias = PageLayout | OpaqueLayout


def _check(field: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise InvalidConfiguration(f"{field} is {value}; it must be 1 to {limit}", field=field, limit=limit)
