"""Histograms and counts: what is exported to Prometheus is what was observed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.call_stats import CallStats
from services.common.histogram import Histogram
from services.engine.scheduling.prefill_speed import LEAST_TOKENS, STEPS, PrefillSpeed
from services.engine.scheduling.sequence import FinishReason, Sequence, Usage
from services.engine.scheduling.stats import EngineStats, Totals
from services.engine.scheduling.step import Chunk
from tests.engine.fakes import Harness, make_request


def test_a_bound_belongs_to_the_range_that_it_ends() -> None:
    seen = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1, 1e9):
        seen.observe(value)
    assert seen.cumulative() == [(1.0, 2), (2.0, 4), (math.inf, 6)]
    assert seen.count == 6 and seen.sum == pytest.approx(1e9 + 6.6)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4))))
def test_a_value_may_be_told_with_how_often_it_came(values: list[tuple[int, int]]) -> None:
    together, apart = Histogram((2.0, 5.0)), Histogram((2.0, 5.0))
    for value, times in values:
        together.observe(value, times)
        for _ in range(times):
            apart.observe(value)
    assert (together.cumulative(), together.sum) == (apart.cumulative(), apart.sum)


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 100), min_size=1, unique=True))
def test_each_range_counts_what_is_not_above_it(values: list[float], bounds: list[float]) -> None:
    seen = Histogram(sorted(bounds))
    for value in values:
        seen.observe(value)
    assert [count for _, count in seen.cumulative()] == [
        sum(value <= bound for value in values) for bound in (*sorted(bounds), math.inf)
    ]


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="bounds must be strictly increasing"):
        Histogram(bounds)


def test_calls_are_counted_by_method_and_code() -> None:
    calls = CallStats((1.0,))
    for method, code, seconds in (("A", "OK", 0.5), ("A", "OK", 2.0), ("A", "NOT_FOUND", 0.25), ("B", "OK", 4.0)):
        calls.done(method, code, seconds)
    assert calls.handled == {("A", "OK"): 2, ("A", "NOT_FOUND"): 1, ("B", "OK"): 1}
    assert {method: (seen.count, seen.sum) for method, seen in calls.seconds.items()} == {"A": (3, 2.75), "B": (1, 4.0)}


def test_a_request_that_ended_finished_or_was_cancelled_or_failed() -> None:
    totals = Totals()
    totals.ended[FinishReason.STOP] += 2
    totals.ended[FinishReason.LENGTH] += 1
    totals.ended[FinishReason.CANCELLED] += 4
    totals.errors.update({"INTERNAL": 8, "DEADLINE_EXCEEDED": 16})
    totals.refused["QUEUE_FULL"] += 32
    counts = totals.finished_requests, totals.cancelled_requests, totals.failed_requests
    assert counts == (3, 4, 24)


def test_what_a_request_never_came_to_is_not_observed() -> None:
    seen = EngineStats()
    seen.ended(Usage(3, 0, 0, 0, queue_s=None, first_token_s=None, total_s=2.0))
    seen.ended(Usage(3, 0, 5, 0, queue_s=0.5, first_token_s=1.0, total_s=2.0))
    assert (seen.queue.count, seen.request.count, seen.generated_tokens.sum) == (1, 2, 5)


def chunk(count: int) -> Chunk:
    return Chunk(Sequence(make_request(), 1), 0, count, False)


def test_the_prefill_speed_is_unknown_before_a_step_of_many_prompt_tokens() -> None:
    speed = PrefillSpeed()
    speed.step([chunk(1)] * 200, 0.1)  # decodes
    speed.step([chunk(LEAST_TOKENS - 1)], 0.1)
    assert speed.tokens_per_s() == 0.0


def test_the_prefill_speed_is_the_tokens_of_recent_steps_by_their_time() -> None:
    speed = PrefillSpeed()
    speed.step([chunk(1000)], 10.0)
    for _ in range(STEPS):
        speed.step([chunk(100), chunk(100), chunk(1)], 0.5)
    assert speed.tokens_per_s() == pytest.approx(400.0)


def test_a_step_by_a_clock_that_stands_still_says_nothing() -> None:
    speed = PrefillSpeed()
    speed.step([chunk(100)], 0.0)
    assert speed.tokens_per_s() == 0.0


@pytest.mark.parametrize("ahead", [None, "late"])
def test_the_engine_measures_how_fast_it_prefills(ahead: str | None) -> None:
    harness = Harness(ahead=ahead, pages=256, max_step_tokens=100, page_size=16)

    def computed(chunk: Chunk) -> None:
        if chunk.count > 1:
            harness.clock.now += 0.25

    harness.memory.fault = computed  # called for each chunk that is computed
    harness.submit(make_request("a", [1] * 400, max_tokens=8))
    harness.until_idle()
    assert harness.loop.prefill_speed == pytest.approx(400.0, rel=0.05)
