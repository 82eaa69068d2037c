"""A request whose pages are being filled: when it is asked for again, and what goes on meanwhile."""

from __future__ import annotations

import itertools
from itertools import islice

import pytest

from services.common.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Draining,
    KvCacheDown,
    PagesFilling,
    ServiceError,
    SessionExpired,
)
from services.engine.pages.source import Grant
from services.engine.sampling.result import Computed
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.queue.fill_waits import LEAST_RETRY_S
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import FinishReason, Outcome, State
from tests.engine.fakes import Clock, Harness, alone, make_request
from tests.engine.lower_tier import FillingHarness, Plan

WAIT_S = 1.0
FRESH = itertools.count()
LONG = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 1, 1]


def started(*, max_batch: int = 8, pages: int = 100, fill_wait_s: float = WAIT_S) -> tuple[Scheduler, Clock]:
    clock = Clock()
    return Scheduler(Limits(max_batch, 64, 100, fill_wait_s=fill_wait_s), 4, pages, clock), clock


def answer(
    scheduler: Scheduler, *, filling: tuple[str, ...] = (), retry_s: float = 0.1, refused: tuple[str, ...] = ()
) -> dict[str, float | None]:
    """Serve the next exchange; whose openings it has, and the wait that each offers."""
    demands, _ = scheduler.demands()
    grants, offers = [], dict[str, float | None]()
    for demand in demands:
        name = demand.sequence_id.partition(":")[2]
        error: ServiceError | None = None
        if demand.opening:
            offers[name] = demand.opening.fill_wait_s
            error = PagesFilling("filling", retry_after_s=retry_s) if name in filling else None
            error = CapacityExceeded("full") if name in refused else error
        pages = () if error else tuple(islice(FRESH, max(0, demand.total_pages - demand.known_pages)))
        grants.append(Grant(demand.sequence_id, demand.known_pages, pages, error=error))
    scheduler.granted(grants)
    return offers


def end(scheduler: Scheduler) -> None:
    for sequence in list(scheduler.running):
        scheduler.finish(sequence, Outcome(FinishReason.LENGTH))


def running(scheduler: Scheduler) -> list[str]:
    return [sequence.id for sequence in scheduler.running]


def test_those_after_it_start_meanwhile_and_it_is_opened_when_it_is_due() -> None:
    scheduler, clock = started()
    for name in ("a", "b"):
        scheduler.submit(make_request(name))
    assert answer(scheduler, filling=("a",)) == {"a": WAIT_S, "b": WAIT_S}
    assert running(scheduler) == ["b"]
    scheduler.submit(make_request("c"))
    assert answer(scheduler) == {"c": WAIT_S}
    clock.now += 0.1 - 0.001
    assert answer(scheduler) == {}
    clock.now += 0.002
    assert answer(scheduler) == {"a": WAIT_S}
    assert running(scheduler) == ["a", "b", "c"]


def test_an_idle_engine_knows_when_it_is_due() -> None:
    scheduler, clock = started()
    scheduler.submit(make_request("a"))
    answer(scheduler, filling=("a",), retry_s=0.3)
    assert scheduler.admits_at == pytest.approx(clock.now + 0.3)
    scheduler.submit(make_request("b"))
    assert scheduler.admits_at is not None and scheduler.admits_at <= clock.now


def test_an_idle_engine_wakes_by_itself_when_it_is_due() -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans.append(Plan(2, 0.3, None))
    harness.submit(make_request("a", LONG))
    assert harness.loop.iterate() == pytest.approx(0.3)
    assert len(harness.source.exchanges) == 1
    harness.clock.now += 0.2
    assert harness.loop.iterate() == pytest.approx(0.1)
    assert len(harness.source.exchanges) == 1
    harness.clock.now += 0.1
    harness.until_idle()
    assert harness.tokens["a"] == alone(make_request("a", LONG))
    assert harness.loop.scheduler.cached_tokens == 8


def test_once_its_patience_is_over_it_offers_no_wait() -> None:
    scheduler, clock = started()
    scheduler.submit(make_request("a"))
    offers = [answer(scheduler, filling=("a",), retry_s=0.4)]
    for _ in range(2):
        clock.now += 0.4
        offers.append(answer(scheduler, filling=("a",), retry_s=0.4))
    assert offers == [{"a": WAIT_S}] * 3
    assert scheduler.admits_at == pytest.approx(clock.now + 0.2)  # not 0.4
    clock.now += 0.2
    assert answer(scheduler) == {"a": None}
    assert running(scheduler) == ["a"]


