"""The functions of `ops_numpy` on a GPU, through CuPy: the HIP sources of `kernels/hip`, and cuBLAS or hipBLAS.

All work is queued on CuPy's current stream; calls return before it has run. Activations are CuPy arrays of float32,
float16, or uint16 holding the bits of bfloat16; accumulation is in float32. The last bits of a token's results may
depend on its batch, because the libraries choose their kernels by the shape of a product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels import ops_numpy
from kernels.attention import plan as attention
from kernels.attention import selftest
from kernels.attention.plan import Attention, Geometry, size_class
from kernels.device import module, occupancy, tuning
from kernels.device.gpu import this_gpu
from kernels.device.pinned import Pinned
from kernels.device.staging import Staging
from kernels.linear import gemm, gemv
from kernels.replay.base import Replays
from kernels.sampling.launch import Sampler

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

#: The types by the services' names, and by those of the kernels' macros.
KINDS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "int8": "INT8"}
#: The dtype of an array of activations, by type.
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
#: Threads per block where the number matters little; whole waves.
THREADS = 256
#: Threads per block of rope_write, at most one wave. A block lasts until its last load: small blocks leave fewer idle.
ROPE_THREADS = 64
#: A step is replayable if it has one token per row, or at most so many of each row and so many in all.
FEW_OF_ROW, FEW_IN_ALL = 16, 128
#: The fewest columns of a block table in a replayable step, which has few table sizes.
LEAST_COLUMNS = 16
#: Bytes that each thread of a copy kernel moves.
COPIED = 64


@dataclass(frozen=True, slots=True)
class Arena:
    """Pages of ``page_size`` tokens; ``memory`` is uint8 ``[pages, page_bytes]``."""

    memory: Any
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.memory.shape[1])


@dataclass(frozen=True, slots=True)
class Places:
    """Where the K and V of ``n`` tokens go: ``page`` and ``slot`` int32 ``[n]``.

    ``segments`` int32 ``[segment_count + 1]``, for int8 pages only: the index of each page's first token, then ``n``.
    """

    page: Any
    slot: Any
    segments: Any
    segment_count: int


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of every position, float32 ``[positions, head_dim / 2]``, and each token's position, int32."""

    cosine: Any
    sine: Any
    positions: Any


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch's attention, with its arrays on the device."""

    plan: attention.Plan
    packed: Any
    tables: Any
    made: list[Any]  # empty until a layer needs them: the parts of `packed`, partial results, their statistics

    @property
    def launches(self) -> tuple[int, ...]:
        """The launch parameters that the shapes of the arrays do not determine."""
        plan = self.plan
        counts = plan.decode_rows, plan.decode_items, plan.prefill_items, plan.entries, plan.entry_queries
        return (*counts, plan.partial_rows)


