"""Paged attention on a GPU: the work of each thread block of the attention_*.hip kernels, and their launches.

The host knows every length, so it assigns work to each block exactly. A row's queries are split into tiles; where these
alone would not fill the GPU evenly, a tile's keys are split into items as well (split-K). Unless an item covers its
whole tile, a second kernel, `attention_combine`, reduces its partial sums. Rows of a few tokens go to
`attention_decode`, which is bound by memory bandwidth, and the others to `attention_prefill`, which is compute-bound.

A `Plan` holds NumPy arrays, which are copied to the device once for all layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.attention.split import ITEM_KEYS, NOTHING, Cost, Tiles, cut
from kernels.device.gpu import MATRIX_16X8X16, MATRIX_16X16X16, NO_MATRIX, Gpu
from kernels.device.module import Launches

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "INT8": 1}
HEAD_DIMS = (64, 80, 96, 128, 256)
#: Blocks of `attention_prefill` at a time, where the runtime does not say: as measured on NVIDIA.
PREFILL_BLOCKS = 2
_MOST_POSITIONS = np.iinfo(np.int32).max // 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """The attention shape of one model, and of the pages it reads.

    ``dtype``, of queries and output, is F32, F16 or BF16; ``kv_dtype``, of pages, may also be INT8. Raises ValueError.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    layers: int
    dtype: str
    kv_dtype: str

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "page_size", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads}: must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: must be one of {', '.join(map(str, HEAD_DIMS))}")
        if self.dtype not in BYTES or self.dtype == "INT8":
            raise ValueError(f"dtype={self.dtype}: must be F32, F16 or BF16")
        if self.kv_dtype not in BYTES:
            raise ValueError(f"kv_dtype={self.kv_dtype}: must be one of {', '.join(BYTES)}")

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.query_heads // self.kv_heads

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, including the scales of INT8."""
        heads = self.layers * 2 * self.kv_heads
        values = heads * self.page_size * self.head_dim * BYTES[self.kv_dtype]
        return values + (heads * 4 if self.kv_dtype == "INT8" else 0)

    @property
    def prefill_tile(self) -> int:
        """Queries per block of `attention_prefill`: at most 128, taking at most 32 KB."""
        return min(128, 1 << int(math.log2(32768 // (self.head_dim * BYTES[self.dtype]))))


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a batch's blocks, the same for every layer.

    ``arrays`` are the integers that the kernels read, as int32: starts ``[rows]``; offsets ``[rows + 1]``; items of
    decode and of prefill ``[n, 5]``: row, first query, begin and end of the keys, first row of the partial result or
    -1; entries of combine ``[n, 5]``: row, first query, queries, first row of the partial results, their number.
    """

    arrays: tuple[NDArray[Any], ...]
    #: Length of each array as `write` writes it: more than its own length for an array that is padded.
    sizes: tuple[int, ...]
    #: Queries per tile of `attention_decode`.
    decode_rows: int
    decode_items: int
    prefill_items: int
    entries: int
    #: Maximum number of queries of an entry.
    entry_queries: int
    #: Queries with partial results, per kv head.
    partial_rows: int

    @property
    def words(self) -> int:
        """Total number of integers that `write` writes."""
        return sum(self.sizes)

    @property
    def parts(self) -> tuple[slice, ...]:
        """Where `write` puts each array."""
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return tuple(map(slice, ends, ends[1:]))

    def write(self, out: NDArray[np.int32]) -> None:
        """Write all arrays to ``out``, padded with rows without queries, items of row -1 and entries of no queries."""
        begin = 0
        for size, array, rest in zip(self.sizes, self.arrays, (0, self.arrays[1][-1], -1, -1, 0), strict=True):
            if size:
                end = begin + array.size
                out[begin:end].reshape(array.shape)[:] = array
                begin += size
                out[end:begin] = rest

    @property
    def packed(self) -> NDArray[np.int32]:
        """The output of `write`, in a new array."""
        out = np.empty(self.words, np.int32)
        self.write(out)
        return out


