"""What a run's records come to: latencies, throughput, goodput, and what a killed daemon did to its streams."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serve.record import Lag, Record
from services.engine.cli.bench_report import percentile

#: A generator that wakes later than this, at its 99th percentile, is named slow: its answers were read late, too.
SLOW_S = 0.010


@dataclass(frozen=True, slots=True)
class Limits:
    """What makes a request good: it did not fail, its first token came within ``ttft_s`` of its planned arrival, and
    the mean of its inter-token latencies is at most ``itl_s``.
    """

    ttft_s: float
    itl_s: float

    def met(self, one: Record) -> bool:
        """Whether a request is good."""
        first, gaps = one.first_token_s, one.gaps
        if one.error or first is None or first > self.ttft_s:
            return False
        return not gaps or sum(gaps) / len(gaps) <= self.itl_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a latency, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, at) for at in (50, 90, 99))
        return cls(p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Generators:
    """How late the generators were. ``busy`` is the largest share of a core that one took."""

    sends_late_s: Spread | None
    wakes_late_s: Spread | None
    busy: float
    slow: bool

    @classmethod
    def of(cls, lags: Sequence[Lag]) -> Generators:
        """All of a run."""
        sends = Spread.of([late for lag in lags for late in lag.sends])
        wakes = Spread.of([late for lag in lags for late in lag.wakes])
        slow = any(late is not None and late.p99 > SLOW_S for late in (sends, wakes))
        return cls(sends, wakes, max(lag.busy for lag in lags), slow)


@dataclass(frozen=True, slots=True)
class Run:
    """A run. Rates are per second, of the time from the start to the last token or error; latencies are in seconds, of
    requests that did not fail, and count from the planned arrival. ``silence_s`` is each stream's longest pause.
    """

    rate: float | None
    requests: int
    seconds: float
    requests_per_s: float
    good_per_s: float
    good_share: float
    tokens_per_s: float
    prompt_tokens: int
    cached_share: float
    failed: dict[str, int]
    ttft_s: Spread | None
    itl_s: Spread | None
    end_to_end_s: Spread | None
    silence_s: Spread | None
    generators: Generators

    @classmethod
    def of(cls, rate: float | None, records: Sequence[Record], lags: Sequence[Lag], limits: Limits) -> Run:
        """From what all generators wrote down."""
        whole = [one for one in records if not one.error]
        seconds = max((one.end for one in records), default=0.0) or math.inf
        good = sum(limits.met(one) for one in records)
        prompt = sum(one.prompt_tokens for one in whole)
        return cls(
            rate=rate,
            requests=len(records),
            seconds=seconds,
            requests_per_s=len(whole) / seconds,
            good_per_s=good / seconds,
            good_share=good / len(records) if records else 0.0,
            tokens_per_s=sum(one.tokens for one in records) / seconds,
            prompt_tokens=prompt,
            cached_share=sum(one.cached_tokens for one in whole) / prompt if prompt else 0.0,
            failed=dict(sorted(Counter(one.error for one in records if one.error).items())),
            ttft_s=Spread.of([one.first_token_s for one in whole if one.first_token_s is not None]),
            itl_s=Spread.of([gap for one in whole for gap in one.gaps]),
            end_to_end_s=Spread.of([one.end - one.due for one in whole]),
            silence_s=Spread.of([one.silence_s for one in whole if len(one.arrivals) > 1]),
            generators=Generators.of(lags),
        )

    @property
    def saturated(self) -> bool:
        """Whether fewer than half of the requests were good."""
        return self.good_share < 0.5


def capacity(records: Sequence[Record]) -> float:
    """Requests per second of a burst, without its last tenth, whose batches are no longer full. Raises RuntimeError if
    a request failed.
    """
    if failed := Counter(one.error for one in records if one.error):
        raise RuntimeError(f"requests of a burst failed: {dict(failed)}")
    ends = sorted(one.end for one in records)
    most = max(1, len(ends) * 9 // 10)
    return most / ends[most - 1]


@dataclass(frozen=True, slots=True)
class Kill:
    """What clients saw of a daemon that was killed and started again. Times are in seconds.

    ``streams`` had a token before the kill and were not over; ``lost`` of them failed. ``gap_s`` is the longest pause
    of each that ended after the kill. ``waiting`` requests were sent before the daemon served again, and had no token
    at the kill; ``refused`` are those of them that failed.
    """

    killed_at: float
    serving_at: float
    streams: int
    lost: int
    gap_s: Spread | None
    waiting: int
    refused: dict[str, int]
    run: Run

    @classmethod
    def of(cls, killed_at: float, serving_at: float, records: Sequence[Record], run: Run) -> Kill:
        """Times on the records' clock."""
        alive = [one for one in records if one.arrivals and one.arrivals[0][0] <= killed_at < one.end]
        others = [
            one
            for one in records
            if one.sent <= serving_at and one.end > killed_at and not (one.arrivals and one.arrivals[0][0] <= killed_at)
        ]
        return cls(
            killed_at=killed_at,
            serving_at=serving_at,
            streams=len(alive),
            lost=sum(bool(one.error) for one in alive),
            gap_s=Spread.of([gap_after(one, killed_at) for one in alive]),
            waiting=len(others),
            refused=dict(sorted(Counter(one.error for one in others if one.error).items())),
            run=run,
        )


def gap_after(one: Record, moment: float) -> float:
    """A stream's longest pause that ended after a moment: between two messages, or the last one and its end."""
    times = [*(at for at, _ in one.arrivals), one.end]
    return max((b - a for a, b in itertools.pairwise(times) if b > moment), default=0.0)
