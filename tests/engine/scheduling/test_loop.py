# mypy: disable-error-code="arg-type, return-value"
"""The engine's thread: every way a request ends, and every way the page source can be gone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import pytest

from services.common.errors import (
    DeadlineExceeded,
    Draining,
    ExceedsPool,
    ForwardFailed,
    Internal,
    KvCacheDown,
    LayoutMismatch,
    QueueFull,
    RequestExists,
    ServiceError,
    SessionExpired,
)
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import Demand, Exchange, PageCopy
from services.engine.sampling.result import Result
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import IDLE_CHECK_S, EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import FinishReason
from services.engine.scheduling.step import Chunk
from tests.engine.fakes import EOS, Harness, TokenMemory, alone, make_request


def error_of(harness: Harness, name: str) -> ServiceError:
    error = harness.ended[name].error
    assert error is not None
    return error


# --- the ways a request ends: each leaves nothing behind --------------------------------------------------------------


def finished_by_length(harness: Harness) -> None:
    harness.submit(make_request("a", max_tokens=5))
    harness.until_idle()
    assert harness.reason("a") is FinishReason.LENGTH
    assert harness.tokens["a"] == alone(make_request(max_tokens=5))


def finished_by_eos(harness: Harness) -> None:
    seed = next(s for s in range(100) if EOS in alone(make_request(seed=s, max_tokens=30))[1:])
    request = make_request("a", seed=seed, max_tokens=30, eos=True)
    harness.submit(request)
    harness.until_idle()
    assert harness.reason("a") is FinishReason.EOS
    assert harness.ended["a"].stop_token_id == EOS == harness.tokens["a"][-1]


def finished_by_stop_token(harness: Harness) -> None:
    expected = alone(make_request(max_tokens=8))
    harness.submit(make_request("a", max_tokens=8, stop_token_ids=(expected[2],)))
    harness.until_idle()
    assert harness.reason("a") is FinishReason.STOP and harness.ended["a"].stop_token_id == expected[2]


def finished_by_stop_string(harness: Harness) -> None:
    letters = "".join(chr(ord("a") + token) for token in alone(make_request(max_tokens=8)))
    harness.submit(make_request("a", max_tokens=8, stop=(letters[2:4],)))
    harness.until_idle()
    assert harness.reason("a") is FinishReason.STOP and harness.ended["a"].stop_text == letters[2:4]


def cancelled_before_it_was_seen(harness: Harness) -> None:
    harness.submit(make_request("a"))
    harness.loop.cancel("a")
    harness.until_idle()
    assert harness.reason("a") is FinishReason.CANCELLED and not harness.source.exchanges


def cancelled_while_queued(harness: Harness) -> None:
    harness.submit(*(make_request(f"r{at}", max_tokens=9) for at in range(8)), make_request("a"))
    harness.iterate(2)
    assert [s.id for s in harness.loop.scheduler.waiting] == ["a"]
    harness.loop.cancel("a")
    harness.until_idle()
    assert harness.reason("a") is FinishReason.CANCELLED and not harness.tokens["a"]


def cancelled_in_prefill(harness: Harness) -> None:
    harness.submit(make_request("a", [1, 2] * 60))
    harness.iterate(2)
    sequence = harness.loop.scheduler.live["a"]
    assert 0 < sequence.num_computed_tokens + sequence.in_flight < 120
    harness.loop.cancel("a")
    harness.until_idle()
    assert harness.reason("a") is FinishReason.CANCELLED and not harness.tokens["a"]


def cancelled_in_decode(harness: Harness) -> None:
    harness.submit(make_request("a", max_tokens=100))
    harness.iterate(5)
    assert harness.tokens["a"]
    harness.loop.cancel("a")
    harness.loop.cancel("a")
    harness.until_idle()
    assert harness.reason("a") is FinishReason.CANCELLED
    harness.loop.cancel("a")
    harness.iterate()


def forward_error(harness: Harness) -> None:
    harness.memory.fault = lambda chunk: ForwardFailed("boom") if chunk.sequence.id == "a" else None
    harness.submit(make_request("a"), make_request("b"))
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), ForwardFailed)
    assert harness.tokens["b"] == alone(make_request("b"))


def text_error(harness: Harness) -> None:
    request = make_request("a")
    request.text.push = None  # type: ignore[method-assign,assignment]
    harness.submit(request, make_request("b"))
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), Internal)
    assert harness.tokens["b"] == alone(make_request("b"))


def session_lost_while_leaving(harness: Harness) -> None:
    harness.submit(make_request("a", [1] * 4, max_tokens=1))
    harness.iterate(2)
    assert harness.loop.scheduler.leaving
    harness.source.faults = [(SessionExpired("gone"), False)]
    harness.until_idle()
    assert harness.reason("a") is FinishReason.LENGTH


def out_of_time_while_queued(harness: Harness) -> None:
    harness.submit(*(make_request(f"r{at}", max_tokens=9) for at in range(8)))
    harness.submit(make_request("a", deadline=harness.clock.now + 0.004))
    harness.iterate(2)
    assert [s.id for s in harness.loop.scheduler.waiting] == ["a"]
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), DeadlineExceeded) and not harness.tokens["a"]
    assert len(harness.tokens["r0"]) == 9


def out_of_time_in_prefill(harness: Harness) -> None:
    harness.submit(make_request("a", [1, 2] * 60, deadline=harness.clock.now + 0.0015))
    harness.iterate(2)
    sequence = harness.loop.scheduler.live["a"]
    assert 0 < sequence.num_computed_tokens + sequence.in_flight < 120
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), DeadlineExceeded) and not harness.tokens["a"]


def out_of_time_in_decode(harness: Harness) -> None:
    harness.submit(make_request("a", max_tokens=100, deadline=harness.clock.now + 0.01), make_request("b"))
    harness.until_idle()
    error = error_of(harness, "a")
    assert isinstance(error, DeadlineExceeded) and 5 < len(harness.tokens["a"]) < 100
    assert f"{len(harness.tokens['a'])} tokens" in error.message
    assert harness.tokens["a"] == alone(make_request(max_tokens=100))[: len(harness.tokens["a"])]
    assert harness.tokens["b"] == alone(make_request("b"))


def out_of_time_before_it_was_seen(harness: Harness) -> None:
    harness.submit(make_request("a", deadline=harness.clock.now))
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), DeadlineExceeded) and not harness.source.exchanges


def out_of_time_while_nobody_answers(harness: Harness) -> None:
    harness.submit(make_request("a", max_tokens=50, deadline=harness.clock.now + 2.0))
    harness.iterate(3)
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * 8
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), DeadlineExceeded)
    assert harness.source.reopen_faults


def done_in_time(harness: Harness) -> None:
    harness.submit(make_request("a", max_tokens=5, deadline=harness.clock.now + 10))
    harness.until_idle()
    assert harness.reason("a") is FinishReason.LENGTH
    harness.clock.now += 20
    harness.iterate()


def drained(harness: Harness) -> None:
    harness.submit(*(make_request(f"r{at}", max_tokens=20) for at in range(10)))
    harness.iterate(4)
    harness.loop.drain(Draining("closing"))
    harness.until_idle()
    for name in ("r8", "r9"):
        assert isinstance(error_of(harness, name), Draining) and not harness.tokens[name]
    assert all(harness.tokens[f"r{at}"] == alone(make_request(max_tokens=20)) for at in range(8))


WAYS: list[Callable[[Harness], None]] = [
    finished_by_length,
    finished_by_eos,
    finished_by_stop_token,
    finished_by_stop_string,
    cancelled_before_it_was_seen,
    cancelled_while_queued,
    cancelled_in_prefill,
    cancelled_in_decode,
    forward_error,
    text_error,
    session_lost_while_leaving,
    out_of_time_while_queued,
    out_of_time_in_prefill,
    out_of_time_in_decode,
    out_of_time_before_it_was_seen,
    out_of_time_while_nobody_answers,
    done_in_time,
    drained,
]


@pytest.mark.parametrize("ahead", [None, "early", "late"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_however_it_ends_nothing_is_left(way: Callable[[Harness], None], late: bool, ahead: str | None) -> None:
    harness = Harness(late=late, max_batch=8, max_step_tokens=40, ahead=ahead)
    way(harness)
    harness.until_idle()
    harness.iterate(2)
    harness.check_empty()
    last = [event.request_id for event in harness.events if event.outcome is not None]
    assert len(last) == len(set(last))
    totals = harness.loop.totals
    assert totals.finished_requests + totals.failed_requests + totals.cancelled_requests == len(last)


def test_the_end_is_told_only_after_the_pages_are_back() -> None:
    harness = Harness()
    seen: list[int] = []
    deliver = harness.loop._outbox

    def outbox(events: list[Event]) -> None:
        seen.extend(harness.local.live_sequences for event in events if event.outcome is not None)
        deliver(events)

    harness.loop._outbox = outbox
    harness.submit(make_request("a", [1] * 9, max_tokens=7))
    harness.until_idle()
    harness.submit(make_request("b", [1] * 9, max_tokens=7))
    harness.iterate(3)
    harness.loop.cancel("b")
    harness.until_idle()
    assert seen == [0, 0]


def test_text_is_told_before_the_step_s_exchange_is_waited_for() -> None:
    harness = Harness(late=True, page_size=1)
    order: list[str] = []
    serve, deliver = harness.source.serve, harness.loop._outbox
    harness.source.serve = lambda *batch: order.append("exchange") or serve(*batch)  # type: ignore
    harness.loop._outbox = lambda events: order.append("text" if events[0].text else "") or deliver(events)  # type: ignore
    harness.submit(make_request("a", max_tokens=3))
    harness.iterate(3)
    assert order == ["", "exchange", "text", "text", "exchange"]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request("a", [1] * 300, max_tokens=1), ExceedsPool),
        (make_request("live"), RequestExists),
    ],
)
def test_refused_at_submission(request_: object, error: type[ServiceError]) -> None:
    harness = Harness(pages=64, page_size=4)
    harness.submit(make_request("live", max_tokens=3))
    refused: list[Event] = []
    harness.loop._outbox = refused.extend
    harness.submit(request_)
    harness.loop.iterate()
    [event] = [event for event in refused if event.outcome is not None]
    assert isinstance(event.outcome.error, error) and event.sequence is None  # type: ignore[union-attr]
    assert list(harness.loop.scheduler.live) == ["live"]


def test_a_full_queue_is_said_with_advice() -> None:
    harness = Harness(max_batch=2, max_queue=3)
    harness.submit(*(make_request(f"r{at}") for at in range(6)))
    harness.iterate()
    error = error_of(harness, "r5")
    assert isinstance(error, QueueFull) and error.retry_after_s == 1.0  # nothing is known yet
    harness.until_idle()
    assert len(harness.ended) == 6
    harness.check_empty()


def test_what_is_queued_is_told_before_the_step_and_what_is_refused_too() -> None:
    harness = Harness(max_batch=1, max_queue=0)
    told: list[tuple[str, bool]] = []
    deliver = harness.loop._outbox

    def outbox(events: list[Event]) -> None:
        told.extend((event.request_id, event.sequence is not None) for event in events)
        deliver(events)

    harness.loop._outbox = outbox
    harness.submit(make_request("a"), make_request("b"))
    run = harness.memory.run

    def launched(step: list[Chunk]) -> list[int | ServiceError | None]:
        assert told[:2] == [("a", True), ("b", False)]
        return run(step)

    harness.memory.run = launched  # type: ignore[method-assign,assignment]
    harness.until_idle()
    assert isinstance(error_of(harness, "b"), QueueFull) and len(told) > 2


def test_an_idle_engine_wakes_for_a_deadline() -> None:
    harness = Harness()
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * 20
    for _ in range(8):
        harness.clock.now += harness.loop.iterate()  # by now it asks only once a second
    began = harness.clock.now
    harness.submit(make_request("a", deadline=began + 0.03))
    while "a" not in harness.ended:
        delay = harness.loop.iterate()
        ended_at = harness.clock.now
        harness.clock.now += delay
    assert isinstance(error_of(harness, "a"), DeadlineExceeded)
    assert ended_at - began == pytest.approx(0.03)
    assert harness.loop.scheduler.next_deadline == float("inf")


def test_what_a_step_computed_while_the_lease_ended_is_not_used() -> None:
    """Pages that it read may have been others' by then."""
    harness = Harness()
    harness.submit(make_request("a", max_tokens=6))
    harness.iterate(3)
    said, run = len(harness.tokens["a"]), harness.memory.run

    def garbage(step: Sequence[Chunk]) -> list[Result]:
        harness.source.lease = False
        return [(result + 1) % 7 if isinstance(result, int) else result for result in run(step)]

    harness.memory.run = garbage  # type: ignore[method-assign]
    harness.iterate()
    harness.memory.run = run  # type: ignore[method-assign]
    assert len(harness.tokens["a"]) == said
    harness.until_idle()
    assert harness.tokens["a"] == alone(make_request(max_tokens=6)) and harness.source.reopened == 1


