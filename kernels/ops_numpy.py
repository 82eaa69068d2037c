"""The reference semantics of every kernel, in NumPy. The GPU backend has the same functions and is tested against them.

Shapes: ``n`` counts the tokens of all rows of a batch, concatenated; ``pages`` is the arena, ``[page, layer, (k, v),
kv_head, slot, head_dim]``. Values are float32 and accumulated in float32; indices are int64.

**Exactness.** A token's results depend, bit for bit, only on its own inputs and on the keys it attends to: not on other
rows, on the boundaries of prompt chunks, on the page size, or on whether a prefix was cached. A plain matrix product
does not guarantee that: BLAS chooses its kernel, and with it the order of summation, by the number of rows, and some
kernels even by a row's index. So `linear` uses only row counts for which BLAS was observed to give the same bits
(`linear.cpu`), and `paged_attention` places each query by its position, in products of one shape, over tiles of
`TILE_KEYS` keys in order. Everything else here is elementwise, or a sum of constant length. The bits may differ between
machines, builds of NumPy and BLAS settings (including its number of threads), but not within one process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.linear.cpu import Packed, prepared
from kernels.linear.cpu import linear as linear

F32: TypeAlias = NDArray[np.float32]
I8: TypeAlias = NDArray[np.int8]
I64: TypeAlias = NDArray[np.int64]

#: Keys per tile in `paged_attention`, whatever the page size; a power of two.
TILE_KEYS = 128
#: Queries of one kv head in a product; more if more query heads share it.
TILE_QUERIES = 4
#: Positions that `rope_table` computes at a time.
_TABLE_ROWS = 1 << 14
#: Rows whose keys are copied out of the pages at a time: bounds the memory of the copies.
GATHERED_ROWS = 16


def weight(tensor: NDArray[Any], dtype: str) -> F32 | Packed:
    """Convert ``tensor``, float32, float16 or bfloat16, to a weight as the functions below take it.

    The caller gives up the tensor: the weight may reorder and keep its memory. Raises ValueError for a ``dtype`` other
    than ``f32``.
    """
    if dtype != "f32":
        raise ValueError(f"{dtype} weights are not supported on a CPU, only f32")
    tensor = np.ascontiguousarray(tensor, np.float32)
    return prepared(tensor) if tensor.ndim == 2 else tensor


def step(lengths: I64) -> AbstractContextManager[None]:
    """The context in which a step's arrays are made; does nothing, because they need not be copied."""
    return contextlib.nullcontext()


def computed(compute: Callable[[], Any], pages: F32, model: Hashable) -> Any:
    """Return the result of ``compute``."""
    return compute()


def indices(values: I64) -> I64:
    """Convert tokens, rows, pages or slots to the form that the functions below take."""
    return values


def fill_drawn(tokens: I64, drawn: NDArray[np.int32]) -> I64:
    """Replace each token ``-1 - row`` by ``drawn[row]``, what the sampler drew in the step before."""
    unknown = tokens < 0
    filled: I64 = tokens.copy()
    filled[unknown] = drawn[-1 - tokens[unknown]]
    return filled


def places(page: I64, slot: I64) -> tuple[I64, I64]:
    """The destinations of the K and V of a step's tokens, for `rope_write_kv`."""
    return page, slot


def fitted(pages: F32, layers: int, kv_heads: int, head_dim: int) -> F32:
    """The arena as the functions below take it. Raises ValueError if its pages have another dtype or shape."""
    pages = np.asarray(pages)  # a memory map would make every index below slower
    if pages.dtype != np.float32 or pages.ndim != 6 or not pages.flags.c_contiguous:
        raise ValueError(f"pages are not a contiguous float32 array of 6 dimensions but {pages.dtype}")
    if pages.shape[1:] != (layers, 2, kv_heads, pages.shape[4], head_dim):
        raise ValueError(f"pages of shape {list(pages.shape)} do not fit the model")
    return pages


def extent(pages: F32) -> tuple[int, int]:
    """The number of pages, and of tokens per page."""
    return pages.shape[0], pages.shape[4]


def take(x: F32 | Packed, rows: I64) -> F32:
    """Gather ``rows`` of ``x`` ``[n, ...]``: tokens of an embedding, or the tokens to compute logits for."""
    return x.take(rows) if isinstance(x, Packed) else x[rows]


def rms_norm(x: F32, weight: F32, eps: float, residual: F32 | None = None) -> tuple[F32, F32]:
    """Add ``residual`` to ``x`` and scale each row by its root mean square; all ``[n, hidden]``, weight ``[hidden]``.

    Returns the normalised rows times ``weight``, and the sum, which without a residual is ``x`` itself.
    """
    total = x if residual is None else x + residual
    mean_square = np.square(total).sum(axis=-1, keepdims=True) / np.float32(total.shape[-1])
    normed: F32 = total * (np.float32(1) / np.sqrt(mean_square + np.float32(eps)))
    normed *= weight
    return normed, total


