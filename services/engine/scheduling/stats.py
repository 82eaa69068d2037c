"""What the engine counts: its state at one moment, totals since the start, and histograms. Times in seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.common.histogram import Histogram
from services.engine.scheduling.sequence import FinishReason, Usage

TOKENS = tuple(float(2**power) for power in range(18))
#: Buckets for requests: from a prefix cache hit on a small model to minutes of queueing.
FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
REQUEST_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
#: Buckets for steps: scheduling and waiting for pages take microseconds; compute time depends on the model.
STEP_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment. A request with n samples counts n times, as it does against the queue's limit.

    Running requests hold pages, those that have ended and are giving them back included; every other live request is
    waiting, those that the engine's thread has yet to take up included.
    """

    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    held_pages: int
    total_pages: int
    preemptions: int
    looked_up_tokens: int
    cached_tokens: int
    stalled_s: float


@dataclass(slots=True)
class Totals:
    """Counts since the start, written by the engine's thread only; ``page_wait_s`` in seconds.

    ``errors`` counts failures of queued requests by reason, ``refused`` requests rejected before they were queued.
    """

    ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    errors: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    page_calls: int = 0
    page_wait_s: float = 0.0
    recoveries: int = 0

    @property
    def finished_requests(self) -> int:
        """Requests that finished: neither cancelled nor failed."""
        return sum(self.ended.values()) - self.cancelled_requests

    @property
    def cancelled_requests(self) -> int:
        """Requests that were cancelled."""
        return self.ended[FinishReason.CANCELLED]

    @property
    def failed_requests(self) -> int:
        """Requests that ended with an error."""
        return sum(dict(self.errors).values())


class EngineStats:
    """Written by the engine's thread only; any thread may read.

    ``schedule``, ``compute`` and ``page_wait`` split each step's time. ``exchange_wait`` covers every wait for an
    exchange, including rounds without a step.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.queue = Histogram(FIRST_TOKEN_S)
        self.fill_wait = Histogram(FIRST_TOKEN_S)
        self.request = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generated_tokens = Histogram(TOKENS)
        self.schedule = Histogram(STEP_S)
        self.compute = Histogram(STEP_S)
        self.page_wait = Histogram(STEP_S)
        self.exchange_wait = Histogram(STEP_S)
        self.step_requests = Histogram(TOKENS[:11])
        self.step_tokens = Histogram(TOKENS)

    def step(self, requests: int, tokens: int, schedule_s: float, compute_s: float, page_wait_s: float) -> None:
        """Record a step."""
        self.step_requests.observe(requests)
        self.step_tokens.observe(tokens)
        self.schedule.observe(schedule_s)
        self.compute.observe(compute_s)
        self.page_wait.observe(page_wait_s)

    def ended(self, usage: Usage) -> None:
        """Record a request that ended, with or without an error."""
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generated_tokens.observe(usage.completion_tokens)
        if usage.queue_s is not None:
            self.queue.observe(usage.queue_s)
        if usage.fill_wait_s:
            self.fill_wait.observe(usage.fill_wait_s)
        if usage.total_s is not None:
            self.request.observe(usage.total_s)
