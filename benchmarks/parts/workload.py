"""A workload of requests that arrive together, run by an engine's loop: throughput, and a breakdown of the time."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.parts.stand import Pages, Stand
from benchmarks.step import GREEDY, NoText
from services.engine.model.runner import Runner
from services.engine.pages.source import PageCopy, PageSource
from services.engine.sampling.params import Drawer, SamplingParams
from services.engine.sampling.result import Result
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import Request, Stopping
from services.engine.scheduling.step import Chunk, Flight

#: The usual workload for comparing serving engines: this many requests at once, with uniformly distributed lengths of
#: prompts and outputs.
REQUESTS, SHORTEST, LONGEST, SEED = 256, 100, 1024, 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, the number of tokens it generates, and its arrival.

    ``after``: it arrives when all requests together have generated this many tokens.
    """

    prompt: tuple[int, ...]
    tokens: int
    salt: str = ""
    after: int = 0
    sampling: SamplingParams = GREEDY


def uniform(
    vocab_size: int, count: int = REQUESTS, shortest: int = SHORTEST, longest: int = LONGEST, seed: int = SEED
) -> list[Job]:
    """``count`` requests with random tokens and uniformly distributed lengths of ``shortest`` to ``longest``."""
    draw = random.Random(seed)
    return [
        Job(
            tuple(draw.randrange(vocab_size) for _ in range(draw.randint(shortest, longest))),
            draw.randint(shortest, longest),
        )
        for _ in range(count)
    ]


def pages_for(jobs: Sequence[Job], page_size: int) -> int:
    """The pages that hold all jobs at once, including those requested ahead."""
    return sum(-(-(len(job.prompt) + job.tokens) // page_size) + 1 for job in jobs)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a workload. Times are in seconds.

    ``compute_s`` covers launching steps and waiting for them; ``page_wait_s`` the waiting for exchanges. The rest of
    ``took_s`` is scheduling and bookkeeping. With asynchronous steps the device computes meanwhile.
    ``gaps_s``: the times between a request's tokens, sorted.
    """

    tokens: int
    took_s: float
    compute_s: float
    page_wait_s: float
    steps: int
    page_calls: int
    cached_tokens: int
    gaps_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.took_s

    @property
    def schedule_share(self) -> float:
        """The fraction of the time that is neither steps nor waiting for pages."""
        return 1 - (self.compute_s + self.page_wait_s) / self.took_s

    def gap_s(self, share: float) -> float:
        """The quantile of the gaps at ``share``."""
        return self.gaps_s[min(len(self.gaps_s) - 1, int(share * len(self.gaps_s)))] if self.gaps_s else 0.0


class TimedRunner:
    """A runner that sums the times of its steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def run(self, step: Sequence[Chunk]) -> list[Result]:
        """A step."""
        began = time.perf_counter()
        results = self._runner.run(step)
        self.seconds += time.perf_counter() - began
        return results

    def launch(self, step: Sequence[Chunk]) -> TimedFlight:
        """A step behind those in flight."""
        began = time.perf_counter()
        flight = self._runner.launch(step)
        self.seconds += time.perf_counter() - began
        return TimedFlight(self, flight)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Between steps."""
        self._runner.copy_pages(copies)


class TimedFlight:
    """A step in flight, of which the launch and the wait count."""

    def __init__(self, runner: TimedRunner, flight: Flight) -> None:
        self._runner, self._flight = runner, flight

    @property
    def leads(self) -> bool:
        """See `Flight`."""
        return self._flight.leads

    def wait(self) -> list[Result]:
        """See `Flight`."""
        began = time.perf_counter()
        results = self._flight.wait()
        self._runner.seconds += time.perf_counter() - began
        return results

    def discard(self) -> None:
        """See `Flight`."""
        self._flight.discard()


def run(
    stand: Stand,
    pages: Pages,
    jobs: Sequence[Job],
    limits: Limits,
    *,
    make_loop: Callable[..., EngineLoop] = EngineLoop,
    make_source: Callable[[PageSource], PageSource] = lambda source: source,
    draw: Drawer | None = None,
    name: str = "w",
    asynchronous: bool | None = None,
) -> Run:
    """Run all jobs to their ends. ``name`` must differ between runs on one source. Raises RuntimeError for a failure.

    ``make_loop``, ``make_source`` and ``draw`` replace parts of the engine by variants. ``asynchronous`` steps are the
    default on a device.
    """
    runner = TimedRunner(Runner(stand.model, pages.memory, draw or stand.draw, stand.backend.finish))
    ended: list[Event] = []
    gaps: list[float] = []
    latest: dict[str, float] = {}

    def outbox(events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.outcome is not None:
                ended.append(event)
            elif event.token_ids:
                if event.request_id in latest:
                    gaps.append(now - latest[event.request_id])
                latest[event.request_id] = now

    ahead = stand.on_device if asynchronous is None else asynchronous
    launch = runner.launch if ahead else None
    loop = make_loop(runner, make_source(pages.source), limits, outbox, launch=launch)
    coming = sorted(range(len(jobs)), key=lambda number: jobs[number].after)
    began = time.perf_counter()
    while True:
        while coming and jobs[coming[0]].after <= loop.totals.generated_tokens:
            number = coming.pop(0)
            job = jobs[number]
            stopping = Stopping(max_tokens=job.tokens)
            loop.submit(Request(f"{name}-{number}", job.prompt, stopping, job.sampling, NoText(), salt=job.salt))
        idle_s = loop.iterate()
        if len(ended) == len(jobs):  # never let the loop wait for more work
            break
        loop.wait(idle_s)
    took = time.perf_counter() - began
    totals = loop.totals
    wanted = sum(job.tokens for job in jobs)
    if totals.generated_tokens != wanted:
        failed = next((event for event in ended if event.outcome and event.outcome.error), None)
        raise RuntimeError(f"{totals.generated_tokens} tokens came of {wanted}: {failed}")
    return Run(
        tokens=wanted,
        took_s=took,
        compute_s=runner.seconds,
        page_wait_s=totals.page_wait_s,
        steps=totals.steps,
        page_calls=totals.page_calls,
        cached_tokens=loop.scheduler.cached_tokens,
        gaps_s=sorted(gaps),
    )


def median_of(runs: Sequence[Run]) -> Run:
    """The run with the median throughput."""
    middle = statistics.median_low(run.tokens_per_s for run in runs)
    return next(run for run in runs if run.tokens_per_s == middle)


def salted(jobs: Sequence[Job], salt: str) -> list[Job]:
    """The same jobs without shared pages."""
    return [dataclasses.replace(job, salt=f"{salt}-{number}") for number, job in enumerate(jobs)]
