"""What observing costs a step: the same steps with the distributions fed, not fed, and fed while they are scraped.

One model, one workload on pages of this process, the three alternated so that a noisy machine disturbs all alike. A
figure is the median over the rounds of the ratio to the round's run without observations.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from threadpoolctl import threadpool_limits

from benchmarks.step import PAGE_SIZE, ROOT, run
from services.distribution import Distribution
from services.engine.arena import private_pages
from services.engine.localpages import LocalPageSource
from services.engine.model import Model
from services.engine.observations import Observations
from services.metrics import Endpoint, Families
from services.serving import Listener

SCRAPE_S = 1.0
PAGES = 4096


class Sample(Collector):
    """As many families as the engine has distributions."""

    def __init__(self) -> None:
        self.seen = Observations()

    def collect(self) -> list[Metric]:
        """All distributions."""
        families = Families("bench_")
        for name, value in vars(self.seen).items():
            families.histogram(name, name, value)
        return families.metrics


@contextlib.contextmanager
def unfed() -> Iterator[None]:
    """No distribution takes a value."""
    with mock.patch.object(Distribution, "observe", lambda self, value: None):
        yield


@contextlib.contextmanager
def scraped() -> Iterator[None]:
    """Somebody asks for metrics once a second, and at once."""
    endpoint, over = Endpoint(Listener(host="127.0.0.1"), Sample()), threading.Event()
    endpoint.start()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask() -> None:
        while True:
            opener.open(f"http://{endpoint.bound}/metrics").read()
            if over.wait(SCRAPE_S):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        endpoint.stop()


SIDES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "off": unfed,
    "on": contextlib.nullcontext,
    "scraped": scraped,
}


def observe_ns(count: int = 200_000) -> float:
    """Nanoseconds of one observation."""
    distribution = Observations().between_tokens
    began = time.perf_counter()
    for _ in range(count):
        distribution.observe(0.02)
    return (time.perf_counter() - began) / count * 1e9


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "shakespeare", help="checkpoint folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default 1 8 32)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens generated per request (default 100)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    flags = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    threadpool_limits(1, user_api="blas")
    model = Model.load(flags.model)
    pages = private_pages(model.geometry(PAGE_SIZE), PAGES)
    print(f"an observation takes {observe_ns():.0f} ns")
    print("batch  off us/step  on/off  scraped/off")
    for batch in flags.batch:
        took: dict[str, list[float]] = {name: [] for name in SIDES}
        for at in range(flags.rounds + 1):
            names = list(SIDES)
            for name in names[at % 3 :] + names[: at % 3]:
                with SIDES[name]():
                    one = run(model, LocalPageSource(PAGES, PAGE_SIZE), lambda: pages, batch, flags.tokens, seed=at)
                if at:  # the first warms up
                    took[name].append(batch / one.tokens_per_s * 1e6)
        ratios = [
            statistics.median(b / a for a, b in zip(took["off"], took[name], strict=True)) for name in ("on", "scraped")
        ]
        print(f"{batch:5}  {statistics.median(took['off']):11.1f}  {ratios[0]:6.4f}  {ratios[1]:11.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
