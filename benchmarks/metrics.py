"""The cost of recording metrics per step, and the cost of a scrape.

The engine runs its own steps, asynchronously, with a model that computes nothing, which leaves the scheduler and the
loop; once with observations recorded in histograms, and once with observations dropped. Each figure is the median over
the rounds of the CPU time of the loop's thread, which other load on the machine hardly affects.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence as Items
from unittest import mock

import structlog
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.step import GREEDY, PAGE_SIZE, NoText
from services.common.call_stats import CallStats
from services.common.histogram import Histogram
from services.engine.api.served import Served
from services.engine.delivery.registry import GenerationRegistry, RegistryLimits
from services.engine.metrics import EngineMetrics
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import PageCopy
from services.engine.sampling.result import Result
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import Request, Stopping
from services.engine.scheduling.stats import EngineStats
from services.engine.scheduling.step import Chunk

PAGES = 1 << 14


class Landed:
    """A step that was over when it was launched."""

    leads = True

    def __init__(self, results: list[Result]) -> None:
        self._results = results

    def wait(self) -> list[Result]:
        """Returns immediately."""
        return self._results

    def discard(self) -> None:
        """Does nothing: no page was read or written."""


class NoModel:
    """Samples token 1 everywhere."""

    def run(self, step: Items[Chunk]) -> list[Result]:
        """Returns immediately."""
        return [1 if chunk.samples else None for chunk in step]

    def launch(self, step: Items[Chunk]) -> Landed:
        """Returns immediately."""
        return Landed(self.run(step))

    def copy_pages(self, copies: Items[PageCopy]) -> None:
        """Does nothing: the pages hold nothing."""


def drop(self: Histogram, value: float, times: int = 1) -> None:
    """Replaces ``observe``."""


def run(batch: int, tokens: int) -> tuple[float, EngineLoop]:
    """Microseconds of a step of this many requests, and the loop that ran them."""
    ended: list[Event] = []

    def outbox(events: list[Event]) -> None:
        ended.extend(event for event in events if event.outcome is not None)

    limits = Limits(max_batch=batch, max_step_tokens=max(512, batch + 1), max_queue=batch)
    model = NoModel()
    # Asynchronous steps, as with a GPU.
    loop = EngineLoop(model, LocalPageSource(PAGES, PAGE_SIZE), limits, outbox, launch=model.launch)
    for at in range(batch):
        loop.submit(Request(str(at), (at + 1,) * 8, Stopping(max_tokens=tokens), GREEDY, NoText()))
    began = time.thread_time()
    while len(ended) < batch:
        loop.iterate()
    return (time.thread_time() - began) / loop.totals.steps * 1e6, loop


def observe_ns(count: int = 200_000) -> float:
    """Nanoseconds of one observation."""
    distribution = EngineStats().between_tokens
    began = time.thread_time()
    for _ in range(count):
        distribution.observe(0.02)
    return (time.thread_time() - began) / count * 1e9


def scrape_ms(loop: EngineLoop, count: int = 50) -> float:
    """Milliseconds of one scrape of an engine, including its text; it runs on none of the engine's threads."""
    served = mock.create_autospec(Served, instance=True, model_id="none", backend="none", loop=loop)
    served.limits, served.epoch = Limits(1, 2, 1), lambda: 0
    metrics = EngineMetrics(GenerationRegistry(RegistryLimits()), CallStats(), CallStats(), lambda: False)
    metrics.serve(served)
    registry = CollectorRegistry()
    registry.register(metrics)
    began = time.thread_time()
    for _ in range(count):
        generate_latest(registry)
    return (time.thread_time() - began) / count * 1e3


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics", description=__doc__)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32, 256], help="batch sizes (default 1 8 32 256)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens generated per request (default 200)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    flags = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print("batch  off us/step  on us/step  added us")
    for batch in flags.batch:
        off, on = list[float](), list[float]()
        for at in range(flags.rounds + 1):
            for fed in (False, True) if at % 2 else (True, False):
                if fed:
                    took, loop = run(batch, flags.tokens)
                else:
                    with mock.patch.object(Histogram, "observe", drop):
                        took, _ = run(batch, flags.tokens)
                if at:  # the first warms up
                    (on if fed else off).append(took)
        added = statistics.median(b - a for a, b in zip(off, on, strict=True))
        print(f"{batch:5}  {statistics.median(off):11.1f}  {statistics.median(on):10.1f}  {added:8.1f}", flush=True)
    print(f"an observation takes {observe_ns():.0f} ns, a scrape {scrape_ms(loop):.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