def plan(
    geometry: Geometry,
    gpu: Gpu,
    starts: NDArray[Any],
    lengths: NDArray[Any],
    item_keys: int | None = None,
    decode_all: bool = False,
) -> Plan:
    """Plan a batch: row r has ``lengths[r]`` >= 1 tokens, at positions from ``starts[r]`` >= 0.

    With ``decode_all``, all rows go to `attention_decode`, as `padded` requires; K and V are then read once per tile of
    a row.

    Keys are split to minimize the time of the whole batch or, with ``item_keys``, into items of at most that many keys
    whatever the rest of the batch. Raises ValueError.
    """
    if item_keys is not None and (item_keys < 1 or item_keys % ITEM_KEYS):
        raise ValueError(f"item_keys={item_keys}: must be a multiple of {ITEM_KEYS}, and at least that")
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    if starts.ndim != 1 or starts.shape != lengths.shape:
        raise ValueError(f"starts {starts.shape} and lengths {lengths.shape}: must be one number a row each")
    most = 1
    if starts.size:
        of_starts, of_lengths = starts.tolist(), lengths.tolist()  # for small inputs, plain Python is faster than NumPy
        most = max(of_lengths)
        if min(of_lengths) < 1 or min(of_starts) < 0:
            raise ValueError("starts must be at least 0 and lengths at least 1")
        if max(of_starts) + most > _MOST_POSITIONS and (end := int((starts + lengths).max())) > _MOST_POSITIONS:
            raise ValueError(f"position {end - 1}: must be below {_MOST_POSITIONS}")

    group, heads, processors = geometry.group, geometry.kv_heads, gpu.processors
    rows, cost = _decoding(geometry, gpu, group if starts.size else 1)
    if most == 1 and group <= rows:
        offsets, row, first, queries = _of_tokens(len(starts), group)
        decode = cut(Tiles(row, first, queries, starts + 1), heads, processors, cost, 0, item_keys)
        prefill, entries = NOTHING, decode.entries
    else:
        few = (lengths == 1) | (lengths * group <= max_decode_rows(geometry, gpu)) | decode_all
        rows, cost = _decoding(geometry, gpu, int(np.max(lengths[few] * group, initial=1)))
        decode = cut(_tiles(few.nonzero()[0], starts, lengths, group, rows), heads, processors, cost, 0, item_keys)
        tiles = _tiles((~few).nonzero()[0], starts, lengths, group, geometry.prefill_tile)
        prefill = cut(tiles, heads, processors, prefill_cost(gpu), decode.partial_rows, item_keys)
        offsets, entries = np.append(0, lengths.cumsum()), np.concatenate([decode.entries, prefill.entries])

    arrays = starts, offsets, decode.items, prefill.items, entries
    return Plan(
        arrays=arrays,
        sizes=tuple([array.size for array in arrays]),
        decode_rows=rows,
        decode_items=len(decode.items),
        prefill_items=len(prefill.items),
        entries=len(entries),
        entry_queries=max(decode.entry_queries, prefill.entry_queries),
        partial_rows=max(decode.partial_rows, prefill.partial_rows),
    )