def test_a_drain_lets_those_go_on_that_lost_their_pages() -> None:
    harness = Harness(pages=6, page_size=4, max_batch=4)
    requests = [make_request(f"r{at}", [at] * 3, max_tokens=14, seed=at) for at in range(2)]
    harness.submit(*requests)
    while not harness.loop.scheduler.preemptions:
        harness.iterate()
    assert len(harness.loop.scheduler.waiting) == 1
    harness.loop.drain(Draining("closing"))
    harness.iterate()
    harness.source.faults = [(SessionExpired("restarted"), False)]
    harness.until_idle()
    for request in requests:
        assert harness.tokens[request.request_id] == alone(request)
    assert harness.loop.totals.recoveries == 1
    harness.submit(make_request("late"))
    harness.iterate()
    assert isinstance(error_of(harness, "late"), Draining)  # a session opened anew opens no doors


def test_a_thousand_requests_leave_every_map_flat() -> None:
    harness = Harness(pages=16, page_size=8)
    for at in range(1000):
        harness.submit(make_request(f"r{at}", [1, 2, 3], max_tokens=2))
        harness.until_idle()
        harness.events.clear()
    harness.check_empty()
    assert harness.local.free_pages == 16
    assert harness.loop._inbox.empty() and not harness.loop._events
    assert not harness.loop.scheduler._released and harness.loop.scheduler._sent == ([], [])
    assert harness.loop.totals.finished_requests == 1000
    assert harness.loop.totals.page_calls <= 2000