def test_its_patience_is_for_all_its_fills_until_it_is_admitted() -> None:
    scheduler, clock = started()
    scheduler.submit(make_request("a"))
    answer(scheduler, filling=("a",), retry_s=0.6)
    clock.now += 0.6
    assert answer(scheduler, refused=("a",)) == {"a": WAIT_S}
    clock.now += 0.2
    offer = answer(scheduler, filling=("a",), retry_s=0.6)["a"]
    assert offer == pytest.approx(WAIT_S - 0.6)
    clock.now += 0.4
    assert answer(scheduler) == {"a": None}
    [sequence] = scheduler.running
    assert sequence.fill_wait_s == pytest.approx(1.0)
    assert sequence.usage.queue_s == pytest.approx(clock.now)  # submitted at 0
    assert not scheduler._fill_waits._spent


def test_it_may_wait_again_once_it_was_preempted() -> None:
    scheduler, clock = started()
    sequence = scheduler.submit(make_request("a"))
    answer(scheduler, filling=("a",), retry_s=0.6)
    clock.now += 0.6
    answer(scheduler)
    scheduler._preempt(sequence)
    clock.now += 0.2
    assert answer(scheduler, filling=("a",)) == {"a": WAIT_S}


def test_without_a_fill_wait_no_opening_offers_one() -> None:
    scheduler, _ = started(fill_wait_s=0.0)
    scheduler.submit(make_request("a"))
    assert answer(scheduler) == {"a": None}


def test_a_source_that_refuses_for_a_fill_nobody_offered_to_wait_for_is_short_of_pages() -> None:
    scheduler, clock = started(fill_wait_s=0.0)
    for name in ("a", "b"):
        scheduler.submit(make_request(name))
    answer(scheduler, filling=("a",))
    assert running(scheduler) == ["b"]  # it was opened in the same exchange
    scheduler.submit(make_request("c"))
    clock.now += 0.2
    assert answer(scheduler, filling=("a",)) == {"a": None}, "it would be overtaken twice"
    clock.now += 0.2
    answer(scheduler)
    assert running(scheduler) == ["a", "b"]


def test_it_keeps_no_batch_slot_from_one_that_is_ready() -> None:
    scheduler, clock = started(max_batch=1)
    for name in ("a", "b"):
        scheduler.submit(make_request(name))
    assert answer(scheduler, filling=("a",), retry_s=0.0) == {"a": WAIT_S}
    clock.now += LEAST_RETRY_S  # every exchange is late: it is due in each
    assert answer(scheduler, filling=("a",), retry_s=0.0) == {"b": WAIT_S}
    assert running(scheduler) == ["b"]
    scheduler.submit(make_request("c"))
    clock.now += WAIT_S
    end(scheduler)
    assert answer(scheduler) == {"a": None}, "its patience is over: nobody overtakes it any more"


def test_once_its_patience_is_over_it_yields_to_nobody() -> None:
    scheduler, clock = started(max_batch=1)
    for name in ("a", "b"):
        scheduler.submit(make_request(name))
    answer(scheduler, filling=("a",), retry_s=WAIT_S)
    clock.now += WAIT_S
    assert answer(scheduler) == {"a": None}


def test_it_is_not_charged_for_the_time_without_a_session() -> None:
    scheduler, clock = started()
    scheduler.submit(make_request("a"))
    answer(scheduler, filling=("a",))
    clock.now += 0.25
    scheduler.lost_pages()
    clock.now += 60
    assert answer(scheduler, filling=("a",)) == {"a": pytest.approx(WAIT_S - 0.25)}


def test_it_does_not_ask_again_at_once_whatever_it_is_told() -> None:
    scheduler, clock = started()
    scheduler.submit(make_request("a"))
    answer(scheduler, filling=("a",), retry_s=0.0)
    assert answer(scheduler) == {}
    assert scheduler.admits_at == pytest.approx(clock.now + LEAST_RETRY_S)


def test_it_closes_no_gate() -> None:
    scheduler, clock = started()
    for name in ("a", "b"):
        scheduler.submit(make_request(name))
    answer(scheduler, filling=("a", "b"))
    admission = scheduler._admission
    assert admission.opens_at <= clock.now and not admission._probing and not admission._overtaken