def size_class(count: int) -> int:
    """Round ``count`` up to one of a few sizes: a power of two up to 8, beyond that by at most a quarter."""
    if count <= 8:
        return 1 << (count - 1).bit_length() if count else 0
    step = max(8, 1 << (count.bit_length() - 3))
    return -(-count // step) * step


def padded(plan: Plan, rows: int) -> Plan:
    """Return an equivalent plan padded to ``rows`` rows, so that arrays and launches come in few different sizes.

    Padding does nothing: rows without items, items of row -1, entries without queries. `attention_prefill` does not
    support such items. Raises ValueError for a plan with prefill items, or with more than ``rows`` rows.
    """
    if plan.prefill_items or len(plan.arrays[0]) > rows:
        what = f"a plan of {len(plan.arrays[0])} rows and {plan.prefill_items} prefill items"
        raise ValueError(f"{what}: not to be padded to {rows}")
    items, entries = size_class(plan.decode_items), size_class(plan.entries)
    return Plan(
        arrays=plan.arrays,
        sizes=(rows, rows + 1, 5 * items, 0, 5 * entries),
        decode_rows=plan.decode_rows,
        decode_items=items,
        prefill_items=0,
        entries=entries,
        entry_queries=size_class(plan.entry_queries),
        partial_rows=size_class(plan.partial_rows),
    )


def decode_matrix(geometry: Geometry, gpu: Gpu) -> int:
    """Return RF_MATRIX for `attention_decode`, which multiplies K and V as stored, INT8 converted to BF16."""
    fits = geometry.dtype != "F32" and geometry.kv_dtype in (geometry.dtype, "INT8")
    if gpu.matrix == MATRIX_16X16X16:
        # Lanes load powers of two; in waves of 32 lanes, the sums of a head of 256 leave no registers for loads.
        fits = fits and geometry.head_dim != 80 and (geometry.head_dim <= 128 or gpu.wave == 64)
    return gpu.matrix if fits and not gpu.decode_scalar else NO_MATRIX


def prefill_matrix(geometry: Geometry, gpu: Gpu) -> int:
    """Return RF_MATRIX for `attention_prefill`, which first converts K and V to the type of the queries."""
    return gpu.matrix if geometry.dtype != "F32" and not gpu.prefill_scalar else NO_MATRIX


def max_decode_rows(geometry: Geometry, gpu: Gpu) -> int:
    """Return the maximum number of queries that `attention_decode` processes together."""
    return 16 if decode_matrix(geometry, gpu) else 8


def decode_rows(geometry: Geometry, gpu: Gpu, queries: int) -> int:
    """Return the queries per tile, a power of two, for rows of up to ``queries`` queries."""
    least = {NO_MATRIX: 1, MATRIX_16X8X16: 8, MATRIX_16X16X16: 16}[decode_matrix(geometry, gpu)]
    return max(least, min(max_decode_rows(geometry, gpu), 1 << (queries - 1).bit_length()))


def decode_bound(geometry: Geometry, gpu: Gpu, rows: int) -> int:
    """Return RF_BLOCKS for tiles of ``rows`` queries: the blocks that must fit at a time on CUDA, if not tuned."""
    if gpu.decode_blocks:
        return gpu.decode_blocks
    if decode_matrix(geometry, gpu):
        return 4 if geometry.head_dim <= 128 else 3 if rows <= 8 else 2
    return 3 if rows <= 4 and geometry.kv_dtype != "F32" else 2


def decode_cost(geometry: Geometry, gpu: Gpu, rows: int) -> Cost:
    """Return the cost of `attention_decode` with tiles of ``rows`` queries; a tuned number of blocks comes first."""
    blocks = gpu.decode_blocks or dict(gpu.decode_fits).get(rows) or decode_bound(geometry, gpu, rows)
    return Cost(blocks, enough=min(2, blocks), block=64, split=64)


def prefill_cost(gpu: Gpu) -> Cost:
    """Return the cost of `attention_prefill`."""
    blocks = gpu.prefill_fits or PREFILL_BLOCKS
    return Cost(blocks, enough=min(2, blocks), block=64, split=192)


def _tiles(rows: NDArray[Any], starts: NDArray[Any], lengths: NDArray[Any], group: int, tile: int) -> Tiles:
    queries = lengths[rows] * group
    tiles = -(-queries // tile)
    row = np.repeat(rows, tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
    count = np.minimum(lengths[row] * group - first, tile)
    # The last query of the tile sees its own token, and no later one.
    return Tiles(row, first, count, starts[row] + (first + count - 1) // group + 1)


@functools.lru_cache(maxsize=512)
def _of_tokens(rows: int, group: int) -> tuple[NDArray[np.int64], ...]:
    """For rows of one token each, one tile per row: offsets, and row, first query and queries of each tile."""
    return np.arange(rows + 1), np.arange(rows), np.zeros(rows, np.int64), np.full(rows, group)


@functools.lru_cache(maxsize=64)
def _decoding(geometry: Geometry, gpu: Gpu, queries: int) -> tuple[int, Cost]:
    """`decode_rows` for rows of up to ``queries`` queries, and its `decode_cost`."""
    rows = decode_rows(geometry, gpu, queries)
    return rows, decode_cost(geometry, gpu, rows)


class Attention:
    """The kernels for one geometry on one GPU, compiled on first use."""

    def __init__(
        self, load: Callable[[str, Mapping[str, str | int]], Launches], geometry: Geometry, gpu: Gpu, scale: float
    ) -> None:
        """``load`` compiles a kernel (`kernels.device.module.load`); ``scale`` > 0 multiplies the scores."""
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale}: must be above 0 and finite")
        self.geometry = geometry
        self.gpu = gpu
        self._load = load
        self._scale = np.float32(scale * math.log2(math.e))
        self._page_bytes, self._layers = np.int64(geometry.page_bytes), np.int32(geometry.layers)
        self._heads = np.int32(geometry.kv_heads)
        self._compiled: dict[tuple[str, int], Launches] = {}

    def plan(self, starts: NDArray[Any], lengths: NDArray[Any], decode_all: bool = False) -> Plan:
        """`plan` for this geometry and GPU."""
        return plan(self.geometry, self.gpu, starts, lengths, decode_all=decode_all)

    def compile(self) -> None:
        """Compile everything that any batch can need, so that no step waits for the compiler."""
        for rows in self._tiles():
            self._kernel("attention_decode", rows)
        self._kernel("attention_prefill")
        self._kernel("attention_combine")

    def fitted(self, fits: Callable[[Launches, str, int, int], int], prefill: bool) -> Gpu:
        """Return the GPU with the blocks that fit: ``fits(compiled, kernel, threads, assumed)``.

        Without ``prefill``, only of `attention_decode`.
        """
        decode = tuple(
            (rows, fits(self._kernel("attention_decode", rows), "attention_decode", 4 * self.gpu.wave, bound))
            for rows, bound in ((rows, decode_bound(self.geometry, self.gpu, rows)) for rows in self._tiles())
        )
        of_prefill = 0
        if prefill:
            threads = self._prefill_threads()
            of_prefill = fits(self._kernel("attention_prefill"), "attention_prefill", threads, PREFILL_BLOCKS)
        return replace(self.gpu, decode_fits=decode, prefill_fits=of_prefill)

    def _tiles(self) -> list[int]:
        """The numbers of queries of a tile that any batch can need."""
        least, most = decode_rows(self.geometry, self.gpu, 1), max_decode_rows(self.geometry, self.gpu)
        first = decode_rows(self.geometry, self.gpu, self.geometry.group)
        return [rows for rows in (1, 2, 4, 8, 16) if max(least, first) <= rows <= most]

    def scratch(self, plan: Plan) -> tuple[int, int]:
        """Return the required sizes of ``partials`` and ``stats``, in float32 elements."""
        results = plan.partial_rows * self.geometry.kv_heads
        return results * self.geometry.head_dim, results * 2

    def run(
        self,
        plan: Plan,
        arrays: Sequence[Any],
        q: Any,
        q_stride: int,
        pages: Any,
        layer: int,
        tables: Any,
        table_stride: int,
        out: Any,
        partials: Any,
        stats: Any,
    ) -> None:
        """Launch attention of one layer.

        ``arrays``: the parts of ``plan.packed``, on the device. ``q``: ``[tokens, query_heads, head_dim]``, 16-byte
        aligned, with a stride of ``q_stride`` elements between tokens; ``out`` the same, contiguous. ``pages``: the
        arena. ``tables``: int32 ``[rows, table_stride]``, the block table: column ``p // page_size`` has the page of
        row r's key at position p; unused columns may hold anything. Keys up to each token's own must have been written.
        ``partials`` and ``stats``: float32, of the sizes that `scratch` returns; None if 0. Raises ValueError.
        """
        geometry = self.geometry
        if not 0 <= layer < geometry.layers:
            raise ValueError(f"layer={layer}: must be 0 to {geometry.layers - 1}")
        if q_stride < geometry.query_heads * geometry.head_dim or q_stride * BYTES[geometry.dtype] % 16:
            least = geometry.query_heads * geometry.head_dim
            raise ValueError(f"q_stride={q_stride}: must be at least {least} and a multiple of 16 bytes")
        starts, offsets, decode, prefill, entries = arrays
        heads = self._heads
        where = [q, np.int64(q_stride), pages, self._page_bytes, self._layers]
        where += [np.int32(layer), heads, tables, np.int32(table_stride), starts, offsets]
        results = [self._scale, out, partials, stats]
        for name, items, count in (
            ("attention_decode", decode, plan.decode_items),
            ("attention_prefill", prefill, plan.prefill_items),
        ):
            if count:
                rows = plan.decode_rows if name == "attention_decode" else 0
                threads = 4 * self.gpu.wave if rows else self._prefill_threads()
                self._kernel(name, rows).launch(name, count * geometry.kv_heads, threads, [*where, items, *results])
        if plan.entries:
            self._kernel("attention_combine").launch(
                "attention_combine",
                (plan.entries * geometry.kv_heads, plan.entry_queries),
                128,
                [partials, stats, entries, heads, offsets, out],
            )

    def _prefill_threads(self) -> int:
        """Threads per block, as in attention_prefill.hip: a wave has one or two fragments of rows."""
        wave, matrix = self.gpu.wave, prefill_matrix(self.geometry, self.gpu)
        rows = 16 if matrix else wave // 2
        if self.geometry.head_dim <= 128 and (matrix == MATRIX_16X8X16 or (matrix == MATRIX_16X16X16 and wave == 64)):
            rows *= 2
        return self.geometry.prefill_tile // rows * wave

    def defines(self, name: str, rows: int = 0) -> dict[str, str | int]:
        """The defines that kernel ``name`` is compiled with; ``rows`` is only for `attention_decode`."""
        geometry = self.geometry
        given: dict[str, str | int] = {
            "RF_TYPE": geometry.dtype,
            "RF_HEAD_DIM": geometry.head_dim,
            "RF_GROUP": geometry.group,
        }
        if name != "attention_combine":
            given |= {"RF_KV": geometry.kv_dtype, "RF_PAGE_SIZE": geometry.page_size}
            given["RF_MATRIX"] = (decode_matrix if rows else prefill_matrix)(geometry, self.gpu)
        if rows:
            given |= {"RF_ROWS": rows, "RF_BLOCKS": decode_bound(geometry, self.gpu, rows)}
        return given

    def _kernel(self, name: str, rows: int = 0) -> Launches:
        key = name, rows
        if key not in self._compiled:
            self._compiled[key] = self._load(name, self.defines(name, rows))
        return self._compiled[key]
