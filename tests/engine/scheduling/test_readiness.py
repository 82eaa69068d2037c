"""Readiness says that the daemon is away long before requests fail for it, and nothing of a short pause."""

from __future__ import annotations

from services.common.errors import KvCacheDown
from services.engine.scheduling.sequence import FinishReason
from tests.engine.fakes import Harness, make_request


def away(harness: Harness, attempts: int) -> None:
    """The session is lost, and so many attempts to open another fail."""
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * attempts


def test_it_is_not_ready_while_requests_still_have_patience() -> None:
    harness = Harness(patience_s=60, unready_after_s=5)
    harness.submit(make_request("a", max_tokens=20))
    harness.iterate(3)
    away(harness, attempts=20)
    began = harness.clock.now
    while not harness.serving:
        harness.iterate()
    assert harness.serving == [False]
    assert 5 < harness.clock.now - began < 7.1  # it looks every second, and the clock moves on after it
    assert "a" not in harness.ended
    harness.until_idle()
    assert harness.reason("a") is FinishReason.LENGTH
    assert harness.serving == [False, True]


def test_a_short_outage_is_not_told() -> None:
    harness = Harness(patience_s=60, unready_after_s=5)
    harness.submit(make_request("a", max_tokens=20))
    harness.iterate(3)
    away(harness, attempts=7)  # some four seconds
    harness.until_idle()
    assert harness.source.reopened == 1 and harness.serving == []


def test_an_idle_engine_is_not_ready_when_its_lease_cannot_be_renewed() -> None:
    harness = Harness(unready_after_s=5)
    harness.iterate()
    harness.source.silent = harness.clock.now
    began = harness.clock.now
    while not harness.serving:
        harness.clock.now += harness.loop.iterate()
    assert harness.serving == [False] and 5 < harness.clock.now - began < 7.1
    assert harness.source.lease, "it has the session still"
    harness.source.silent = None
    harness.iterate()
    assert harness.serving == [False, True]


def test_the_end_of_a_shorter_patience_is_told_too() -> None:
    harness = Harness(patience_s=2, unready_after_s=60)
    harness.submit(make_request("a", max_tokens=20))
    harness.iterate(3)
    away(harness, attempts=10)
    while "a" not in harness.ended:
        harness.iterate()
    assert isinstance(harness.ended["a"].error, KvCacheDown)
    assert harness.serving == [False]
    while len(harness.serving) < 2:
        harness.iterate()
    assert harness.serving == [False, True] and harness.source.reopened == 1


def test_an_engine_that_fails_says_so_once_and_for_good() -> None:
    failed: list[bool] = []
    harness = Harness()
    harness.loop._on_failed = lambda: failed.append(True)
    harness.loop._fail(RuntimeError("a bug"))
    assert (harness.serving, failed) == ([False], [True])