def test_samples_of_other_requests_are_forked_meanwhile() -> None:
    scheduler, _ = started(max_batch=3)
    scheduler.submit(make_request("a"))
    answer(scheduler, filling=("a",), retry_s=0.5)
    scheduler.submit(make_request("b", n=3, max_tokens=9))
    answer(scheduler)
    [leader] = scheduler.running
    [chunk] = scheduler.schedule()
    scheduler.apply((chunk,), [Computed(drawn=(1, 1, 1))])
    demands, _ = scheduler.demands()
    assert sum(demand.parent == leader.source_id for demand in demands) == 2, "a fill keeps no slot from them"


def test_a_prompt_of_several_samples_waits_once() -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans.append(Plan(3, 0.05, None))
    request = make_request("a", LONG, n=4, max_tokens=9)
    harness.submit(request)
    harness.until_idle()
    for one in (request, *request.others):
        assert harness.tokens[("a", one.sample) if one.sample else "a"] == alone(one)
    assert harness.tier.refusals == 3 and harness.loop.stats.fill_wait.count == 1
    harness.check_empty()


@pytest.mark.parametrize("how", ["cancel", "deadline", "drain"])
def test_it_ends_while_it_waits(how: str) -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans.append(Plan(9, 0.5, None))
    deadline = harness.clock.now + 0.2 if how == "deadline" else None
    harness.submit(make_request("a", LONG, deadline=deadline))
    assert harness.loop.iterate() == pytest.approx(0.2 if deadline else 0.5)
    if how == "cancel":
        harness.loop.cancel("a")
    if how == "drain":
        harness.loop.drain(Draining("over"))
    if how == "deadline":
        harness.clock.now += 0.2
    harness.iterate(2)
    outcome = harness.ended["a"]
    assert outcome.reason is FinishReason.CANCELLED if how == "cancel" else outcome.error is not None
    assert isinstance(outcome.error, {"deadline": DeadlineExceeded, "drain": Draining}.get(how, type(None)))
    assert not harness.loop.scheduler._fill_waits._waits and not harness.loop.scheduler._fill_waits._spent
    harness.check_empty()


@pytest.mark.parametrize("served", [True, False])
def test_a_lost_reply_is_asked_for_again(served: bool) -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans.append(Plan(3, 0.05, None))
    harness.source.faults = [None, (KvCacheDown("lost"), served)]
    harness.submit(make_request("a", LONG))
    harness.until_idle()
    assert harness.tokens["a"] == alone(make_request("a", LONG))
    assert harness.loop.scheduler.cached_tokens == 8
    harness.check_empty()


def test_a_lost_session_ends_the_wait_and_another_may_begin() -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans = [Plan(9, 0.05, None), Plan(2, 0.05, None)]
    harness.source.faults = [None, (SessionExpired("gone"), False)]
    harness.submit(make_request("a", LONG))
    harness.until_idle()
    assert harness.tokens["a"] == alone(make_request("a", LONG))
    assert harness.loop.scheduler.cached_tokens == 8 and len(harness.tier.begun) == 2
    harness.check_empty()


def test_a_failed_fill_is_computed() -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans.append(Plan(9, 0.05, None))
    harness.submit(make_request("a", LONG))
    harness.iterate(2)
    harness.tier.abandon()
    harness.until_idle()
    assert harness.tokens["a"] == alone(make_request("a", LONG))
    assert harness.loop.scheduler.cached_tokens == 0


def test_others_take_steps_while_it_waits() -> None:
    harness = FillingHarness(fill_wait_s=5.0)
    harness.submit(make_request("b", [3], max_tokens=20))
    harness.iterate(2)
    harness.tier.plans.append(Plan(6, 0.0, None))
    harness.submit(make_request("a", LONG))
    while harness.loop.scheduler.live:
        before = len(harness.memory.steps)
        decodes = "b" in harness.loop.scheduler.live and harness.loop.scheduler.live["b"].state is State.RUNNING
        harness.iterate()
        assert len(harness.memory.steps) == before + 1 or not decodes
    assert harness.loop.stats.fill_wait.count == 1


def test_the_wait_is_counted_of_those_that_waited() -> None:
    harness: Harness = FillingHarness(fill_wait_s=5.0)
    harness.tier.plans.append(Plan(2, 0.3, None))  # type: ignore[attr-defined]
    harness.submit(make_request("a", LONG))
    harness.until_idle()
    harness.submit(make_request("b", [1]))
    harness.until_idle()
    seen = harness.loop.stats.fill_wait
    assert seen.count == 1 and seen.sum == pytest.approx(0.6, abs=0.01)
