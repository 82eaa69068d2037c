"""How long a refused caller is asked to wait: an estimate, within bounds."""

from __future__ import annotations

import pytest

from services.engine.scheduling.queue.retry_after import LEAST_S, MARKS, MOST_S, UNKNOWN_S, RetryAfter
from tests.engine.fakes import Clock


def started() -> tuple[RetryAfter, Clock]:
    clock = Clock()
    retry_after = RetryAfter(clock)
    retry_after.begin()
    return retry_after, clock


def pass_by(retry_after: RetryAfter, clock: Clock, ends: int, every_s: float) -> None:
    for _ in range(ends):
        clock.now += every_s
        retry_after.ended()


def test_nothing_is_known_at_first() -> None:
    retry_after, clock = started()
    assert retry_after.wait_for(1) == UNKNOWN_S
    pass_by(retry_after, clock, 1, 5)
    assert retry_after.wait_for(1) == UNKNOWN_S


def test_it_is_the_rate_of_the_backlog() -> None:
    retry_after, clock = started()
    pass_by(retry_after, clock, 10, 0.5)
    assert retry_after.wait_for(1) == pytest.approx(0.5)
    assert retry_after.wait_for(7) == pytest.approx(3.5)
    pass_by(retry_after, clock, 2 * MARKS, 2)
    assert retry_after.wait_for(1) == pytest.approx(2)  # the beginning is long forgotten


def test_requests_that_end_together_count_from_where_the_backlog_began() -> None:
    retry_after, clock = started()
    clock.now += 4
    pass_by(retry_after, clock, 32, 0)
    assert retry_after.wait_for(8) == pytest.approx(1)


def test_an_engine_that_stands_still_promises_ever_less() -> None:
    retry_after, clock = started()
    pass_by(retry_after, clock, 10, 0.5)
    clock.now += 45
    assert retry_after.wait_for(1) == pytest.approx(5)
    clock.now += 10_000
    assert retry_after.wait_for(1) == MOST_S


def test_bounds() -> None:
    retry_after, clock = started()
    pass_by(retry_after, clock, 10, 0.001)
    assert retry_after.wait_for(1) == LEAST_S
    assert retry_after.wait_for(10**9) == MOST_S


def test_a_new_backlog_begins_with_the_rate_of_the_one_before() -> None:
    retry_after, clock = started()
    pass_by(retry_after, clock, 10, 0.5)
    clock.now += 3600
    retry_after.begin()
    clock.now += 3600
    assert retry_after.wait_for(2) == pytest.approx(1)
    retry_after.begin()  # of which nothing is known either
    pass_by(retry_after, clock, 4, 2)
    assert retry_after.wait_for(2) == pytest.approx(4)