def test_an_id_can_be_used_again_once_it_is_over() -> None:
    harness = Harness()
    for _ in range(3):
        harness.submit(make_request("same", max_tokens=2))
        harness.until_idle()
        assert harness.ended.pop("same").reason is FinishReason.LENGTH
    harness.check_empty()


# --- the page source is gone ------------------------------------------------------------------------------------------


def test_a_lost_session_is_opened_anew_and_nobody_notices() -> None:
    harness = Harness(pages=32)
    requests = [make_request(f"r{at}", [at] * 5, max_tokens=20, seed=at) for at in range(4)]
    harness.submit(*requests)
    harness.iterate(7)
    harness.source.faults = [(SessionExpired("restarted"), False)]
    harness.until_idle()
    assert harness.source.reopened == 1 == harness.loop.totals.recoveries
    for request in requests:
        assert harness.tokens[request.request_id] == alone(request)
    assert harness.loop.scheduler.preemptions == 0
    harness.check_empty()


def test_a_daemon_that_comes_back_with_a_smaller_pool() -> None:
    harness = Harness(pages=32)
    harness.submit(make_request("large", [1] * 40, max_tokens=20), make_request("small", max_tokens=20))
    harness.iterate(3)
    harness.local = harness.source.inner = LocalPageSource(8, 4)
    harness.source.faults = [(SessionExpired("restarted"), False)]
    harness.source.lease = False
    harness.until_idle()
    assert isinstance(error_of(harness, "large"), ExceedsPool)
    assert harness.tokens["small"] == alone(make_request("small", max_tokens=20))
    harness.check_empty()


