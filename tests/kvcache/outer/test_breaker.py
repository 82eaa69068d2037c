"""The breaker: closed while it works, one probe at a time while it does not."""

from __future__ import annotations

from services.kvcache.outer.breaker import FAILURES, FIRST_S, LONGEST_S, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for at in range(FAILURES):
        assert breaker.allows()
        assert breaker.failed() is (at == FAILURES - 1)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        for _ in range(FAILURES - 1):
            assert not breaker.failed()
        assert not breaker.succeeded()
    assert not breaker.is_open
    assert opened(Clock()).is_open


def test_while_it_is_open_one_probe_goes_through_when_the_wait_is_over() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.allows()
    clock.now += FIRST_S
    assert breaker.allows() and not breaker.allows()
    assert breaker.succeeded() and not breaker.is_open
    assert breaker.allows() and breaker.allows()


def test_the_wait_doubles_with_each_failed_probe_up_to_its_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    wait = FIRST_S
    for _ in range(12):
        clock.now += wait - 0.01
        assert not breaker.allows()
        clock.now += 0.02
        assert breaker.allows()
        assert not breaker.failed()
        wait = min(2 * wait, LONGEST_S)
    assert wait == LONGEST_S


def test_what_was_under_way_when_it_opened_does_not_lengthen_the_wait() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(20):
        breaker.failed()
    clock.now += FIRST_S
    assert breaker.allows()
