"""What a caller who was refused is told to wait: an estimate, within bounds."""

from __future__ import annotations

import pytest

from services.engine.turnover import LEAST_S, MARKS, MOST_S, UNKNOWN_S, Turnover
from tests.engine.fakes import Clock


def started() -> tuple[Turnover, Clock]:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.begin()
    return turnover, clock


def pass_by(turnover: Turnover, clock: Clock, ends: int, every_s: float) -> None:
    for _ in range(ends):
        clock.now += every_s
        turnover.ended()


def test_nothing_is_known_at_first() -> None:
    turnover, clock = started()
    assert turnover.wait_for(1) == UNKNOWN_S
    pass_by(turnover, clock, 1, 5)
    assert turnover.wait_for(1) == UNKNOWN_S


def test_it_is_the_rate_of_the_backlog() -> None:
    turnover, clock = started()
    pass_by(turnover, clock, 10, 0.5)
    assert turnover.wait_for(1) == pytest.approx(0.5)
    assert turnover.wait_for(7) == pytest.approx(3.5)
    pass_by(turnover, clock, 2 * MARKS, 2)
    assert turnover.wait_for(1) == pytest.approx(2)  # the beginning is long forgotten


def test_requests_that_end_together_count_from_where_the_backlog_began() -> None:
    turnover, clock = started()
    clock.now += 4
    pass_by(turnover, clock, 32, 0)
    assert turnover.wait_for(8) == pytest.approx(1)


def test_an_engine_that_stands_still_promises_ever_less() -> None:
    turnover, clock = started()
    pass_by(turnover, clock, 10, 0.5)
    clock.now += 45
    assert turnover.wait_for(1) == pytest.approx(5)
    clock.now += 10_000
    assert turnover.wait_for(1) == MOST_S


def test_bounds() -> None:
    turnover, clock = started()
    pass_by(turnover, clock, 10, 0.001)
    assert turnover.wait_for(1) == LEAST_S
    assert turnover.wait_for(10**9) == MOST_S


def test_a_new_backlog_begins_with_the_rate_of_the_one_before() -> None:
    turnover, clock = started()
    pass_by(turnover, clock, 10, 0.5)
    clock.now += 3600
    turnover.begin()
    clock.now += 3600
    assert turnover.wait_for(2) == pytest.approx(1)
    turnover.begin()  # of which nothing is known either
    pass_by(turnover, clock, 4, 2)
    assert turnover.wait_for(2) == pytest.approx(4)
