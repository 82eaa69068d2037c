"""What each kernel means, in NumPy; the GPU backends have the same functions and are compared with these.

Shapes: ``n`` tokens, those of all rows of a batch one after another; ``pages`` is the arena, ``[page, layer, (k, v),
kv_head, slot, head_dim]``. Values are float32 and summed in float32; indices are int64.

**Exactness.** What a token gets is a function, bit for bit, of its own inputs and of the keys it sees: other rows,
where a chunk of a prompt begins and ends, the page size and a prefix that was there already change nothing. A plain ``x
@ w`` does not give that: BLAS chooses its kernel, and with it the order of the sum, by the number of rows, and some
kernels even by the place of a row. So `linear` computes in tiles of `TILE_ROWS` rows, in larger ones only where BLAS
was seen to give the same bits, and `paged_attention` gives every query its place by its position, in products of one
shape, over tiles of `TILE_KEYS` keys taken in order. All else here is elementwise, or a sum over a length that is
always the same. The bits may differ between machines, builds of NumPy and settings of BLAS (its number of threads,
too); within one process they do not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
I64: TypeAlias = NDArray[np.int64]

#: Rows of the one product `linear` is made of.
TILE_ROWS = 8
#: Rows that `linear` gives to BLAS at once, at most.
MOST_ROWS = 512
#: Keys that `paged_attention` takes at once; never depends on the page size.
TILE_KEYS = 128


def rms_norm(x: F32, weight: F32, eps: float, residual: F32 | None = None) -> tuple[F32, F32]:
    """Add ``residual`` to ``x`` and scale each row by its root mean square; all ``[n, hidden]``, weight ``[hidden]``.

    Returns (the normalised rows times ``weight``, the sum), the sum being ``x`` itself without a residual.
    """
    total = x if residual is None else x + residual
    mean_square = np.square(total).sum(axis=-1, keepdims=True) / np.float32(total.shape[-1])
    normed: F32 = total * (np.float32(1) / np.sqrt(mean_square + np.float32(eps)))
    normed *= weight
    return normed, total


def rope_angles(positions: I64, head_dim: int, theta: float) -> tuple[F32, F32]:
    """Return cosine and sine, ``[n, head_dim / 2]``, of position times ``theta ** (-2i / head_dim)``.

    Frequencies and angles are rounded to float32, as the models were trained with.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float64(theta) ** exponents).astype(np.float32)
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x: F32, cosine: F32, sine: F32) -> F32:
    """Rotate ``x`` ``[n, heads, head_dim]``, component i with i + head_dim / 2 (NeoX order); returns a new array."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    rotated = np.empty(x.shape, np.float32)
    np.subtract(first * cosine, second * sine, out=rotated[..., :half])
    np.add(second * cosine, first * sine, out=rotated[..., half:])
    return rotated


def write_kv(k: F32, v: F32, pages: F32, layer: int, page: I64, slot: I64) -> None:
    """Store ``k`` and ``v`` ``[n, kv_heads, head_dim]`` of one layer at (``page[i]``, ``slot[i]``); no two alike."""
    pages[page, layer, 0, :, slot] = k
    pages[page, layer, 1, :, slot] = v


def silu_mul(gate_up: F32) -> F32:
    """``silu(gate) * up`` ``[n, m]`` of ``gate_up`` ``[n, 2 m]``, the gate in the first half."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    product = np.negative(gate)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        np.exp(product, out=product)
    product += np.float32(1)
    np.divide(gate, product, out=product)
    product *= up
    return product


def copy_page(pages: F32, source: int, target: int) -> None:
    """Make page ``target`` equal to page ``source``, all layers."""
    pages[target] = pages[source]


def zero_page(pages: F32, page: int) -> None:
    """Set every byte of ``page`` to zero."""
    pages[page] = 0


# --- linear ----------------------------------------------------------------------------------------------------------


def linear(x: F32, weight: F32) -> F32:
    """``x @ weight`` ``[n, outputs]`` for ``x`` ``[n, inputs]`` and ``weight`` ``[inputs, outputs]``.

    ``weight`` is C-contiguous or the transpose of such an array.
    """
    n, outputs = len(x), weight.shape[1]
    x = np.ascontiguousarray(x)
    y = np.empty((n, outputs), np.float32)
    tile = _tile_rows(*_layout(weight))
    whole = n - n % tile
    for start in range(0, whole, MOST_ROWS):
        _multiply(x[start : min(start + MOST_ROWS, whole)], weight, y[start : min(start + MOST_ROWS, whole)], tile)
    if whole < n:
        padded = np.zeros((tile, x.shape[1]), np.float32)
        padded[: n - whole] = x[whole:]
        y[whole:] = (padded @ weight)[: n - whole]
    return y