def test_no_step_is_launched_once_the_lease_is_in_doubt() -> None:
    harness = Harness()
    harness.submit(make_request("a", max_tokens=20))
    harness.iterate(3)
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * 3
    steps, exchanges = len(harness.memory.steps), len(harness.source.exchanges)
    while harness.source.reopen_faults:
        harness.iterate()
        assert (len(harness.memory.steps), len(harness.source.exchanges)) == (steps, exchanges)
    harness.until_idle()
    assert harness.tokens["a"] == alone(make_request("a", max_tokens=20))


def test_decoding_goes_on_while_a_silent_daemon_s_lease_lasts() -> None:
    harness = Harness(page_size=64, pages=4)
    harness.submit(make_request("a", max_tokens=100))
    harness.iterate(2)
    harness.submit(make_request("b"))
    harness.source.faults = [(KvCacheDown("silent"), False)] * 4
    before = len(harness.tokens["a"])
    harness.iterate(10)
    assert len(harness.tokens["a"]) == before + 10
    harness.until_idle()
    assert harness.source.reopened == 0


def test_silence_is_answered_with_patience_between_attempts() -> None:
    harness = Harness()
    harness.source.faults = [(KvCacheDown("silent"), False)] * 5
    harness.submit(make_request("a"))
    began = harness.clock.now
    while harness.source.faults:
        harness.iterate()
    assert 0.3 < harness.clock.now - began < 3
    harness.until_idle()
    assert harness.reason("a") is FinishReason.LENGTH


