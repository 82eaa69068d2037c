# mypy: disable-error-code="arg-type"
"""rope.hip against ops_numpy: queries rotated, K and V in their slots, and nothing else touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import ops_numpy as ops
from tests.kernels.devices import Device
from tests.kernels.numbers import ROUNDED, TYPES, error, normal, rope_angles, wide

LAYERS, LAYER = 3, 1
EPS = 1e-6


@dataclass
class Batch:
    """Rows of a ragged batch, each of some tokens from a position on, in pages of its own."""

    positions: NDArray[np.int32]
    page: NDArray[np.int32]
    slot: NDArray[np.int32]
    segments: NDArray[np.int32]  # where the tokens of a page begin, and the end
    pages: int


def batch(page_size: int, rows: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Lay out rows of (first position, tokens), on pages in no order."""
    tables = [-(-(start + length) // page_size) for start, length in rows]
    numbers = np.random.default_rng(seed).permutation(sum(tables) + 3).astype(np.int32)
    positions, page, segments, used = [], [], [0], 0
    for (start, length), table in zip(rows, tables, strict=True):
        of_row = np.arange(start, start + length)
        positions.append(of_row)
        page.append(numbers[used : used + table][of_row // page_size])
        for tokens in np.unique(of_row // page_size, return_counts=True)[1]:
            segments.append(segments[-1] + int(tokens))
        used += table
    where = np.concatenate(positions).astype(np.int32)
    return Batch(where, np.concatenate(page), where % page_size, np.array(segments, np.int32), len(numbers))


def angles(last: int, head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return rope_angles(np.arange(last + 1), head_dim, 10000.0)


def exact(
    qkv: NDArray[Any],
    bias: NDArray[Any] | None,
    weights: list[NDArray[Any]] | None,
    at: Batch,
    query_heads: int,
    kv_heads: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return the expected q, k and v, in float32."""
    heads = wide(qkv) if bias is None else wide(qkv) + wide(bias)
    head_dim = heads.shape[-1]
    q, k, v = np.split(heads, [query_heads, query_heads + kv_heads], axis=1)
    if weights:
        q, k = (ops.rms_norm(x, wide(weight), EPS)[0] for x, weight in zip((q, k), weights, strict=True))
    cosine, sine = rope_angles(at.positions.astype(np.int64), head_dim, 10000.0)
    return ops.rope(q, cosine, sine), ops.rope(k, cosine, sine), v


def lanes(head_dim: int, kind: str) -> int:
    """The lanes of a head, as in rope.hip."""
    packs = head_dim // 2 * TYPES[kind].itemsize // 16
    return next(n for n in (4, 8, 16, 32) if n >= packs)


def rotate_and_write(
    device: Device,
    launches: Any,
    qkv: Any,
    q: Any,
    bias: Any,
    weights: list[Any],
    tables: list[Any],
    at: Batch,
    pages: Any,
    **shape: Any,
) -> None:
    heads = shape["q_heads"] + (0 if shape["int8"] else 2 * shape["kv_heads"])
    grid = (len(at.positions), -(-heads * lanes(shape["head_dim"], shape["kind"]) // shape["block"]))
    where = [
        None if shape.get("own_rows") else device.array(at.positions),
        device.array(at.page),
        device.array(at.slot),
    ]
    numbers = [np.int32(shape[name]) for name in ("page_size", "q_heads", "kv_heads")]
    arguments = [qkv, q, np.int64(shape["q_stride"]), bias, *weights, np.float32(EPS), *tables, *where]
    launches.launch(
        "rope_write",
        grid,
        shape["block"],
        [*arguments, pages, np.int64(shape["page_bytes"]), np.int32(LAYER), *numbers],
    )


# (q_heads, kv_heads, page_size, block, rows)
BATCHES = [
    (4, 2, 16, 128, [(0, 5), (15, 1), (14, 20), (100, 1)]),
    (1, 1, 1, 64, [(0, 3), (7, 2)]),
    (7, 1, 24, 192, [(23, 2), (0, 1), (48, 1)]),
]


@pytest.mark.parametrize(
    ("kind", "kv", "head_dim"),
    [
        ("F32", "F32", 80),
        ("F16", "F16", 128),
        ("F16", "BF16", 128),
        ("BF16", "BF16", 64),
        ("BF16", "BF16", 96),
        ("BF16", "F16", 256),
        ("F32", "BF16", 256),
    ],
)
def test_rope_write(device: Device, kind: str, kv: str, head_dim: int) -> None:
    launches = device.compile("rope", {"RF_TYPE": kind, "RF_KV": kv, "RF_HEAD_DIM": head_dim})
    for number, (q_heads, kv_heads, page_size, block, rows) in enumerate(BATCHES):
        at = batch(page_size, rows)
        if number:
            at.page[[1, -1]] = -1  # their K and V go nowhere
        n, normed, in_place = len(at.positions), number != 1, number == 0
        qkv = normal((n, q_heads + 2 * kv_heads, head_dim), TYPES[kind])
        weights = [normal((head_dim,), TYPES[kind], seed) + TYPES[kind].type(1) for seed in (1, 2)] if normed else None
        bias = normal(qkv.shape[1:], TYPES[kind], seed=4) if number else None
        q, k, v = exact(qkv, bias, weights, at, q_heads, kv_heads)
        own_rows = number == 2  # of the tables: one for each token
        tables = angles(at.positions.max(), head_dim)
        if own_rows:
            tables = tables[0][at.positions], tables[1][at.positions]

        host = normal((at.pages, LAYERS, 2, kv_heads, page_size, head_dim), TYPES[kv], seed=3)
        pages, given = device.array(host), device.array(qkv)
        out = given if in_place else device.empty((n, q_heads, head_dim), TYPES[kind])
        rotate_and_write(
            device, launches, given, out, None if bias is None else device.array(bias),
            [device.array(w) for w in weights] if weights else [None, None],
            [device.array(table) for table in tables], at, pages,
            q_stride=(q_heads + 2 * kv_heads if in_place else q_heads) * head_dim, page_bytes=host[0].nbytes,
            q_heads=q_heads, kv_heads=kv_heads, page_size=page_size, head_dim=head_dim, block=block, kind=kind,
            int8=False, own_rows=own_rows,
        )  # fmt: skip
        found = device.get(out)
        assert error(found[:, :q_heads], q) < ROUNDED[kind]
        if in_place:
            assert np.array_equal(found[:, q_heads:], qkv[:, q_heads:])

        expected = wide(host)
        kept = at.page >= 0
        ops.write_kv(k[kept], v[kept], expected, LAYER, at.page[kept], at.slot[kept])
        written = wide(device.get(pages))
        touched = expected != wide(host)
        assert np.array_equal(written[~touched], expected[~touched])
        for which in range(2):
            assert error(written[:, LAYER, which], expected[:, LAYER, which]) < ROUNDED[kv]


def int8_pages(count: int, kv_heads: int, page_size: int, head_dim: int) -> NDArray[np.uint8]:
    """An arena of garbage, as the layout has it, with scales after the values."""
    page_bytes = LAYERS * 2 * kv_heads * (page_size * head_dim + 4)
    return np.random.default_rng(5).integers(0, 256, (count, page_bytes)).astype(np.uint8)


def views(host: NDArray[np.uint8], kv_heads: int, page_size: int, head_dim: int) -> tuple[Any, Any]:
    """Return values and scales of an INT8 arena, copies of both."""
    end = LAYERS * 2 * kv_heads * page_size * head_dim
    values = host[:, :end].copy().view(np.int8).reshape(-1, LAYERS, 2, kv_heads, page_size, head_dim)
    return values, host[:, end:].copy().view(np.float32).reshape(-1, LAYERS, 2, kv_heads)


@pytest.mark.parametrize(("kind", "head_dim"), [("F32", 80), ("BF16", 64), ("BF16", 128), ("F16", 256)])
@pytest.mark.parametrize(("kv_heads", "page_size"), [(2, 16), (1, 1), (1, 24)])
def test_write_int8(device: Device, kind: str, head_dim: int, kv_heads: int, page_size: int) -> None:
    """Two launches: the second continues in the pages of the first, with larger numbers in some rows."""
    launches = device.compile("rope", {"RF_TYPE": kind, "RF_KV": "INT8", "RF_HEAD_DIM": head_dim})
    q_heads = 3
    first = batch(page_size, [(0, 5), (0, 40), (0, 1), (0, 17)])
    second = after(first, [3, 8, 1, 30], [5, 40, 1, 17], page_size)
    steps = [(first, 1.0), (second, 2.5)]
    host = int8_pages(second.pages, kv_heads, page_size, head_dim)
    pages = device.array(host)
    values, scales = views(host, kv_heads, page_size, head_dim)
    stored: dict[tuple[int, int], NDArray[np.float32]] = {}
    table, own_rows = angles(200, head_dim), page_size == 24  # of the tables: one for each token
    for seed, (at, factor) in enumerate(steps):
        n = len(at.positions)
        tables = [device.array(part[at.positions] if own_rows else part) for part in table]
        qkv = normal((n, q_heads + 2 * kv_heads, head_dim), TYPES[kind], seed)
        qkv = (wide(qkv) * np.where(np.arange(n) % 3, factor, 1)[:, None, None]).astype(TYPES[kind])
        weights = [normal((head_dim,), TYPES[kind], 9)] * 2 if kv_heads == 2 else None
        bias = normal(qkv.shape[1:], TYPES[kind], 8) if page_size > 1 else None
        q, k, v = exact(qkv, bias, weights, at, q_heads, kv_heads)
        added = None if bias is None else device.array(bias)
        given, out = device.array(qkv), device.empty((n, q_heads, head_dim), TYPES[kind])
        of_heads = [device.array(w) for w in weights] if weights else [None, None]
        rotate_and_write(
            device, launches, given, out, added, of_heads, tables, at, pages,
            q_stride=q_heads * head_dim, page_bytes=host.shape[1], q_heads=q_heads, kv_heads=kv_heads,
            page_size=page_size, head_dim=head_dim, block=128, kind=kind, int8=True,
            own_rows=own_rows,
        )  # fmt: skip
        assert error(device.get(out), q) < ROUNDED[kind]
        positions = None if own_rows else device.array(at.positions)
        where = [positions, *(device.array(x) for x in (at.page, at.slot, at.segments))]
        numbers = [np.int32(x) for x in (LAYER, LAYERS, page_size, q_heads, kv_heads)]
        arguments = [
            given,
            added,
            of_heads[1],
            np.float32(EPS),
            *tables,
            *where,
            pages,
            np.int64(host.shape[1]),
            *numbers,
        ]
        launches.launch("write_int8", (len(at.segments) - 1, 2 * kv_heads), 128, arguments)

        ops.write_kv_int8(k, v, values, scales, LAYER, at.page, at.slot)
        new_values, new_scales = views(device.get(pages), kv_heads, page_size, head_dim)
        touched = np.zeros(scales.shape, bool)
        touched[at.page, LAYER] = True
        np.testing.assert_allclose(new_scales[touched], scales[touched], rtol=1e-5)
        assert new_scales[~touched].tobytes() == scales[~touched].tobytes()
        off = np.abs(new_values.astype(np.int32) - values)
        # A number half way between two multiples of the scale may go either way.
        assert off.max() <= 1 and np.count_nonzero(off) <= 1e-3 * k.size + 2
        # What a slot is worth, whatever was done to it since: half a scale each time it was rounded.
        stored |= {
            (int(p), int(s)): np.stack([k[i], v[i]]) for i, (p, s) in enumerate(zip(at.page, at.slot, strict=True))
        }
        for (page, slot), token in stored.items():
            scale = new_scales[page, LAYER][..., None]
            worth = new_values[page, LAYER, :, :, slot] * scale
            assert (np.abs(worth - token) <= (0.5 + 0.5 * seed) * scale * 1.01).all(), (page, slot)
        values, scales = new_values, new_scales


def after(first: Batch, lengths: list[int], starts: list[int], page_size: int) -> Batch:
    """The rows of a batch, going on where they were: pages that are not full are the same, the others new."""
    at = batch(page_size, list(zip(starts, lengths, strict=True)), seed=1)
    page = at.page + first.pages
    begin = 0
    end_of_first = np.cumsum(starts)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start % page_size:
            same = slice(begin, begin + min(length, page_size - start % page_size))
            page[same] = first.page[end_of_first[row] - 1]
        begin += length
    return Batch(at.positions, page, at.slot, at.segments, first.pages + at.pages)


def test_a_page_of_zeros_has_the_scale_0(device: Device) -> None:
    """... and not the one that its memory had before."""
    launches = device.compile("rope", {"RF_TYPE": "BF16", "RF_KV": "INT8", "RF_HEAD_DIM": 64})
    at = batch(16, [(0, 2)])
    host = int8_pages(at.pages, 1, 16, 64)
    pages = device.array(host)
    zeros = device.array(np.zeros((2, 3, 64), TYPES["BF16"]))
    tables = [device.array(table) for table in angles(1, 64)]
    where = [device.array(x) for x in (at.positions, at.page, at.slot, at.segments)]
    numbers = [np.int32(x) for x in (LAYER, LAYERS, 16, 1, 1)]
    arguments = [zeros, None, None, np.float32(EPS), *tables, *where, pages, np.int64(host.shape[1]), *numbers]
    launches.launch("write_int8", (1, 2), 64, arguments)
    values, scales = views(device.get(pages), 1, 16, 64)
    assert not scales[at.page[0], LAYER].any()
    assert not values[at.page[0], LAYER, :, :, :2].any()
