"""One step of the decoder on a GPU, against the minimum time for its bytes.

A decode step reads every weight and all K and V of its rows once; its reference is the bandwidth of a copy in the same
run. Prefill has no reference: the report gives its operations per second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from benchmarks.parts.rows import Row as Found
from benchmarks.parts.stand import PAGE_SIZE, Pages, Stand
from benchmarks.step import GREEDY
from services.engine.model.batch import Row
from services.engine.sampling.params import sample

WARM, STEPS = 5, 30
BATCHES, CONTEXT = (1, 16, 64, 256), 1024
PROMPTS = ((1, 512), (1, 2048), (1, 8192), (8, 1024))
#: Bars: the share of the bandwidth that a step must reach, by its batch.
BARS = {1: 0.60, 64: 0.55}


def weight_bytes(stand: Stand) -> int:
    """Bytes of the weights that a decode step reads; of an embedding that is not also the head, only some rows."""
    config = stand.model.config
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    return 2 * (stand.model.parameters - embedding)


def kv_bytes(stand: Stand, tokens: int) -> int:
    """Bytes of the K and V of this many tokens."""
    geometry = stand.model.geometry(PAGE_SIZE, stand.backend.kv_dtype)
    return tokens * geometry.page_bytes // PAGE_SIZE


def pages_of(batch: int, context: int) -> int:
    """Pages for `decode_seconds`."""
    return batch * -(-(context + WARM + STEPS) // PAGE_SIZE)


def pages_needed() -> int:
    """Pages for the largest batch, and for the longest prompts."""
    return max(pages_of(max(BATCHES), CONTEXT), *(rows * -(-tokens // PAGE_SIZE) for rows, tokens in PROMPTS))


def decode_seconds(stand: Stand, pages: Pages, batch: int, context: int = CONTEXT) -> tuple[float, float]:
    """Median seconds of a step of ``batch`` rows with ``context`` keys, including its result, and of the host part."""
    each = -(-(context + WARM + STEPS) // PAGE_SIZE)
    tables = [range(row * each, (row + 1) * each) for row in range(batch)]
    took, launched = list[float](), list[float]()
    memory = pages.memory()
    for step in range(WARM + STEPS):
        at = context - 1 + step
        rows = [Row([(7 * row + step) % 1000], at, table, True) for row, table in enumerate(tables)]
        began = time.perf_counter()
        logits = stand.model.forward(rows, memory)
        launched.append(time.perf_counter() - began)
        sample(logits, [GREEDY] * batch, [at + 1] * batch, draw=stand.draw)
        stand.backend.finish()
        took.append(time.perf_counter() - began)
    del memory
    return statistics.median(took[WARM:]), statistics.median(launched[WARM:])


def prefill_seconds(stand: Stand, pages: Pages, rows: int, tokens: int, times: int = 5) -> float:
    """Median seconds of a step of ``rows`` whole prompts of ``tokens`` each."""
    each = -(-tokens // PAGE_SIZE)
    step = [
        Row([(7 * row + at) % 1000 for at in range(tokens)], 0, range(row * each, (row + 1) * each), True)
        for row in range(rows)
    ]
    took, memory = list[float](), pages.memory()
    for _ in range(times + 1):
        began = time.perf_counter()
        logits = stand.model.forward(step, memory)
        sample(logits, [GREEDY] * rows, [tokens] * rows, draw=stand.draw)
        stand.backend.finish()
        took.append(time.perf_counter() - began)
    del memory
    return statistics.median(took[1:])


def operations(stand: Stand, rows: int, tokens: int) -> float:
    """Multiplications and additions of such a step: every token's products, the head's per row, and attention."""
    config = stand.model.config
    table = config.vocab_size * config.hidden_size
    products = stand.model.parameters - table * (1 if config.tied_embeddings else 2)
    attention = 2 * config.layers * config.query_heads * config.head_dim * tokens * (tokens + 1)
    return rows * (2.0 * products * tokens + 2.0 * table + attention)


def measure(stand: Stand, pages: Pages, name: str, bandwidth: float) -> Iterator[Found]:
    """Rows of a shape; ``bandwidth`` in bytes per second."""
    for batch in BATCHES:
        took, host = decode_seconds(stand, pages, batch)
        least = (weight_bytes(stand) + kv_bytes(stand, batch * CONTEXT)) / bandwidth
        detail = f"{CONTEXT} keys a row, of {least * 1e3:.2f} ms at least; launched by {host * 1e3:.2f} ms"
        yield Found(
            "steps", f"{name}, decode of {batch}", took * 1e3, "ms", least / took, BARS.get(batch), False, detail
        )
    for rows, tokens in PROMPTS:
        took = prefill_seconds(stand, pages, rows, tokens)
        rate = operations(stand, rows, tokens) / took / 1e12
        detail = f"{rows * tokens / took:,.0f} tokens/s, {took * 1e3:.1f} ms"
        yield Found("steps", f"{name}, prefill of {rows} x {tokens}", rate, "TFLOP/s", detail=detail)