def test_each_silence_is_tried_again_as_soon_as_the_first(logged: list[MutableMapping[str, Any]]) -> None:
    harness = Harness(page_size=1)
    send, asked = harness.source.exchange, list[float]()

    def exchange(demands: list[Demand], removed: list[str]) -> Exchange:
        asked.append(harness.clock.now)
        return send(demands, removed)

    harness.source.exchange = exchange  # type: ignore[method-assign, assignment]
    harness.submit(make_request("a", max_tokens=40))
    for _ in range(2):
        harness.iterate(5)
        del asked[:]
        harness.source.faults = [(KvCacheDown("silent"), False)] * 6
        harness.iterate(20)
        waits = [later - earlier for earlier, later in itertools.pairwise(asked[:7])]
        assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0], abs=0.01)
    counted = [event["failures"] for event in logged if event["event"] == "kvcache_unreachable"]
    assert counted == [1, 2, 4] * 2


def test_after_its_patience_requests_fail_and_service_stops_until_somebody_answers() -> None:
    harness = Harness(patience_s=10)
    harness.submit(make_request("a", max_tokens=50))
    harness.iterate(3)
    harness.source.lease = False
    harness.source.reopen_faults = [KvCacheDown("nobody")] * 40
    began = harness.clock.now
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), KvCacheDown) and harness.tokens["a"]
    assert 10 <= harness.clock.now - began < 13
    assert harness.serving == [False]

    harness.submit(make_request("b"))
    harness.iterate()
    assert isinstance(error_of(harness, "b"), KvCacheDown)  # at once

    while harness.serving == [False]:
        harness.iterate()
    assert harness.serving == [False, True]
    harness.submit(make_request("c"))
    harness.until_idle()
    assert harness.tokens["c"] == alone(make_request("c"))
    harness.check_empty()


def test_patience_starts_anew_with_each_outage() -> None:
    harness = Harness(patience_s=10)
    for name in ("a", "b"):
        harness.source.lease = False
        harness.source.reopen_faults = [KvCacheDown("nobody")] * 9  # some six seconds
        harness.submit(make_request(name))
        harness.until_idle()
        assert harness.reason(name) is FinishReason.LENGTH
        harness.clock.now += 100


def test_a_daemon_that_refuses_every_session_counts_as_gone() -> None:
    harness = Harness(patience_s=5)
    harness.submit(make_request("a"))
    harness.source.lease = False
    harness.source.reopen_faults = [LayoutMismatch("somebody else's pool")] * 30
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), KvCacheDown)


