"""Paged attention on a GPU: which blocks the kernels of attention_*.hip are launched with, and the launches.

The host knows every length, so it says exactly what each block does. A row's queries are cut into tiles, and where
these alone would not fill the GPU evenly, a tile's keys are cut into items too. An item leaves its sums to a second
kernel, `attention_combine`, unless it is all of its tile. Rows of a few tokens go to `attention_decode`, which reads
memory as fast as it can, the others to `attention_prefill`, which multiplies as fast as it can.

Nothing here knows whose arrays it hands on: a `Plan` is NumPy, to be copied to the device once for all layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.attention.split import ITEM_KEYS, NOTHING, Cost, Tiles, cut
from kernels.device.gpu import MATRIX_16X8X16, MATRIX_16X16X16, NO_MATRIX, Gpu
from kernels.device.module import Launches

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "INT8": 1}
HEAD_DIMS = (64, 80, 96, 128, 256)
_MOST_POSITIONS = np.iinfo(np.int32).max // 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """The attention of one model, and the pages it reads.

    ``dtype`` is that of queries and output, F32, F16 or BF16; ``kv_dtype`` that of pages, INT8 too. Raises ValueError.
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
        """Bytes of a page, the scales of INT8 included."""
        heads = self.layers * 2 * self.kv_heads
        values = heads * self.page_size * self.head_dim * BYTES[self.kv_dtype]
        return values + (heads * 4 if self.kv_dtype == "INT8" else 0)

    @property
    def prefill_tile(self) -> int:
        """Queries of a block of `attention_prefill`: such that they take 32 KB at most, and 128 at most."""
        return min(128, 1 << int(math.log2(32768 // (self.head_dim * BYTES[self.dtype]))))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the blocks of a batch do, for every layer.

    ``arrays``, whole numbers, are what the kernels read, as int32: starts ``[rows]``; offsets ``[rows + 1]``; items of
    decode and of prefill ``[n, 5]``: row, first query, begin and end of the keys, first row of the partial result or
    -1; entries of combine ``[n, 5]``: row, first query, queries, first row of the partial results, how many.
    """

    arrays: tuple[NDArray[Any], ...]
    #: Numbers that `write` writes of each: more than it has, for one that is to be made up.
    sizes: tuple[int, ...]
    #: Queries of a tile of `attention_decode`.
    decode_rows: int
    decode_items: int
    prefill_items: int
    entries: int
    #: The most queries of an entry.
    entry_queries: int
    #: Queries, of each kv head, that partial results are for.
    partial_rows: int

    @property
    def words(self) -> int:
        """Numbers that `write` writes in all."""
        return sum(self.sizes)

    @property
    def parts(self) -> tuple[slice, ...]:
        """Where `write` puts each array."""
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return tuple(map(slice, ends, ends[1:]))

    def write(self, out: NDArray[np.int32]) -> None:
        """Put all arrays into ``out``, made up with rows without queries, items of row -1, entries of no queries."""
        begin = 0
        for size, array, rest in zip(self.sizes, self.arrays, (0, self.arrays[1][-1], -1, -1, 0), strict=True):
            if size:
                end = begin + array.size
                out[begin:end].reshape(array.shape)[:] = array
                begin += size
                out[end:begin] = rest

    @property
    def packed(self) -> NDArray[np.int32]:
        """What `write` writes, in memory of its own."""
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
    """Plan a batch: row r has ``lengths[r]`` >= 1 tokens at the positions from ``starts[r]`` >= 0 on.

    With ``decode_all`` all rows go to `attention_decode`, as `padded` needs it; K and V are then read once for each
    tile of a row.

    Keys are cut such that the whole batch is over soonest, or, with ``item_keys``, into items of so many at most
    whatever else the batch has. Raises ValueError.
    """
    if item_keys is not None and (item_keys < 1 or item_keys % ITEM_KEYS):
        raise ValueError(f"item_keys={item_keys}: must be a multiple of {ITEM_KEYS}, and at least that")
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    if starts.ndim != 1 or starts.shape != lengths.shape:
        raise ValueError(f"starts {starts.shape} and lengths {lengths.shape}: must be one number a row each")
    most = 1
    if starts.size:
        of_starts, of_lengths = starts.tolist(), lengths.tolist()  # of which Python is done before NumPy has begun
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
        prefill = cut(tiles, heads, processors, prefill_cost(), decode.partial_rows, item_keys)
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
    """Round ``count`` up to one of few numbers, by a quarter at most, or to a power of two up to 8."""
    if count <= 8:
        return 1 << (count - 1).bit_length() if count else 0
    step = max(8, 1 << (count.bit_length() - 3))
    return -(-count // step) * step


def padded(plan: Plan, rows: int) -> Plan:
    """Return a plan that does the same in arrays, and by launches, of few different sizes: as if for ``rows`` rows.

    What is added does nothing: rows without items, items of row -1, entries without queries. `attention_prefill` knows
    no such items. Raises ValueError for a plan that has any, or has more rows.
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
    """Return RF_MATRIX of `attention_decode`, which multiplies K and V as they are stored, or INT8 made BF16."""
    fits = geometry.dtype != "F32" and geometry.kv_dtype in (geometry.dtype, "INT8")
    return MATRIX_16X8X16 if gpu.matrix == MATRIX_16X8X16 and fits else NO_MATRIX


def prefill_matrix(geometry: Geometry, gpu: Gpu) -> int:
    """Return RF_MATRIX of `attention_prefill`, which makes K and V the type of the queries first."""
    return gpu.matrix if geometry.dtype != "F32" else NO_MATRIX


def max_decode_rows(geometry: Geometry, gpu: Gpu) -> int:
    """Return the most queries that `attention_decode` takes together."""
    return 16 if decode_matrix(geometry, gpu) else 8


def decode_rows(geometry: Geometry, gpu: Gpu, queries: int) -> int:
    """Return the queries of a tile, a power of two, where rows have up to ``queries``."""
    least = 8 if decode_matrix(geometry, gpu) else 1
    return max(least, min(max_decode_rows(geometry, gpu), 1 << (queries - 1).bit_length()))


def decode_cost(geometry: Geometry, gpu: Gpu, rows: int) -> Cost:
    """Return the cost of `attention_decode` with tiles of ``rows`` queries: as many blocks as have registers."""
    if decode_matrix(geometry, gpu):
        blocks = 4 if geometry.head_dim <= 128 else 3 if rows <= 8 else 2
    else:
        blocks = 3 if rows <= 4 and geometry.kv_dtype != "F32" else 2
    return Cost(blocks, enough=2, block=64, split=64)


def prefill_cost() -> Cost:
    """Return the cost of `attention_prefill`."""
    return Cost(at_once=2, enough=2, block=64, split=192)


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
    """Of rows of a token each, all of whose queries are a tile: offsets, and row, first query and queries of a tile."""
    return np.arange(rows + 1), np.arange(rows), np.zeros(rows, np.int64), np.full(rows, group)


@functools.lru_cache(maxsize=64)
def _decoding(geometry: Geometry, gpu: Gpu, queries: int) -> tuple[int, Cost]:
    """`decode_rows` where rows have up to ``queries``, and `decode_cost`."""
    rows = decode_rows(geometry, gpu, queries)
    return rows, decode_cost(geometry, gpu, rows)


class Attention:
    """The kernels for one geometry on one GPU, compiled as they are first needed."""

    def __init__(
        self, load: Callable[[str, Mapping[str, str | int]], Launches], geometry: Geometry, gpu: Gpu, scale: float
    ) -> None:
        """``load`` compiles a kernel (`kernels.device.module.load`); ``scale``, above 0, is that of the scores."""
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
        """Compile all that any batch can need, so that no step waits for a compiler."""
        least, most = decode_rows(self.geometry, self.gpu, 1), max_decode_rows(self.geometry, self.gpu)
        first = decode_rows(self.geometry, self.gpu, self.geometry.group)
        for rows in (rows for rows in (1, 2, 4, 8, 16) if max(least, first) <= rows <= most):
            self._kernel("attention_decode", rows)
        self._kernel("attention_prefill")
        self._kernel("attention_combine")

    def scratch(self, plan: Plan) -> tuple[int, int]:
        """Return how many float32 ``partials`` and ``stats`` must have room for."""
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
        aligned, its tokens ``q_stride`` numbers apart; ``out`` the same without gaps. ``pages``: the arena. ``tables``:
        int32 ``[rows, table_stride]``, row r's page of its key at position p in column ``p // page_size``; columns
        without a key may hold anything. Keys up to each token's own must have been written. ``partials`` and ``stats``:
        float32, `scratch` of them, may be None for none. Raises ValueError.
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
        """As attention_prefill.hip has it: a wave has one or two fragments of rows."""
        wave, matrix = self.gpu.wave, prefill_matrix(self.geometry, self.gpu)
        rows = 16 if matrix else wave // 2
        if self.geometry.head_dim <= 128 and (matrix == MATRIX_16X8X16 or (matrix == MATRIX_16X16X16 and wave == 64)):
            rows *= 2
        return self.geometry.prefill_tile // rows * wave

    def defines(self, name: str, rows: int = 0) -> dict[str, str | int]:
        """What kernel ``name`` is compiled with; ``rows`` of `attention_decode` alone."""
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
            given |= {"RF_ROWS": rows, "RF_BLOCKS": decode_cost(geometry, self.gpu, rows).at_once}
        return given

    def _kernel(self, name: str, rows: int = 0) -> Launches:
        key = name, rows
        if key not in self._compiled:
            self._compiled[key] = self._load(name, self.defines(name, rows))
        return self._compiled[key]
