"""The daemon's mapped memory against the process's own: whether reading mapped memory is slower in itself.

No RPC is in flight while it runs. On a GPU it also measures page copies, and attention alone: over pages as they are,
each with the K and V of all layers, so that those of one layer are spread over the arena, and over pages of a single
layer, where they are contiguous. A difference seen only in the former comes from address translation, not from reading.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.parts import steps
from benchmarks.parts.rows import Row
from benchmarks.parts.stand import PAGE_SIZE, Stand

#: Bar: the most that the daemon's pages may cost, in every measurement.
BAR = 0.98
BATCHES = (1, 64, 256)
#: The byte that fills both arenas: a small number in every type. Times may depend on the values.
FILLED = 0x3C
WARM, RUNS = 2, 10


def measure(stand: Stand, name: str, batches: Sequence[int] = BATCHES, keys: int = steps.CONTEXT) -> Iterator[Row]:
    """Rows of a model on both memories."""
    total = steps.pages_of(max(batches), keys)
    with stand.daemon(total) as theirs, stand.local(total) as own:
        both = theirs, own
        if stand.on_device:
            mapped, private = (_copied_per_s(pages.memory()) for pages in both)
            detail = f"to in-process pages, {private / 1e12:.2f} TB/s; pages to pages, read and written"
            yield Row("arena", f"{name}, copy", mapped / 1e12, "TB/s", mapped / private, BAR, detail=detail)
            for by_layer, how in ((False, "as they are"), (True, "of a layer each")):
                mapped, private = (_attended_s(stand, pages.memory(), max(batches), keys, by_layer) for pages in both)
                detail = f"to in-process pages, {private * 1e3:.2f} ms; {max(batches)} rows of {keys} keys, all layers"
                what = f"{name}, attention, pages {how}"
                yield Row("arena", what, mapped * 1e3, "ms", private / mapped, BAR, detail=detail)
        for batch in batches:
            mapped, private = (steps.decode_seconds(stand, pages, batch, keys)[0] for pages in both)
            detail = f"to in-process pages, {private * 1e3:.2f} ms; {keys} keys a row"
            what = f"{name}, decode of {batch}"
            yield Row("arena", what, mapped * 1e3, "ms", private / mapped, BAR, detail=detail)


def _copied_per_s(memory: Any) -> float:
    """Bytes per second read and written by a copy of the first half of pages ``[pages, bytes]`` to the second."""
    import cupy

    memory.fill(FILLED)
    half = len(memory) // 2
    return 2 * half * memory.shape[1] / _seconds(lambda: cupy.copyto(memory[half : 2 * half], memory[:half]))


def _attended_s(stand: Stand, memory: Any, batch: int, keys: int, by_layer: bool) -> float:
    """Seconds of attention in all layers for ``batch`` rows whose pages are shuffled."""
    import cupy

    ops, config = stand.backend.ops, stand.model.config
    layers, total, each = config.layers, len(memory), -(-keys // PAGE_SIZE)
    tables = np.random.default_rng(0).permutation(total)[: batch * each].reshape(batch, each)
    starts, lengths = np.full(batch, keys - 1), np.ones(batch, np.int64)
    q = cupy.full((batch, config.query_heads, config.head_dim), FILLED << 8, cupy.uint16)
    if by_layer:
        arena = ops.fitted(memory.reshape(total * layers, -1), 1, config.kv_heads, config.head_dim)
    else:
        arena = ops.fitted(memory, layers, config.kv_heads, config.head_dim)
    # By layer, the first page of a layer follows the last page of the previous one.
    plans = [
        ops.attention_plan(tables + at * total, starts, lengths, arena, config.query_heads)
        for at in range(layers if by_layer else 1)
    ]

    def attend() -> None:
        for layer in range(layers):
            at = (0, plans[layer]) if by_layer else (layer, plans[0])
            ops.paged_attention(q, arena, *at, config.head_dim**-0.5)

    return _seconds(attend)


def _seconds(queue: Callable[[], None]) -> float:
    """Median GPU time of the work that ``queue`` queues on the current stream."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    took = []
    for _ in range(WARM + RUNS):
        start.record()
        queue()
        end.record()
        end.synchronize()
        took.append(float(cupy.cuda.get_elapsed_time(start, end)) / 1e3)
    return statistics.median(took[WARM:])