def rope_frequencies(head_dim: int, theta: float) -> F32:
    """Return ``theta ** (-2i / head_dim)``, ``[head_dim / 2]``, each operation rounded to float32.

    Models are trained, and compared, with frequencies computed this way. A frequency whose last bit is closer to the
    exact value rotates by a different angle, which thousands of tokens later is visible in the logits.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is computed in float64: the last bits of NumPy's float32 power depend on the processor.
    powers = (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)
    frequencies: F32 = np.float32(1) / powers
    return frequencies


def rope_table(frequencies: F32, count: int) -> tuple[F32, F32]:
    """Return the cosines and sines of all positions below ``count``, ``[count, head_dim / 2]``."""
    table = np.empty((count, len(frequencies)), np.float32), np.empty((count, len(frequencies)), np.float32)
    for at in range(0, count, _TABLE_ROWS):  # bounds the memory of the float64 intermediates
        some = np.arange(at, min(at + _TABLE_ROWS, count))
        table[0][some], table[1][some] = _cosine_sine(some, frequencies)
    return table


def rotation(table: tuple[F32, F32], positions: I64) -> tuple[F32, F32]:
    """Return the cosines and sines of ``positions``, from a table of all positions."""
    return table[0][positions], table[1][positions]


def _cosine_sine(positions: I64, frequencies: F32) -> tuple[F32, F32]:
    """Cosines and sines of the angles rounded to float32, as models are trained with."""
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
    """Store ``k`` and ``v`` ``[n, kv_heads, head_dim]`` of a layer at (``page[i]``, ``slot[i]``), all distinct."""
    pages[page, layer, 0, :, slot] = k
    pages[page, layer, 1, :, slot] = v


def write_kv_int8(k: F32, v: F32, values: I8, scales: F32, layer: int, page: I64, slot: I64) -> None:
    """Store ``k`` and ``v`` like `write_kv`, as multiples -127 to 127 of a scale.

    ``values`` ``[page, layer, (k, v), kv_head, slot, head_dim]``; ``scales`` ``[page, layer, (k, v), kv_head]``, the
    largest magnitude written so far, divided by 127. A page's slots are written in order. Slot 0 starts a new scale;
    when a later slot raises it, the existing values are requantised.
    """
    for number in dict.fromkeys(page.tolist()):
        rows = np.flatnonzero(page == number)
        written = slot[rows[0]]
        new = np.stack([k[rows], v[rows]]).swapaxes(1, 2)  # [(k, v), kv_head, token, head_dim]
        before = scales[number, layer] if written else np.zeros(new.shape[:2], np.float32)
        now = np.maximum(np.abs(new).max(axis=(2, 3)) / np.float32(127), before)
        inverse = np.divide(np.float32(1), now, out=np.zeros_like(now), where=now > 0)[..., None, None]
        there = values[number, layer, :, :, :written]
        there[...] = np.rint(there * (before[..., None, None] * inverse))
        values[number, layer][:, :, slot[rows]] = np.clip(np.rint(new * inverse), -127, 127)
        scales[number, layer] = now


def rope_write_kv(
    qkv: F32,
    angles: tuple[F32, F32],
    pages: F32,
    layer: int,
    places: tuple[I64, I64],
    query_heads: int,
    bias: F32 | None = None,
    norms: tuple[F32, F32] | None = None,
    eps: float = 0.0,
) -> F32:
    """Rotate queries and keys of ``qkv`` ``[n, query_heads + 2 kv_heads, head_dim]``, and store keys and values.

    The heads are queries, then keys, then values; ``angles`` come from `rotation`, ``places`` from `places`. First
    ``bias`` ``[(query_heads + 2 kv_heads) head_dim]`` is added; then `rms_norm` is applied to each query head with
    ``norms[0]`` and to each key head with ``norms[1]``, ``[head_dim]``. Returns the queries, ``[n, query_heads,
    head_dim]``.
    """
    (cosine, sine), (page, slot) = angles, places
    kv_heads = pages.shape[3]
    if bias is not None:
        qkv = qkv + bias.reshape(qkv.shape[1:])
    turned = qkv[:, : query_heads + kv_heads]
    if norms is not None:
        factors = np.repeat(np.stack(norms), [query_heads, kv_heads], axis=0)
        turned, _ = rms_norm(turned, factors, eps)
    rotated = rope(turned, cosine, sine)
    write_kv(rotated[:, query_heads:], qkv[:, query_heads + kv_heads :], pages, layer, page, slot)
    return rotated[:, :query_heads]


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


def norm_linear(x: F32, norm: F32, eps: float, weight: F32 | Packed, residual: F32 | None = None) -> tuple[F32, F32]:
    """`rms_norm`, then `linear`. Returns the product ``[n, outputs]``, and the sum ``[n, inputs]``."""
    normed, total = rms_norm(x, norm, eps, residual)
    return linear(normed, weight), total


def norm_gated(x: F32, norm: F32, eps: float, weight: F32 | Packed, residual: F32 | None = None) -> tuple[F32, F32]:
    """`norm_linear`, then `silu_mul`: ``[n, outputs]`` for a ``weight`` ``[2 outputs, inputs]``, and the sum."""
    product, total = norm_linear(x, norm, eps, weight, residual)
    return silu_mul(product), total


def copy_page(pages: F32, source: int, target: int) -> None:
    """Copy page ``source`` to page ``target``, all layers."""
    pages[target] = pages[source]


def zero_page(pages: F32, page: int) -> None:
    """Set every byte of ``page`` to zero."""
    pages[page] = 0


def pack_pages(pages: F32, numbers: I64) -> F32:
    """Return pages ``numbers``, concatenated: ``[n, ...]``."""
    return pages[numbers]


def unpack_pages(pages: F32, numbers: I64, packed: F32) -> None:
    """Copy ``packed`` to pages ``numbers``, all distinct."""
    pages[numbers] = packed


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of queries that are computed together: all of one row, or one block each of several rows.

    Block b holds the queries at ``queries.shape[1]`` positions, the first a multiple of that number; places without a
    query are padding. Blocks are sorted so that the first ``counts[t]`` see tile t of the keys; of these, all but the
    first ``counts[t + 1]`` end in it.
    """

    queries: I64  # [blocks, places]: flat index of the query, n for padding
    present: NDArray[np.bool_]  # [blocks, places]
    counts: list[int]
    hidden: list[NDArray[np.bool_]]  # per tile, for the blocks that end in it: [blocks, 1, places, 1, TILE_KEYS]
    pieces: list[I64]  # per tile, the location of its keys: [blocks or 1, kv_heads, pieces]; 1 if all are of one row
    ends: list[int]  # [blocks or 1]: the number of keys


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The locations of a batch's queries and keys, for `paged_attention`; the same for every layer."""

    piece: int  # keys that are contiguous both in a page and in a tile
    groups: list[_Blocks]