def _multiply(x: F32, weight: F32, y: F32, tile: int) -> None:
    """Write ``x @ weight`` into ``y``; the number of rows is a multiple of ``tile``."""
    n = len(x)
    if n == tile or (tile > 1 and _equals_tiles(n, *_layout(weight))):
        np.matmul(x, weight, out=y)
    else:
        np.matmul(x.reshape(n // tile, tile, -1), weight, out=y.reshape(n // tile, tile, -1))


def _layout(weight: F32) -> tuple[int, int, bool]:
    return (*weight.shape, not weight.flags.c_contiguous)


def _probe(inputs: int, outputs: int, transposed: bool) -> tuple[F32, F32]:
    """Random ``x`` ``[MOST_ROWS, inputs]`` and a weight of the given layout.

    The order of a sum depends on shapes and layout, never on values, and two orders give the same bits in all of a
    product of random matrices only by a miracle. So one comparison settles a shape.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    x = generator.standard_normal((MOST_ROWS, inputs), np.float32)
    # A prime length keeps rows and columns of the weight from repeating.
    weight = np.resize(generator.standard_normal(1_000_003, np.float32), inputs * outputs)
    return x, weight.reshape(outputs, inputs).T if transposed else weight.reshape(inputs, outputs)


@functools.cache
def _tile_rows(inputs: int, outputs: int, transposed: bool) -> int:
    """`TILE_ROWS` if BLAS treats the rows of such a tile alike, else 1: each row by itself, exact by construction."""
    x, weight = _probe(inputs, outputs, transposed)
    same = np.repeat(x[:1], TILE_ROWS, axis=0) @ weight
    return TILE_ROWS if np.array_equal(same, np.repeat(same[:1], TILE_ROWS, axis=0)) else 1


@functools.cache
def _equals_tiles(rows: int, inputs: int, outputs: int, transposed: bool) -> bool:
    """Whether one product of ``rows`` rows has the bits of the tiles it stands for."""
    x, weight = _probe(inputs, outputs, transposed)
    tiles = x[:rows].reshape(rows // TILE_ROWS, TILE_ROWS, inputs) @ weight
    return np.array_equal(x[:rows] @ weight, tiles.reshape(rows, outputs))


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of queries that are worked on together: all of one row, or one block each of several rows.

    Block b holds the queries of the positions ``first[b]`` to ``first[b] + queries - 1``, ``first[b]`` a multiple of
    ``queries``; places whose position the row does not ask for are filled up. Blocks are sorted so that those that see
    tile t of the keys are the first ``counts[t]``.
    """

    queries: I64  # [blocks, queries]: flat index of the query, n where there is none
    present: NDArray[np.bool_]  # [blocks, queries]
    page: I64  # [blocks or 1, pieces]: where the keys are; 1 when all blocks are of one row
    part: I64  # [blocks or 1, pieces]: which part of the page
    piece: int  # keys in a piece
    counts: list[int]
    hidden: list[NDArray[np.bool_]]  # per tile, for the blocks ending in it: [blocks, 1, queries, 1, TILE_KEYS]
    stale: list[NDArray[np.bool_] | None]  # per tile, likewise: keys nobody wrote, [blocks or 1, 1, TILE_KEYS, 1]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the queries and keys of a batch are: what `paged_attention` needs to know, the same for every layer."""

    tokens: int
    groups: list[_Blocks]


def attention_plan(block_tables: I64, starts: I64, lengths: I64, page_size: int, query_group: int) -> AttentionPlan:
    """Plan attention of a batch of rows.

    Row r has ``lengths[r]`` >= 1 queries at the positions from ``starts[r]`` on, after those of row r - 1; its key at
    position p is in slot ``p % page_size`` of page ``block_tables[r, p // page_size]`` (``[rows, pages]``, anything
    where a row has no more). ``query_group`` is the number of query heads that share a kv head.
    """
    # Positions are never split over blocks or tiles, whatever the chunk: block and tile sizes are powers of two.
    per_block = 8
    while per_block > 1 and per_block * query_group > 8:
        per_block //= 2
    first_block, last_block = starts // per_block, (starts + lengths - 1) // per_block
    blocks = last_block - first_block + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    groups = []
    short = np.flatnonzero(blocks == 1)
    for rows in ([short] if len(short) else []) + [np.array([row]) for row in np.flatnonzero(blocks > 1)]:
        first = np.concatenate([np.arange(first_block[row], last_block[row] + 1) for row in rows]) * per_block
        owner = np.repeat(rows, blocks[rows])
        groups.append(_plan_blocks(first, owner, rows, block_tables, starts, lengths, offsets, page_size, per_block))
    return AttentionPlan(int(offsets[-1]), groups)


def _plan_blocks(
    first: I64,
    owner: I64,
    rows: I64,
    block_tables: I64,
    starts: I64,
    lengths: I64,
    offsets: I64,
    page_size: int,
    per_block: int,
) -> _Blocks:
    order = np.argsort(-first, kind="stable")
    first, owner = first[order], owner[order]
    if len(rows) > 1:
        rows = owner  # one block a row: keys in the order of the blocks
    positions = first[:, None] + np.arange(per_block)
    since = positions - starts[owner][:, None]
    present = (since >= 0) & (since < lengths[owner][:, None])
    queries = np.where(present, since + offsets[owner][:, None], offsets[-1])

    tiles = first // TILE_KEYS + 1
    ends = starts[rows] + lengths[rows]
    piece = int(np.gcd(page_size, TILE_KEYS))
    keys = np.arange(0, int(tiles[0]) * TILE_KEYS, piece)
    page = block_tables[rows][:, np.minimum(keys // page_size, block_tables.shape[1] - 1)]
    # Pieces past the end hold nothing that is seen; page 0 is as good as any.
    page = np.where(keys < ends[:, None], page, 0)
    part = np.broadcast_to(keys % page_size // piece, page.shape)

    counts = [int(np.count_nonzero(tiles > tile)) for tile in range(int(tiles[0]))]
    hidden, stale = [], []
    for tile, (count, above) in enumerate(zip(counts, [*counts[1:], 0], strict=True)):
        keys = np.arange(tile * TILE_KEYS, (tile + 1) * TILE_KEYS)
        hidden.append((keys > positions[above:count, :, None])[:, None, :, None, :])
        unwritten = keys >= (ends[above:count, None] if len(rows) > 1 else ends[:, None])
        stale.append(unwritten[:, None, :, None] if unwritten.any() else None)
    return _Blocks(queries, present, page, part, piece, counts, hidden, stale)


def paged_attention(q: F32, pages: F32, layer: int, plan: AttentionPlan, scale: float) -> F32:
    """Causal attention of ``q`` ``[n, query_heads, head_dim]`` over the keys in ``pages``; same shape out.

    A query at position p sees the keys 0 to p of its row, itself included: they must have been written. Query head h
    reads kv head ``h // query_group``. What lies in slots past a row's last key, be it NaN, is never seen.
    """
    n, query_heads, head_dim = q.shape
    kv_heads = pages.shape[3]
    scaled = np.zeros((n + 1, query_heads, head_dim), np.float32)
    np.multiply(q, np.float32(scale), out=scaled[:n])
    out = np.empty((n, query_heads, head_dim), np.float32)
    for blocks in plan.groups:
        count, per_block = blocks.queries.shape
        # [block, kv_head, (query, head of the group), head_dim]
        queries = scaled[blocks.queries].reshape(count, per_block, kv_heads, -1, head_dim).swapaxes(1, 2)
        result = _attend(np.ascontiguousarray(queries), pages, layer, blocks)
        result = result.swapaxes(1, 2).reshape(count, per_block, query_heads, head_dim)
        out[blocks.queries[blocks.present]] = result[blocks.present]
    return out


def _attend(queries: F32, pages: F32, layer: int, blocks: _Blocks) -> F32:
    """Attention of ``queries`` ``[blocks, kv_heads, queries, group, head_dim]``, same shape out: an online softmax."""
    count, kv_heads, per_block, group, head_dim = queries.shape
    flat = queries.reshape(count, kv_heads, per_block * group, head_dim)
    split = pages.reshape(*pages.shape[:4], -1, blocks.piece, head_dim)  # a view: [..., part, piece, head_dim]
    heads = np.arange(kv_heads)[:, None]
    pieces = TILE_KEYS // blocks.piece
    above = [*blocks.counts[1:], 0]
    best = total = acc = flat[:0]
    for tile, seen in enumerate(blocks.counts):
        rows = min(seen, len(blocks.page))
        here = slice(tile * pieces, (tile + 1) * pieces)
        page, part = blocks.page[:rows, None, here], blocks.part[:rows, None, here]
        # [rows, kv_heads, TILE_KEYS, head_dim] each, copied out of the pages
        k = split[page, layer, 0, heads, part].reshape(rows, kv_heads, TILE_KEYS, head_dim)
        v = split[page, layer, 1, heads, part].reshape(rows, kv_heads, TILE_KEYS, head_dim)
        ending = slice(above[tile], seen)
        if (stale := blocks.stale[tile]) is not None:
            of_rows = ending if len(blocks.page) > 1 else slice(None)
            np.copyto(k[of_rows], 0, where=stale)
            np.copyto(v[of_rows], 0, where=stale)
        scores = flat[:seen] @ k.swapaxes(-1, -2)
        by_query = scores.reshape(seen, kv_heads, per_block, group, TILE_KEYS)
        np.copyto(by_query[ending], -np.inf, where=blocks.hidden[tile])
        # Key 0 is in the first tile and seen by all, so the maximum is finite from there on.
        highest = scores.max(axis=-1, keepdims=True)
        if tile:
            highest = np.maximum(highest, best[:seen])
        np.subtract(scores, highest, out=scores)
        np.exp(scores, out=scores)
        weights, values = scores.sum(axis=-1, keepdims=True), scores @ v
        if tile:
            shrink = np.exp(best[:seen] - highest)
            best[:seen] = highest
            total[:seen] = total[:seen] * shrink + weights
            acc[:seen] = acc[:seen] * shrink + values
        else:
            best, total, acc = highest, weights, values
    acc /= total
    return acc.reshape(queries.shape)