def test_a_daemon_that_opens_sessions_and_serves_none_counts_as_gone() -> None:
    harness = Harness(patience_s=5)
    harness.submit(make_request("a"))
    harness.source.faults = [(Internal("broken"), False)] * 200
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), KvCacheDown)
    assert harness.source.reopened < 30


def test_a_daemon_that_opens_sessions_and_then_is_silent_counts_as_gone() -> None:
    harness = Harness(patience_s=5)
    harness.submit(make_request("a"))
    harness.source.lease = False
    harness.source.faults = [(KvCacheDown("silent"), False)] * 200
    harness.until_idle()
    assert isinstance(error_of(harness, "a"), KvCacheDown)


def test_an_idle_engine_keeps_a_session_ready() -> None:
    harness = Harness()
    assert harness.loop.iterate() == IDLE_CHECK_S
    harness.source.lease = False
    harness.iterate(3)
    assert harness.source.reopened == 1
    assert harness.source.exchanges == [([], [])]  # the new session was tried
    assert harness.loop.iterate() == IDLE_CHECK_S


def test_what_ends_while_nobody_answers_is_told_when_the_session_is_over() -> None:
    harness = Harness(page_size=64, pages=4)
    harness.submit(make_request("a", max_tokens=3))
    harness.iterate(2)
    harness.source.faults = [(KvCacheDown("silent"), False)] * 50
    harness.iterate(10)
    assert len(harness.tokens["a"]) == 3 and "a" not in harness.ended
    harness.source.lease = False
    harness.iterate()
    assert harness.reason("a") is FinishReason.LENGTH


def test_stopping_does_not_wait_for_a_daemon_that_is_gone() -> None:
    harness = Harness()
    harness.submit(make_request("a", max_tokens=50))
    harness.iterate(3)
    harness.source.faults = [(KvCacheDown("silent"), False)]
    harness.loop.stop(Draining("stopping"))
    harness.iterate(2)
    assert harness.loop.stopped and isinstance(error_of(harness, "a"), Draining)


# --- the thread -------------------------------------------------------------------------------------------------------