def attention_plan(block_tables: I64, starts: I64, lengths: I64, pages: F32, query_heads: int) -> AttentionPlan:
    """Plan attention of a batch of rows over ``pages``, of which only the shape is read.

    Row r has ``lengths[r]`` >= 1 queries, at the positions from ``starts[r]`` on; rows are concatenated. Its key at
    position p is in slot ``p % page_size`` of page ``block_tables[r, p // page_size]`` (``[rows, pages]``; entries
    beyond a row's last page may hold anything).
    """
    group, page_size = query_heads // pages.shape[3], pages.shape[4]
    places = 1  # in a block: a power of two, so that a block lies in one tile
    while 2 * places * group <= TILE_QUERIES:
        places *= 2
    first_block, last_block = starts // places, (starts + lengths - 1) // places
    short = np.flatnonzero(first_block == last_block)
    long = np.flatnonzero(first_block != last_block)
    offsets = np.cumsum(lengths) - lengths
    n = int(lengths.sum())
    piece = math.gcd(page_size, TILE_KEYS)

    def plan(first: I64, owner: I64, rows: I64) -> _Blocks:
        """Plan blocks from position ``first`` on; their queries are of the rows ``owner``, their keys of ``rows``."""
        positions = first[:, None] + np.arange(places)
        since = positions - starts[owner, None]
        present = (since >= 0) & (since < lengths[owner, None])
        tiles = first // TILE_KEYS + 1
        counts = [int(np.count_nonzero(tiles > tile)) for tile in range(int(tiles[0]))]
        ends = starts[rows] + lengths[rows]
        hidden, pieces = [], []
        for tile, (seen, above) in enumerate(zip(counts, [*counts[1:], 0], strict=True)):
            keys = np.arange(tile * TILE_KEYS, (tile + 1) * TILE_KEYS)
            hidden.append((keys > positions[above:seen, :, None])[:, None, :, None, :])
            pieces.append(_pieces(block_tables[rows[:seen]], ends[:seen], keys[::piece], pages.shape, piece))
        return _Blocks(
            np.where(present, since + offsets[owner, None], n), present, counts, hidden, pieces, ends.tolist()
        )

    groups = []
    if len(short):
        short = short[np.argsort(-first_block[short], kind="stable")]
        groups.append(plan(first_block[short] * places, short, short))
    for row in long:
        first = np.arange(last_block[row], first_block[row] - 1, -1) * places
        groups.append(plan(first, np.full(len(first), row), np.array([row])))
    return AttentionPlan(piece, groups)


