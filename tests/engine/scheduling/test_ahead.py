# mypy: disable-error-code="method-assign, assignment, arg-type"
"""Asynchronous steps: one is launched after another, and nothing else changes.

`fakes.Scripted` checks at every exchange that no step in flight has the pages of a sequence that it removes, and that
none is in flight when a session is opened or closed. `test_workload` and `model.test_ahead` compare the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from services.common.errors import DeadlineExceeded, GpuError, Internal, KvCacheDown, SequenceRemoved
from services.engine.pages.source import Grant
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import FEW
from services.engine.scheduling.sequence import FinishReason, key_of
from services.engine.scheduling.step import Chunk
from tests.engine.fakes import EOS, Harness, TokenFlight, alone, make_request

MANY = FEW + 2
WHEN = pytest.mark.parametrize("ahead", ["early", "late"])


def decoding(ahead: str | None, **shape: Any) -> Harness:
    """A harness with more requests that decode than a step is waited for that brings a first token."""
    harness = Harness(ahead=ahead, **{"pages": 128, **shape})
    harness.submit(*(make_request(f"r{at}", [1, at], max_tokens=40, seed=at) for at in range(MANY)))
    while len(harness.tokens) < MANY or not all(len(one) > 2 for one in harness.tokens.values()):
        harness.iterate()
    return harness


def flying(harness: Harness) -> list[TokenFlight]:
    return [flight for flight in harness.memory.flights if not flight.waited]


@WHEN
def test_a_step_is_launched_before_the_one_before_is_waited_for(ahead: str) -> None:
    harness = decoding(ahead)
    assert harness.memory.most_in_flight == 2 and len(flying(harness)) == 1
    harness.until_idle()
    for at in range(MANY):
        assert harness.tokens[f"r{at}"] == alone(make_request(f"r{at}", [1, at], max_tokens=40, seed=at))
    harness.check_empty()


def test_nothing_is_computed_for_a_request_that_is_known_to_end() -> None:
    harness = decoding("late")
    harness.until_idle()
    # The last token's K and V are never computed, and no row is launched to be discarded.
    assert harness.memory.computed == MANY * (2 + 40 - 1)


@WHEN
@pytest.mark.parametrize("page_size", [4, 64], ids=["with a last report", "without"])
def test_a_row_in_flight_of_a_request_that_has_ended_counts_for_nothing(ahead: str, page_size: int) -> None:
    harness = decoding(ahead, page_size=page_size)
    seed = next(s for s in range(200) if EOS in alone(make_request(seed=s, max_tokens=30))[3:])
    request = make_request("a", seed=seed, max_tokens=30, eos=True)
    harness.submit(request)
    while harness.loop.scheduler.live.get("a") is None or harness.loop.scheduler.live["a"].outcome is None:
        harness.iterate()
    ended = harness.loop.scheduler.live["a"]
    assert ended.outcome is not None and ended.outcome.reason is FinishReason.EOS
    # The step in flight has a row of it: its pages stay, and so does the news of its end.
    [flight] = flying(harness)
    assert any(chunk.sequence is ended for chunk in flight.step) and "a" not in harness.ended
    exchanges = len(harness.source.exchanges)
    harness.iterate()
    assert all(ended.source_id not in removed for _, removed in harness.source.exchanges[exchanges:])
    harness.iterate(2)
    assert harness.tokens["a"] == alone(request) and harness.reason("a") is FinishReason.EOS


@WHEN
def test_a_cancelled_request_keeps_its_pages_until_the_step_in_flight_is_over(ahead: str) -> None:
    harness = decoding(ahead)
    sequence = harness.loop.scheduler.live["r1"]
    harness.loop.cancel("r1")
    harness.iterate()
    assert "r1" not in harness.ended and sequence.source_id in harness.loop.scheduler.leaving
    harness.iterate(2)  # a last report, and the removal
    assert harness.reason("r1") is FinishReason.CANCELLED


def steps_to_the_first_token(ahead: str | None) -> int:
    harness = decoding(ahead, max_step_tokens=16)
    begun = harness.loop.totals.steps
    harness.submit(make_request("new", [3] * 20))
    while not harness.tokens.get("new"):
        harness.iterate()
    return harness.loop.totals.steps - begun


def test_a_first_token_takes_no_more_steps_than_without() -> None:
    assert steps_to_the_first_token("late") <= steps_to_the_first_token(None)


def test_a_first_token_of_a_few_is_sent_before_the_next_step_is_launched() -> None:
    harness = Harness(ahead="late")
    order: list[str] = []
    launch, run, deliver = harness.memory.launch, harness.memory.run, harness.loop._outbox

    def ran(step: Sequence[Chunk]) -> Any:
        order.append("run")
        return run(step)

    def launched(step: Sequence[Chunk]) -> TokenFlight:
        order.append("launch")
        return launch(step)

    def outbox(events: list[Event]) -> None:
        order.extend("token" for event in events if event.token_ids)
        deliver(events)

    harness.loop._launch_step, harness.memory.run, harness.loop._outbox = launched, ran, outbox
    harness.submit(make_request("a", max_tokens=4))
    harness.until_idle()
    assert order == ["run", "token", "launch", "launch", "token", "launch", "token", "token"]


def test_grants_that_open_nothing_are_not_waited_for_before_the_next_step_is_launched() -> None:
    harness = decoding("late", page_size=2, late=True)
    order: list[str] = []
    launch, serve = harness.memory.launch, harness.source.serve

    def launched(step: Sequence[Chunk]) -> TokenFlight:
        order.append("launch")
        return launch(step)

    def served(*batch: Any) -> Any:
        order.append("opened" if any(demand.opens for demand in batch[0]) else "grown")
        return serve(*batch)

    harness.loop._launch_step, harness.source.serve = launched, served
    rounds = list[list[str]]()
    for name in ("a", "b"):
        harness.submit(make_request(name, [1] * 9, max_tokens=9))
        for _ in range(9):
            order.clear()
            harness.iterate()
            rounds.append(list(order))
    assert rounds[0] == rounds[9] == ["opened", "launch"]
    assert ["launch", "grown"] in rounds and ["grown", "launch"] not in rounds


def test_no_step_is_launched_once_the_lease_is_over_although_the_round_began_before() -> None:
    harness = decoding("late")
    asked, launches = harness.source.serve, len(harness.memory.steps)

    def served(*batch: Any) -> Any:
        harness.source.lease = False  # while the exchange is waited for
        return asked(*batch)

    harness.source.serve = served
    harness.submit(make_request("new"))
    harness.loop.iterate()
    assert not harness.source.lease and len(harness.memory.steps) == launches and harness.loop._lost
    assert not flying(harness)
    harness.source.serve = asked
    harness.until_idle()
    assert harness.tokens["r0"] == alone(make_request("r0", [1, 0], max_tokens=40, seed=0))


def test_what_two_steps_computed_while_the_lease_ended_is_not_told() -> None:
    harness = decoding("late")
    told = {name: list(tokens) for name, tokens in harness.tokens.items()}
    launch = harness.memory.launch

    def launched(step: Sequence[Chunk]) -> TokenFlight:
        harness.source.lease = False  # after the last look before a step
        return launch(step)

    harness.loop._launch_step = launched
    harness.loop.iterate()
    assert harness.loop._lost and not flying(harness) and harness.tokens == told
    assert [flight.discarded for flight in harness.memory.flights] == [False, True]
    harness.loop._launch_step = launch
    harness.until_idle()
    for at in range(MANY):
        assert harness.tokens[f"r{at}"] == alone(make_request(f"r{at}", [1, at], max_tokens=40, seed=at))


def test_a_lost_reply_with_a_step_in_flight_changes_no_token() -> None:
    harness = decoding("late", page_size=1)
    harness.source.faults = [(KvCacheDown("lost"), True), (KvCacheDown("lost"), False)] * 3
    harness.until_idle()
    assert harness.source.failures == 6
    for at in range(MANY):
        assert harness.tokens[f"r{at}"] == alone(make_request(f"r{at}", [1, at], max_tokens=40, seed=at))


@pytest.mark.parametrize("nth", [0, 1], ids=["the step waited for", "the step behind it"])
def test_a_gpu_that_fails_with_two_steps_in_flight_ends_all_requests(nth: int) -> None:
    harness = decoding("late")
    launch = harness.memory.launch
    count = 0

    def launched(step: Sequence[Chunk]) -> TokenFlight:
        nonlocal count
        flight, count = launch(step), count + 1
        if count > nth:
            gone = harness.memory.flights[-2 + nth]
            gone.wait = partial(broken, gone)
            for one in harness.memory.flights:
                one.discard = partial(broken, one)
        return flight

    def broken(flight: TokenFlight) -> Any:
        flight.waited = True  # what a failed device had queued is void
        raise GpuError("gone")

    harness.loop._launch_step = launched
    with pytest.raises(GpuError):
        for _ in range(5):
            harness.loop.iterate()
    harness.loop._fail(GpuError("gone"))
    assert all(isinstance(harness.ended[f"r{at}"].error, Internal) for at in range(MANY))


def test_a_failure_of_the_host_with_a_step_in_flight_closes_the_session_behind_it() -> None:
    harness = decoding("late")
    assert len(flying(harness)) == 1
    # `fakes.Scripted` refuses to close while a step is in flight.
    harness.loop._fail(RuntimeError("a bug"))
    assert harness.source.closed and not flying(harness)
    assert all(isinstance(harness.ended[f"r{at}"].error, Internal) for at in range(MANY))


@WHEN
@pytest.mark.parametrize("end", ["cancelled", "overdue"])
def test_a_request_that_is_ended_with_two_steps_in_flight(ahead: str, end: str) -> None:
    harness = decoding(ahead)
    request = make_request("a", max_tokens=30, seed=7, deadline=harness.clock.now + 1000 if end == "overdue" else None)
    harness.submit(request)
    launch, in_flight = harness.memory.launch, list[int]()

    def launched(step: Sequence[Chunk]) -> TokenFlight:
        flight = launch(step)
        rows = [sum(chunk.sequence.id == "a" for chunk in one.step) for one in flying(harness)]
        if not in_flight and rows == [1, 1] and len(harness.tokens.get("a", ())) > 3:
            in_flight.append(sum(rows))
            if end == "cancelled":
                harness.loop.cancel("a")
            else:
                harness.clock.now += 2000
        return flight

    harness.loop._launch_step = launched
    harness.until_idle()
    assert in_flight == [2]
    ended = harness.ended["a"]
    if end == "cancelled":
        assert ended.reason is FinishReason.CANCELLED
    else:
        assert isinstance(ended.error, DeadlineExceeded)
    assert harness.tokens["a"] == alone(request)[: len(harness.tokens["a"])] and len(harness.tokens["a"]) < 8
    for at in range(MANY):
        assert harness.tokens[f"r{at}"] == alone(make_request(f"r{at}", [1, at], max_tokens=40, seed=at))
    harness.check_empty()


@WHEN
def test_a_request_is_preempted_with_a_row_in_flight(ahead: str) -> None:
    harness = Harness(ahead=ahead, pages=48, page_size=2)
    scheduler = harness.loop.scheduler
    preempt, busy = scheduler._preempt, list[bool]()

    def preempted(sequence: Any) -> None:
        busy.append(any(chunk.sequence is sequence for flight in flying(harness) for chunk in flight.step))
        preempt(sequence)

    scheduler._preempt = preempted
    requests = [make_request(f"r{at}", [1, at], max_tokens=40, seed=at) for at in range(MANY)]
    harness.submit(*requests)
    harness.until_idle()
    assert any(busy)
    for request in requests:
        assert harness.tokens[request.request_id] == alone(request)
    harness.check_empty()


@WHEN
def test_a_row_in_flight_of_an_earlier_admission_counts_for_nothing(ahead: str) -> None:
    """Its sequence lost its pages and is admitted again before the step is waited for."""
    harness = decoding(ahead, page_size=2)
    scheduler = harness.loop.scheduler
    serve, apply, lost, stale = harness.source.serve, scheduler.apply, list[str](), list[str]()

    def served(demands: Any, removed: Any) -> list[Grant]:
        grants = serve(demands, removed)
        for at, demand in enumerate(demands):
            if not lost and demand.sequence_id == scheduler.live["r1"].source_id and not demand.opens:
                lost.append(demand.sequence_id)
                grants[at] = Grant(demand.sequence_id, error=SequenceRemoved("ended"))
        return grants

    def applied(step: Any, results: Any) -> Any:
        stale.extend(
            chunk.source_id
            for chunk in step
            if chunk.source_id in lost and chunk.sequence.source_id not in ("", chunk.source_id)
        )
        return apply(step, results)

    harness.source.serve, scheduler.apply = served, applied
    harness.until_idle()
    assert stale == lost != []
    for at in range(MANY):
        assert harness.tokens[f"r{at}"] == alone(make_request(f"r{at}", [1, at], max_tokens=40, seed=at))
    harness.check_empty()


@WHEN
def test_samples_fork_where_the_first_token_is_in_flight(ahead: str) -> None:
    harness = decoding(ahead)
    request = make_request("f", [4, 4, 1], max_tokens=9, seed=50, n=2)
    harness.submit(request)
    harness.until_idle()
    for one in (request, *request.others):
        assert harness.tokens[key_of("f", one.sample)] == alone(one)
    harness.check_empty()