class Threaded:
    """A loop in its own thread on the real clock, and its events as they come."""

    def __init__(self, runner: object | None = None) -> None:
        self.local = LocalPageSource(16, 4)
        self.ended: dict[str, Event] = {}
        self.serving: list[bool] = []
        self._changed = threading.Condition()
        chosen = runner if runner is not None else TokenMemory(16, 4)
        self.loop = EngineLoop(
            chosen,
            self.local,
            Limits(4, 32, 8),
            self._take,
            on_serving=self.serving.append,
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def _take(self, events: list[Event]) -> None:
        with self._changed:
            self.ended.update({event.request_id: event for event in events if event.outcome is not None})
            self._changed.notify_all()

    def wait_for(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended.keys() >= set(names), timeout=30)

    def error(self, name: str) -> ServiceError | None:
        self.wait_for(name)
        outcome = self.ended[name].outcome
        assert outcome is not None
        return outcome.error

    def stop(self) -> None:
        self.loop.stop(Draining("stopping"))
        self.thread.join(30)
        assert not self.thread.is_alive()


def test_the_thread_works_and_stops() -> None:
    threaded = Threaded()
    for at in range(5):
        threaded.loop.submit(make_request(f"r{at}"))
    threaded.wait_for(*(f"r{at}" for at in range(5)))
    assert threaded.thread.is_alive()
    threaded.stop()
    assert threaded.local.free_pages == 16


def test_stopping_ends_what_runs_and_gives_its_pages_back() -> None:
    launched, release = threading.Event(), threading.Event()
    memory = TokenMemory(16, 4)
    run = memory.run

    def slow(step: list[Chunk]) -> list[int | ServiceError | None]:
        launched.set()
        release.wait(30)
        return run(step)

    memory.run = slow  # type: ignore[method-assign,assignment]
    threaded = Threaded(memory)
    threaded.loop.submit(make_request("a", max_tokens=40))
    assert launched.wait(30)
    threaded.loop.stop(Draining("stopping"))
    threaded.loop.submit(make_request("late"))
    release.set()
    threaded.thread.join(30)
    assert isinstance(threaded.error("a"), Draining) and isinstance(threaded.error("late"), Draining)
    assert not threaded.thread.is_alive()


class Broken:
    def run(self, step: list[Chunk]) -> list[int | ServiceError | None]:
        raise RuntimeError("a bug")


def test_what_ended_in_the_round_that_failed_has_its_own_end() -> None:
    class Worse(TokenMemory):
        def copy_pages(self, copies: Sequence[PageCopy]) -> None:
            raise RuntimeError("a bug")

    threaded, both_there = Threaded(Worse(16, 4)), threading.Event()
    threaded.loop._inbox.put(lambda: both_there.wait(30) and None)
    threaded.loop.submit(make_request("b", max_tokens=1))
    threaded.loop.submit(make_request("a", range(7), max_tokens=9, n=3))  # its samples copy a page as b gives its back
    both_there.set()
    assert isinstance(threaded.error("a"), Internal)
    assert threaded.error("b") is None
    threaded.stop()


def test_an_unexpected_failure_ends_everything_loudly_and_refuses_what_comes() -> None:
    threaded = Threaded(Broken())
    threaded.loop.submit(make_request("a"))
    threaded.loop.submit(make_request("b"))
    assert isinstance(threaded.error("a"), Internal) and isinstance(threaded.error("b"), Internal)
    assert threaded.serving == [False]
    threaded.loop.submit(make_request("c"))
    threaded.loop.cancel("c")
    assert isinstance(threaded.error("c"), Internal)
    assert threaded.thread.is_alive() and not threaded.loop.scheduler.live
    assert threaded.local.live_sequences == 0
    threaded.stop()


def test_a_snapshot_counts_samples_and_what_is_still_in_the_inbox() -> None:
    harness = Harness(pages=64, max_batch=4)

    def counted() -> tuple[int, int]:
        now = harness.loop.snapshot()
        return now.running_requests, now.waiting_requests

    assert counted() == (0, 0)
    harness.submit(make_request("four", max_tokens=9, n=4))
    harness.submit(make_request("one", max_tokens=9))
    assert counted() == (0, 5)  # the engine's thread has seen neither
    harness.iterate(4)
    assert counted() == (4, 1)
    harness.loop.cancel("four")
    harness.iterate(4)
    assert counted() == (1, 0)
    harness.until_idle()
    assert counted() == (0, 0)


def test_a_refused_request_is_no_longer_counted() -> None:
    harness = Harness(pages=2)
    harness.submit(make_request("large", [1] * 99))
    assert harness.loop.snapshot().waiting_requests == 1
    harness.iterate()
    assert harness.loop.snapshot().waiting_requests == 0
    assert error_of(harness, "large") is not None


@pytest.mark.parametrize("ahead", [None, "late"])
def test_a_requests_pages_are_asked_for_before_its_acceptance_is_delivered(
    ahead: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Delivering wakes another thread, which takes the interpreter that the exchange needs. But it waits for no step.
    harness = Harness(ahead=ahead)
    harness.submit(make_request("b", max_tokens=20))
    while len(harness.tokens.get("b", [])) < 3:
        harness.iterate()
    order: list[str] = []

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any) -> Any:
            order.append(what)
            return call(*given)

        return noting

    deliver = harness.loop._outbox

    def outbox(events: list[Event]) -> None:
        order.extend(
            "token" if event.token_ids else "end" if event.outcome else f"accepted {event.request_id}"
            for event in events
        )
        deliver(events)

    monkeypatch.setattr(harness.source, "exchange", noted("exchange", harness.source.exchange))
    monkeypatch.setattr(harness.loop, "_outbox", outbox)
    monkeypatch.setattr(harness.memory, "run", noted("step", harness.memory.run))
    if ahead is not None:
        monkeypatch.setattr(harness.loop, "_launch_step", noted("step", harness.memory.launch))
    harness.submit(make_request("a", max_tokens=1))
    harness.iterate()
    assert order[:3] == ["exchange", "accepted a", "step"]
    harness.until_idle()
