"""The price of a page, exactly."""

from __future__ import annotations

import pytest

from services.common.errors import InvalidConfiguration
from services.kvcache.pool.layout import MAX_PAGE_BYTES, Layout, OpaqueLayout, PageLayout


@pytest.mark.parametrize(
    ("page_size", "layers", "kv_heads", "head_dim", "dtype", "expected"),
    [
        (16, 1, 32, 128, "f32", 524_288),
        (16, 1, 32, 128, "f16", 262_144),
        (16, 24, 32, 128, "f32", 12 * 2**20),
        (16, 24, 32, 128, "bf16", 6 * 2**20),
        (4, 1, 32, 128, "f32", 131_072),
        (1024, 24, 32, 128, "f32", 768 * 2**20),
        (16, 2, 8, 64, "int8", 2 * 2 * 8 * (16 * 64 + 4)),
        (4096, 1024, 1024, 1024, "f32", 2**45),
    ],
)
def test_page_bytes(page_size: int, layers: int, kv_heads: int, head_dim: int, dtype: str, expected: int) -> None:
    layout = PageLayout(page_size=page_size, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert layout.page_bytes == expected


@pytest.mark.parametrize("field", ["page_size", "layers", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 4097])
def test_numbers_out_of_range(field: str, value: int) -> None:
    good = {"page_size": 16, "layers": 1, "kv_heads": 1, "head_dim": 64}
    with pytest.raises(InvalidConfiguration, match=f"layout.{field} is {value}") as caught:
        PageLayout(**{**good, field: value}, dtype="f32")
    assert caught.value.field == f"layout.{field}"


def test_unknown_dtype() -> None:
    with pytest.raises(InvalidConfiguration, match=r"f8.*f32, f16, bf16, int8"):
        PageLayout(page_size=1, layers=1, kv_heads=1, head_dim=1, dtype="f8")


def test_the_price_of_an_opaque_page_is_what_it_says() -> None:
    assert OpaqueLayout(page_size=16, label="engine 1", page_bytes=12_345).page_bytes == 12_345
    largest = PageLayout(page_size=4096, layers=1024, kv_heads=1024, head_dim=1024, dtype="f32")
    assert largest.page_bytes == MAX_PAGE_BYTES


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_size": 0}, "layout.page_size"),
        ({"page_size": 4097}, "layout.page_size"),
        ({"page_bytes": 0}, "layout.opaque.page_bytes"),
        ({"page_bytes": MAX_PAGE_BYTES + 1}, "layout.opaque.page_bytes"),
    ],
)
def test_numbers_of_an_opaque_page_out_of_range(change: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"{field} is {next(iter(change.values()))}") as caught:
        OpaqueLayout(**{"page_size": 16, "page_bytes": 64, **change}, label="engine 1")
    assert caught.value.field == field


def test_layouts_are_the_same_only_in_everything() -> None:
    one: Layout = OpaqueLayout(page_size=4, label="engine 1", page_bytes=128)
    assert one == OpaqueLayout(page_size=4, label="engine 1", page_bytes=128)
    assert one != OpaqueLayout(page_size=4, label="engine 2", page_bytes=128)
    known: Layout = PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, dtype="f32")
    assert one.page_bytes == known.page_bytes and one != known, "the bytes alone do not say what is in them"
