"""A stalled engine reports it: once in the log, and in its metric for as long as it lasts."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from services.common.errors import KvCacheDown
from services.engine.pages.source import Demand, Opening
from services.engine.scheduling.sequence import FinishReason
from services.engine.scheduling.watchdog import STALL_S
from tests.engine.fakes import Harness, make_request

Logged = list[MutableMapping[str, Any]]


def stalls(logged: Logged) -> Logged:
    return [event for event in logged if event["event"] in ("engine_stalled", "engine_stall_over")]


def pass_by(harness: Harness, seconds: float) -> None:
    """Run the engine for this many seconds."""
    end = harness.clock.now + seconds
    while harness.clock.now < end:
        harness.iterate()


def occupy(harness: Harness, name: str = "neighbour") -> None:
    """Another engine takes all pages, for a sequence of that name."""
    pages = harness.local.total_pages
    [grant] = harness.local.exchange([Demand(name, 0, [], pages, 0, Opening([9]))], []).result()
    assert len(grant.pages) == pages


def vacate(harness: Harness, name: str = "neighbour") -> None:
    """The other engine gives its pages back."""
    harness.local.exchange([], [name])


def test_a_stall_is_logged_once_and_when_it_is_over(logged: Logged) -> None:
    harness = Harness(pages=8)
    for name, head in (("a", [1] * 12), ("b", [2] * 12)):
        del logged[:]
        occupy(harness, f"neighbour {name}")
        began = harness.clock.now
        harness.submit(make_request(name, head), make_request(f"{name} later", [3]))
        pass_by(harness, STALL_S - 1)
        assert not stalls(logged)
        pass_by(harness, STALL_S)
        [event] = stalls(logged)
        stalled_s = event.pop("stalled_s")
        assert STALL_S < stalled_s < STALL_S + 1.2
        assert harness.loop.watchdog.stalled_s == pytest.approx(harness.clock.now - began, abs=0.01)
        assert event == {
            **{"event": "engine_stalled", "log_level": "error", "request_id": name, "kvcache_silent_s": 0.0},
            **{"running": 0, "waiting": 2, "leaving": 0, "held_pages": 0, "total_pages": 8},
        }
        vacate(harness, f"neighbour {name}")
        harness.until_idle()
        _, over = stalls(logged)
        assert (
            over["event"] == "engine_stall_over"
            and over["stepped"]
            and 2 * STALL_S - 2 < over["stalled_s"] < 2 * STALL_S
        )
        assert harness.loop.watchdog.stalled_s == 0


def test_an_idle_engine_does_not_stall_and_a_request_that_comes_then_has_its_time(logged: Logged) -> None:
    harness = Harness(pages=8)
    pass_by(harness, 3600)
    assert harness.loop.watchdog.stalled_s == 0
    occupy(harness)
    harness.submit(make_request("a"))
    pass_by(harness, STALL_S - 1)
    assert STALL_S - 2 < harness.loop.watchdog.stalled_s < STALL_S
    vacate(harness)
    harness.until_idle()
    pass_by(harness, 3600)
    assert not stalls(logged)


def test_slow_steps_are_no_stall(logged: Logged) -> None:
    harness = Harness()
    run, seen = harness.memory.run, list[float]()

    def slow(step: Any) -> list[Any]:
        harness.clock.now += STALL_S - 1
        seen.append(harness.loop.watchdog.stalled_s)
        return run(step)

    harness.memory.run = slow  # type: ignore[method-assign]
    harness.submit(make_request("a", max_tokens=5))
    harness.until_idle()
    assert not stalls(logged)
    assert seen == [pytest.approx(STALL_S - 1, abs=0.1)] * 5, "it grows while a step is computed, the first one too"


def test_a_daemon_that_is_away_for_a_short_time_is_no_stall(logged: Logged) -> None:
    harness = Harness()
    harness.submit(make_request("a", max_tokens=20))
    harness.iterate(3)
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * 25
    began = harness.clock.now
    harness.until_idle()
    assert STALL_S - 10 < harness.clock.now - began < STALL_S
    assert harness.reason("a") is FinishReason.LENGTH and not stalls(logged)


def test_a_daemon_that_stays_away_is_a_stall_until_requests_fail(logged: Logged) -> None:
    harness = Harness(patience_s=60)
    harness.submit(make_request("a", max_tokens=20))
    harness.iterate(3)
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * 200
    pass_by(harness, 120)
    stalled, over = stalls(logged)
    assert (stalled["event"], stalled["request_id"]) == ("engine_stalled", "a")
    assert stalled["kvcache_silent_s"] == pytest.approx(stalled["stalled_s"], abs=0.1)
    assert (over["event"], over["stepped"]) == ("engine_stall_over", False) and 59 < over["stalled_s"] < 62
    assert isinstance(harness.ended["a"].error, KvCacheDown) and harness.loop.watchdog.stalled_s == 0


def test_an_engine_that_fails_has_nothing_left_to_wait_for(logged: Logged) -> None:
    harness = Harness(pages=8)
    occupy(harness)
    harness.submit(make_request("a"))
    pass_by(harness, STALL_S + 2)
    harness.loop._fail(ValueError("broken"))
    assert [event["event"] for event in stalls(logged)] == ["engine_stalled", "engine_stall_over"]
    assert harness.loop.watchdog.stalled_s == 0