class CupyOps:
    """A backend for GPU ``device``: activations of ``dtype``, pages of ``page_size`` tokens in ``kv_dtype``.

    Types are ``f32``, ``f16`` and ``bf16``, and for pages also ``int8``. `weight`, `rope_table` and `fitted` make this
    device the calling thread's current one; a forward pass begins with `fitted`. With ``replays``, steps of a few
    tokens per row are replayed. ``tuned`` says which kernels were measured to be best.

    Raises ValueError for an unknown type, and for int8 pages with replays. Methods raise `module.KernelError` when a
    kernel does not compile, `gemm.GemmError` when a product fails, and CuPy's own errors when the GPU fails.
    """

    def __init__(
        self,
        device: int,
        dtype: str,
        kv_dtype: str,
        page_size: int,
        replays: Replays | None = None,
        tuned: tuning.Tuning = tuning.NOTHING,
    ) -> None:
        import cupy

        if dtype not in KINDS or dtype == "int8":
            raise ValueError(f"dtype is {dtype}; it must be f32, f16 or bf16")
        if kv_dtype not in KINDS:
            raise ValueError(f"kv_dtype is {kv_dtype}; it must be one of {', '.join(KINDS)}")
        if replays is not None and kv_dtype == "int8":
            raise ValueError("int8 pages do not support replayed steps")
        self._cupy = cupy
        self._device = cupy.cuda.Device(device)
        self._device.use()
        self._gpu = this_gpu(device)
        self._tuned = tuned
        self._occupancy = occupancy.of_device()
        self._kind, self._kv_kind, self._page_size = KINDS[dtype], KINDS[kv_dtype], page_size
        self._dtype = _DTYPES[self._kind]
        self._attentions: dict[tuple[int, int, int, int, float], Attention] = {}
        self._modules: dict[tuple[object, ...], module.Module] = {}
        self._geometries: dict[tuple[int, int, int, int], Geometry] = {}
        self._verdicts: dict[Geometry, selftest.Verdict] = {}
        #: Replays steps; None if no step is replayed.
        self.replays = replays
        # The current step: its arrays, whether they are being gathered, and whether it is replayable.
        self._staging: Staging | None = None
        self._staged = False
        self._again = False
        self._launches: list[tuple[int, ...]] = []

    def synchronize(self) -> None:
        """Wait until all queued work has run."""
        self._cupy.cuda.get_current_stream().synchronize()

    # --- from the host ------------------------------------------------------------------------------------------------

    def weight(self, tensor: NDArray[Any], dtype: str) -> Any:
        """Copy a float32, float16 or bfloat16 weight to the device as ``dtype``; converts it only if its type differs.

        Raises ValueError when ``dtype`` is not the backend's, or a number does not fit it.
        """
        if KINDS.get(dtype) != self._kind:
            raise ValueError(f"weights of {dtype} do not go with activations of {self._kind}")
        self._device.use()
        if self._kind == "BF16":
            return self._upload(np.ascontiguousarray(tensor, ml_dtypes.bfloat16).view(np.uint16))
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(tensor, self._dtype)
        if self._kind == "F16" and not np.isfinite(stored).all():
            raise ValueError(f"a weight of {float(np.abs(tensor).max()):g} does not fit f16, which ends at 65504")
        return self._upload(stored)

    @contextlib.contextmanager
    def step(self, lengths: I64) -> Iterator[None]:
        """Gather the arrays of a step for one copy. See `Ops.step`.

        Decode steps are replayable, and so are those of prompts of which only the last few tokens were not cached.
        """
        if self._staging is None:
            self._staging = Staging()
        self._staging.begin()
        most = max(lengths.tolist())
        few = most == 1 or (most <= FEW_OF_ROW and int(lengths.sum()) <= FEW_IN_ALL)
        self._again = few and self.replays is not None
        self._launches = []
        self._staged = True
        try:
            yield
        finally:
            self._staged = False
        self._staging.send()

    def computed(self, compute: Callable[[], Any], pages: Arena, model: Hashable) -> Any:
        """See `Ops.computed`: a replayable step is replayed if a step of the same shape was recorded."""
        staging = self._staging
        if self.replays is None or not self._again or staging is None or not staging.whole:
            return compute()
        key = (model, staging.base, *staging.shapes, *self._launches, pages.memory.data.ptr, pages.memory.shape)
        return self.replays.run(key, compute)

    @property
    def _made_to_size(self) -> bool:
        """Whether the arrays being gathered are a replayable step's, which are padded to a few sizes."""
        return self._staged and self._again

    def _size(self, count: int) -> int:
        """The number of tokens or rows to which ``count`` is padded."""
        return size_class(count)

    def _put(self, values: NDArray[Any], rest: int = 0) -> Any:
        """An int32 array of ``values``, in a replayable step padded with ``rest``."""
        if not self._staged or self._staging is None:
            return self._cupy.asarray(np.ascontiguousarray(values, np.int32))
        return self._staging.put(values, self._size(len(values)) if self._again else len(values), rest)

    def _make(self, shape: tuple[int, ...], write: Callable[[NDArray[np.int32]], None]) -> Any:
        """An int32 array that ``write`` fills."""
        if self._staged and self._staging is not None:
            return self._staging.make(shape, write)
        found = np.empty(shape, np.int32)
        write(found)
        return self._cupy.asarray(found)

    def indices(self, values: I64) -> Any:
        """Tokens or rows: int32 ``[n]``."""
        return self._put(values)

    def fill_drawn(self, tokens: Any, drawn: Any) -> Any:
        """See `ops_numpy.fill_drawn`; in place, in the order of the current stream, outside of what is replayed."""
        arguments = [tokens, drawn, np.int32(len(tokens))]
        self._plain("embedding").launch("fill_drawn", -(-len(tokens) // THREADS), THREADS, arguments)
        return tokens

    def places(self, page: I64, slot: I64) -> Places:
        """See `Places`. The slots of a page must be consecutive and rising, starting from its first unwritten one."""
        if self._kv_kind != "INT8":
            return Places(self._put(page, -1), self._put(slot), None, 0)
        begins = np.flatnonzero(np.diff(page, prepend=-1))
        segments = np.append(begins, len(page))
        return Places(self._put(page), self._put(slot), self._put(segments), len(begins))

    def fitted(self, pages: Any, layers: int, kv_heads: int, head_dim: int) -> Arena:
        """The arena in ``pages``, uint8 ``[pages, page_bytes]``. Raises ValueError for another type or page size."""
        self._device.use()
        expected = self._geometry(kv_heads, layers, kv_heads, head_dim).page_bytes
        if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != expected:
            raise ValueError(f"pages are {pages.dtype} {list(pages.shape)}; expected uint8 [pages, {expected}]")
        return Arena(pages, self._page_size, layers, kv_heads, head_dim)

    def extent(self, pages: Arena) -> tuple[int, int]:
        """The number of pages, and of tokens per page."""
        return int(pages.memory.shape[0]), pages.page_size

    def rope_table(self, frequencies: F32, count: int) -> tuple[Any, Any]:
        """See `ops_numpy.rope_table`."""
        self._device.use()
        cosine, sine = ops_numpy.rope_table(frequencies, count)
        return self._cupy.asarray(cosine), self._cupy.asarray(sine)

    def rotation(self, table: tuple[Any, Any], positions: I64) -> Angles:
        """See `ops_numpy.rotation`."""
        return Angles(*table, self.indices(positions))

    # --- kernels ------------------------------------------------------------------------------------------------------

    def take(self, x: Any, rows: Any) -> Any:
        """Gather ``rows`` of a contiguous ``x`` ``[n, ...]``."""
        out = self._empty((len(rows), *x.shape[1:]), x.dtype)
        row_bytes = x.nbytes // len(x)
        blocks = _blocks(row_bytes)
        arguments = [x, rows, out, np.int64(row_bytes), np.int32(blocks)]
        self._plain("embedding").launch("gather_rows", len(rows) * blocks, THREADS, arguments)
        return out

    def rms_norm(self, x: Any, weight: Any, eps: float, residual: Any | None = None) -> tuple[Any, Any]:
        """See `ops_numpy.rms_norm`."""
        rows, width = x.shape
        out = self._empty(x.shape, x.dtype)
        total = None if residual is None else self._empty(x.shape, x.dtype)
        arguments = [x, residual, weight, out, total, np.int32(width), np.float32(eps)]
        threads = _norm_threads(width * x.itemsize, self._gpu.wave)
        self._module("norm").launch("rms_norm", rows, threads, arguments)
        return out, x if total is None else total

    def rope_write_kv(
        self,
        qkv: Any,
        angles: Angles,
        pages: Arena,
        layer: int,
        places: Places,
        query_heads: int,
        bias: Any | None = None,
        norms: tuple[Any, Any] | None = None,
        eps: float = 0.0,
    ) -> Any:
        """See `ops_numpy.rope_write_kv`."""
        n, _, dim = qkv.shape
        q = self._empty((n, query_heads, dim), qkv.dtype)
        compiled = self._module("rope", RF_KV=self._kv_kind, RF_HEAD_DIM=dim)
        turned = [angles.cosine, angles.sine, angles.positions, places.page, places.slot]
        arena = [pages.memory, np.int64(pages.page_bytes), np.int32(layer)]
        heads = [np.int32(pages.page_size), np.int32(query_heads), np.int32(pages.kv_heads)]
        q_norm, k_norm = norms or (None, None)
        scaled = self._kv_kind == "INT8"
        rotated = query_heads if scaled else query_heads + 2 * pages.kv_heads
        grid = (n, -(-rotated * _rope_lanes(dim, qkv.itemsize) // ROPE_THREADS))
        arguments = [qkv, q, np.int64(query_heads * dim), bias, q_norm, k_norm, np.float32(eps)]
        compiled.launch("rope_write", grid, ROPE_THREADS, [*arguments, *turned, *arena, *heads])
        if scaled:
            arguments = [qkv, bias, k_norm, np.float32(eps), *turned, places.segments, *arena, np.int32(pages.layers)]
            compiled.launch("write_int8", (places.segment_count, 2 * pages.kv_heads), THREADS, [*arguments, *heads])
        return q

    def linear(self, x: Any, weight: Any, widen: bool = False) -> Any:
        """See `ops_numpy.linear`."""
        (rows, inputs), outputs = x.shape, weight.shape[0]
        out = self._empty((rows, outputs), np.dtype(np.float32) if widen else self._dtype)
        product = gemv.Product(rows, inputs, outputs, x.itemsize)
        if self._few(product):
            self._gemv("gemv_wide" if widen else "gemv", product, [x, weight, out])
        else:
            gemm.linear(x, weight, out)
        return out

    def norm_linear(self, x: Any, norm: Any, eps: float, weight: Any, residual: Any | None = None) -> tuple[Any, Any]:
        """See `ops_numpy.norm_linear`."""
        rows, inputs = x.shape
        product = gemv.Product(rows, inputs, weight.shape[0], x.itemsize, normed=True)
        if self._few(product):
            return self._normed("norm_gemv", product, x, norm, eps, weight, residual)
        normed, total = self.rms_norm(x, norm, eps, residual)
        return self.linear(normed, weight), total

    def norm_gated(self, x: Any, norm: Any, eps: float, weight: Any, residual: Any | None = None) -> tuple[Any, Any]:
        """See `ops_numpy.norm_gated`."""
        rows, inputs = x.shape
        product = gemv.Product(rows, inputs, weight.shape[0] // 2, x.itemsize, normed=True, gated=True)
        if self._few(product):
            return self._normed("norm_gated_gemv", product, x, norm, eps, weight, residual)
        normed, total = self.rms_norm(x, norm, eps, residual)
        return self.silu_mul(self.linear(normed, weight)), total

    def compile_products(self) -> None:
        """Compile every variant that products of a few rows can use."""
        self._device.use()
        for rows in gemv.COMPILED:
            self._module("gemv", RF_ROWS=rows)

    def _few(self, product: gemv.Product) -> bool:
        """Whether to compute a product with gemv.hip."""
        return gemv.fits(product) and self._blocks_of(product) != 0

    def _blocks_of(self, product: gemv.Product) -> int | None:
        """The tuned number of blocks of a multiprocessor, 0 for the library; None if it was not tuned."""
        weight_rows = product.outputs * (1 + product.gated)
        return self._tuned.products.get((product.rows, product.inputs, weight_rows, product.itemsize))

    def _normed(
        self, kernel: str, product: gemv.Product, x: Any, norm: Any, eps: float, weight: Any, residual: Any
    ) -> tuple[Any, Any]:
        """A norm and a product in one launch. Returns the product and the sum."""
        out = self._empty((product.rows, product.outputs), x.dtype)
        total = None if residual is None else self._empty(x.shape, x.dtype)
        self._gemv(kernel, product, [x, residual, norm, np.float32(eps), weight, out, total], product.rows_bytes)
        return out, x if total is None else total

    def _gemv(self, kernel: str, product: gemv.Product, arguments: list[Any], shared: int = 0) -> None:
        compiled = self._module("gemv", RF_ROWS=gemv.compiled_rows(product))
        blocks = self._blocks_of(product)
        if blocks is None:
            assumed = gemv.BLOCKS[product.rows > 1]
            blocks = self._occupancy.blocks(compiled, kernel, gemv.THREADS, shared, assumed)
        launch = gemv.launch(self._gpu, product, blocks)
        sizes = [np.int32(product.rows), np.int32(product.inputs), np.int32(product.outputs), np.int32(launch.split)]
        compiled.launch(kernel, launch.blocks, gemv.THREADS, [*arguments, *sizes], shared)

    def silu_mul(self, gate_up: Any) -> Any:
        """See `ops_numpy.silu_mul`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty((rows, width), gate_up.dtype)
        blocks = -(-width * gate_up.itemsize // (THREADS * 16))
        self._module("activation").launch("silu_mul", (rows, blocks), THREADS, [gate_up, out, np.int32(width)])
        return out

    def copy_page(self, pages: Arena, source: int, target: int) -> None:
        """See `ops_numpy.copy_page`."""
        self.copy_pages(pages, [(source, target)])

    def copy_pages(self, pages: Arena, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first page of each pair to the second; no target is in another pair."""
        self._on_pages("copy_pages", pages, np.array(pairs, np.int32))

    def zero_page(self, pages: Arena, page: int) -> None:
        """See `ops_numpy.zero_page`."""
        self._on_pages("zero_pages", pages, np.array([page], np.int32))

    def _on_pages(self, kernel: str, pages: Arena, numbers: NDArray[np.int32]) -> None:
        blocks = _blocks(pages.page_bytes)
        arguments = [pages.memory, self._cupy.asarray(numbers), np.int64(pages.page_bytes), np.int32(blocks)]
        self._plain("pages").launch(kernel, len(numbers) * blocks, THREADS, arguments)

    # --- attention ----------------------------------------------------------------------------------------------------

    def attention_plan(self, block_tables: I64, starts: I64, lengths: I64, pages: Arena, query_heads: int) -> Planned:
        """See `ops_numpy.attention_plan`."""
        geometry = self._geometry(query_heads, pages.layers, pages.kv_heads, pages.head_dim)
        plan = self._plan(geometry, starts, lengths)
        rows, columns = block_tables.shape
        most, width = rows, columns
        if self._made_to_size:
            most, width = self._size(rows), max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())
            plan = attention.padded(plan, most)

        def write(out: NDArray[np.int32]) -> None:
            # The rest may hold anything: it has no keys.
            out[:rows, :columns] = block_tables

        planned = Planned(plan, self._make((plan.words,), plan.write), self._make((most, width), write), [])
        self._launches.append(planned.launches)
        return planned

    def _plan(self, geometry: Geometry, starts: I64, lengths: I64) -> attention.Plan:
        gpu = self._verdict(geometry).gpu
        return attention.plan(geometry, gpu, starts, lengths, decode_all=self._made_to_size)

    def paged_attention(self, q: Any, pages: Arena, layer: int, plan: Planned, scale: float) -> Any:
        """See `ops_numpy.paged_attention`."""
        _, query_heads, dim = q.shape
        out = self._empty(q.shape, q.dtype)
        stride = plan.tables.shape[1]
        if not plan.made:
            # Allocated where they are used, so that a graph that is being captured owns them.
            results = plan.plan.partial_rows * pages.kv_heads
            floats = self._empty((results * (dim + 2),), np.dtype(np.float32)) if results else None
            scratch = (None, None) if floats is None else (floats[: results * dim], floats[results * dim :])
            plan.made[:] = [plan.packed[part] for part in plan.plan.parts], *scratch
        parts, partials, stats = plan.made
        self._attention(query_heads, pages.layers, pages.kv_heads, dim, scale).run(
            plan.plan, parts, q, query_heads * dim, pages.memory, layer, plan.tables, stride, out, partials, stats
        )
        return out

    def compile_attention(
        self, query_heads: int, layers: int, kv_heads: int, head_dim: int, scale: float
    ) -> selftest.Verdict:
        """Compile every variant that attention of such a model can use, and say whether it uses matrix units.

        From then on plans use the blocks that fit at a time, by the runtime's occupancy query.
        Raises ValueError if the model is not supported.
        """
        self._device.use()
        geometry = self._geometry(query_heads, layers, kv_heads, head_dim)
        verdict = self._verdict(geometry)
        attention_ = self._attention(query_heads, layers, kv_heads, head_dim, scale)
        attention_.compile()

        def fits(compiled: module.Launches, kernel: str, threads: int, assumed: int) -> int:
            return self._occupancy.blocks(cast(module.Module, compiled), kernel, threads, 0, assumed)

        gpu = attention_.fitted(fits, prefill=not self._occupancy.bounded)
        found = self._verdicts[geometry] = replace(verdict, gpu=gpu, occupancy_refused=self._occupancy.refused)
        return found

    # --- sampling -----------------------------------------------------------------------------------------------------

    def sampler(self, vocab_size: int) -> Sampler:
        """A sampler for the head's float32 logits, which stay on the device. Raises ValueError for the size."""
        self._device.use()
        return Sampler(_Memory(self._cupy), "F32", vocab_size)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _attention(self, query_heads: int, layers: int, kv_heads: int, head_dim: int, scale: float) -> Attention:
        key = (query_heads, layers, kv_heads, head_dim, scale)
        found = self._attentions.get(key)
        if found is None:
            geometry = self._geometry(query_heads, layers, kv_heads, head_dim)
            found = self._attentions[key] = Attention(module.load, geometry, self._verdict(geometry).gpu, scale)
        return found

    def _verdict(self, geometry: Geometry) -> selftest.Verdict:
        """Whether attention of ``geometry`` uses matrix units; the first time, this runs the self-test."""
        found = self._verdicts.get(geometry)
        if found is None:
            gpu = self._tuned.gpu(self._gpu, geometry.dtype, geometry.kv_dtype, geometry.head_dim, geometry.group)
            found = self._verdicts[geometry] = selftest.tested(selftest.CupyDevice(module.load), geometry, gpu)
        return found

    def _geometry(self, query_heads: int, layers: int, kv_heads: int, head_dim: int) -> Geometry:
        key = query_heads, layers, kv_heads, head_dim
        found = self._geometries.get(key)
        if found is None:
            found = self._geometries[key] = Geometry(
                query_heads, kv_heads, head_dim, self._page_size, layers, self._kind, self._kv_kind
            )
        return found

    def _upload(self, array: NDArray[Any]) -> Any:
        """Copy to the device directly: `asarray` would first copy to pinned memory, and keep that memory."""
        uploaded = self._empty(array.shape, array.dtype)
        uploaded.set(array)
        return uploaded

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._cupy.ndarray(shape, dtype)

    def _module(self, name: str, **defines: str | int) -> module.Module:
        key = (name, *defines.items())
        found = self._modules.get(key)
        if found is None:
            found = self._modules[key] = module.load(name, {"RF_TYPE": self._kind, **defines})
        return found

    def _plain(self, name: str) -> module.Module:
        """A module that handles bytes, whatever their type."""
        found = self._modules.get((name,))
        if found is None:
            found = self._modules[(name,)] = module.load(name)
        return found


class _Memory:
    """CuPy as a sampler expects it."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        pinned = Pinned()
        self.array, self.get, self.fetch = pinned.array, pinned.get, pinned.fetch

    def compile(self, name: str, defines: Mapping[str, str]) -> module.Module:
        return module.load(name, defines)

    def empty(self, shape: int, dtype: Any) -> Any:
        return self._cupy.ndarray((shape,), dtype)


def _blocks(size: int) -> int:
    """The number of blocks that share a copy of ``size`` bytes."""
    return max(1, -(-size // (THREADS * COPIED)))


def _norm_threads(row_bytes: int, wave: int) -> int:
    """One thread per 32 bytes of a row, in whole waves."""
    return min(1024, -(-row_bytes // (32 * wave)) * wave)


def _rope_lanes(head_dim: int, itemsize: int) -> int:
    """Lanes that share a head, as in rope.hip: one per pack of 16 bytes of half a head, 4 to 32."""
    packs = head_dim // 2 // (16 // itemsize)
    return max(4, 1 << (packs - 1).bit_length())