def _pieces(block_tables: I64, ends: I64, keys: I64, shape: tuple[int, ...], piece: int) -> I64:
    """The indices of the pieces that start at ``keys``, in the arena as ``[pieces, piece, head_dim]``; layer 0, K.

    Returns ``[rows, kv_heads, pieces]``. A piece past a row's end is some other page's, and is masked.
    """
    _, layers, _, kv_heads, page_size, _ = shape
    page = np.where(keys < ends[:, None], block_tables[:, np.minimum(keys // page_size, block_tables.shape[1] - 1)], 0)
    of_head = (page * (layers * 2))[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]
    return of_head * (page_size // piece) + keys % page_size // piece


def paged_attention(q: F32, pages: F32, layer: int, plan: AttentionPlan, scale: float) -> F32:
    """Causal attention of ``q`` ``[n, query_heads, head_dim]`` over the keys in ``pages``; same shape out.

    A query at position p attends to keys 0 to p of its row, which must have been written. Query head h reads kv head
    ``h // (query_heads // kv_heads)``. Slots past a row's last key have no effect, even if they hold NaN. ``pages`` is
    C-contiguous.
    """
    n, query_heads, head_dim = q.shape
    kv_heads = pages.shape[3]
    scaled = np.zeros((n + 1, query_heads, head_dim), np.float32)
    np.multiply(q, np.float32(scale), out=scaled[:n])
    out = np.empty((n, query_heads, head_dim), np.float32)
    for blocks in plan.groups:
        count, places = blocks.queries.shape
        # [block, kv_head, place and head of the group, head_dim]
        queries = scaled[blocks.queries].reshape(count, places, kv_heads, -1, head_dim).swapaxes(1, 2)
        result = _attend(queries.reshape(count, kv_heads, -1, head_dim), pages, layer, plan.piece, blocks)
        result = result.reshape(count, kv_heads, places, -1, head_dim).swapaxes(1, 2)
        out[blocks.queries[blocks.present]] = result.reshape(count, places, query_heads, head_dim)[blocks.present]
    return out


def _attend(queries: F32, pages: F32, layer: int, piece: int, blocks: _Blocks) -> F32:
    """Attention of ``queries`` ``[blocks, kv_heads, m, head_dim]``, same shape out: an online softmax over tiles."""
    _, kv_heads, m, head_dim = queries.shape
    places = blocks.queries.shape[1]
    arena = pages.reshape(-1, piece, head_dim)
    to_values = kv_heads * (pages.shape[4] // piece)  # pieces from a K to its V
    above = [*blocks.counts[1:], 0]
    best = total = acc = queries[:0]
    for tile, seen in enumerate(blocks.counts):
        pieces = blocks.pieces[tile] + layer * 2 * to_values
        together = min(seen, GATHERED_ROWS) if len(pieces) > 1 else seen
        scores = np.empty((seen, kv_heads, m, TILE_KEYS), np.float32)
        values = np.empty((seen, kv_heads, m, head_dim), np.float32)
        # Slots past a row's end may hold anything, even infinity; their scores are masked below.
        with np.errstate(invalid="ignore", over="ignore"):
            for at in range(0, seen, together):
                k = arena[pieces[at : at + together]].reshape(-1, kv_heads, TILE_KEYS, head_dim)
                np.matmul(queries[at : min(at + together, seen)], k.swapaxes(-1, -2), out=scores[at : at + together])
        ending = scores[above[tile] :].reshape(-1, kv_heads, places, m // places, TILE_KEYS)
        np.copyto(ending, -np.inf, where=blocks.hidden[tile])
        # Every query attends to key 0, in the first tile, so the maximum is finite from there on.
        highest = scores.max(axis=-1, keepdims=True)
        if tile:
            highest = np.maximum(highest, best[:seen])
        np.subtract(scores, highest, out=scores)
        np.exp(scores, out=scores)
        weights = scores.sum(axis=-1, keepdims=True)
        for at in range(0, seen, together):
            v = arena[pieces[at : at + together] + to_values].reshape(-1, kv_heads, TILE_KEYS, head_dim)
            # The weights of keys past a row's end are 0, but 0 times NaN is not.
            for row, end in enumerate(blocks.ends[at : at + len(v)]):
                if end < (tile + 1) * TILE_KEYS:
                    v[row, :, max(0, end - tile * TILE_KEYS) :] = 0
            np.matmul(scores[at : at + together], v, out=values[at : at + together])
        if tile:
            shrink = np.exp(best[:seen] - highest)
            best[:seen] = highest
            total[:seen] = total[:seen] * shrink + weights
            acc[:seen] = acc[:seen] * shrink + values
        else:
            best, total, acc = highest, weights, values
    acc /= total
    return acc
