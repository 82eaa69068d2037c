"""The daemon's cost per step: the same engine with the daemon's pages, and with pages of its own process.

One model and one workload; both page sources implement the same interface and alternate, so that a noisy machine
disturbs both alike. The ratio is the median over the pairs of runs; throughputs are the medians of each side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from threadpoolctl import threadpool_limits

from benchmarks.parts.stand import daemon
from services.engine.model.decoder import Model
from services.engine.model.runner import Runner
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.local import LocalPageSource
from services.engine.pages.private import private_pages
from services.engine.pages.source import PageSource
from services.engine.sampling.params import SamplingParams
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import Request, Stopping

ROOT = Path(__file__).resolve().parents[1]
PAGE_SIZE = 16
PROMPT_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class NoText:
    """A request without text."""

    stopped: str | None = None

    def push(self, token: int, may_stop: bool = True) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One batch size. Tokens per second of generated tokens; ``page_wait_us`` per step, over gRPC."""

    batch: int
    local_tokens_per_s: float
    grpc_tokens_per_s: float
    ratio: float
    rpcs_per_step: float
    page_wait_us: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One workload on one source."""

    tokens_per_s: float
    rpcs_per_step: float
    page_wait_us: float


def run(model: Model, source: PageSource, memory: Callable[[], Any], batch: int, tokens: int, seed: int) -> Run:
    """Generate ``tokens`` for each of ``batch`` requests. Prompts depend on the seed alone, so they share no pages."""
    draw = random.Random(seed)
    ended: list[Event] = []

    def outbox(events: list[Event]) -> None:
        ended.extend(event for event in events if event.outcome is not None)

    limits = Limits(max_batch=batch, max_step_tokens=max(512, batch), max_queue=batch)
    loop = EngineLoop(Runner(model, memory), source, limits, outbox)
    for at in range(batch):
        prompt = tuple(draw.randrange(1, model.config.vocab_size) for _ in range(PROMPT_TOKENS))
        loop.submit(Request(f"{seed}-{at}", prompt, Stopping(max_tokens=tokens), GREEDY, NoText()))
    began = time.perf_counter()
    while True:
        idle_s = loop.iterate()
        if len(ended) == batch:  # never let the loop wait for more work
            break
        loop.wait(idle_s)
    took = time.perf_counter() - began
    totals = loop.totals
    if totals.generated_tokens != batch * tokens:
        raise RuntimeError(f"{totals.generated_tokens} tokens came of {batch * tokens}: {ended}")
    return Run(
        totals.generated_tokens / took, totals.page_calls / totals.steps, totals.page_wait_s / totals.steps * 1e6
    )


def measure(model: Model, address: str, batch: int, tokens: int, pairs: int) -> Row:
    """Alternate local and gRPC runs; the first pair is a warm-up and is not counted."""
    geometry = model.geometry(PAGE_SIZE)
    remote = GrpcPageSource(address, "bench-step", geometry, client_name="bench-step")
    remote.reopen()
    local = LocalPageSource(remote.total_pages, PAGE_SIZE)
    pages = private_pages(geometry, remote.total_pages)
    sides: tuple[list[Run], list[Run]] = ([], [])
    try:
        for pair in range(pairs + 1):
            # The second run finds warmer caches: take turns.
            order = ((0, local, lambda: pages), (1, remote, lambda: remote.memory))
            for side, source, memory in order if pair % 2 else order[::-1]:
                sides[side].append(run(model, source, memory, batch, tokens if pair else 8, seed=1000 * batch + pair))
    finally:
        remote.close()
    mine, theirs = sides[0][1:], sides[1][1:]
    return Row(
        batch=batch,
        local_tokens_per_s=round(statistics.median(one.tokens_per_s for one in mine), 1),
        grpc_tokens_per_s=round(statistics.median(one.tokens_per_s for one in theirs), 1),
        ratio=round(statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in zip(mine, theirs, strict=True)), 4),
        rpcs_per_step=round(statistics.median(one.rpcs_per_step for one in theirs), 4),
        page_wait_us=round(statistics.median(one.page_wait_us for one in theirs), 1),
    )


def main() -> int:
    """Returns the exit status: 1 when the bar (ratio >= 0.95, at most one RPC a step) is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "shakespeare", help="checkpoint folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default 1 8 32)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens generated per request (default 160)")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs that count (default 9)")
    parser.add_argument("--cpu-threads", type=int, default=1, help="BLAS threads (default 1, as the engine's)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")
    flags = parser.parse_args()
    # Logging every request and session would only cost time.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    threadpool_limits(flags.cpu_threads, user_api="blas")
    model = Model.load(flags.model)
    missed = False
    if not flags.json:
        print("batch  local tok/s  gRPC tok/s   ratio  RPCs/step  page wait us/step")
    with daemon() as address:
        for batch in flags.batch:
            row = measure(model, address, batch, flags.tokens, flags.pairs)
            missed |= row.ratio < 0.95 or row.rpcs_per_step > 1
            if flags.json:
                print(json.dumps(dataclasses.asdict(row)), flush=True)
            else:
                print(
                    f"{row.batch:5}  {row.local_tokens_per_s:11.1f}  {row.grpc_tokens_per_s:10.1f}  {row.ratio:6.4f}"
                    f"  {row.rpcs_per_step:9.4f}  {row.page_wait_us:17.1f}",
                    flush=True,
                )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
