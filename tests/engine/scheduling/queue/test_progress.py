"""A pool that nobody else uses always lets the head of the queue run, whichever replies were lost.

``Harness.iterate`` holds every round to it, those of all other tests too; here are the workloads that put it at risk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import ExceedsPool, KvCacheDown
from services.engine.scheduling.event import Event
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import FinishReason, Key, Request, key_of
from tests.engine.fakes import Harness, alone, make_request
from tests.engine.scheduling.test_daemon_workload import DaemonHarness
from tests.engine.scheduling.test_workload import prompts
from tests.kvcache.conftest import Running

pytestmark = pytest.mark.usefixtures("patient_calls")

Made = Callable[..., Harness]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    one = Running(tmp_path_factory.mktemp("k"))
    yield one
    one.close()


@pytest.fixture(params=["local", "daemon"])
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    """Makes a harness on pages of its process's own, or on a daemon's."""
    harnesses: list[Harness] = []

    def one(*, pages: int, max_batch: int, max_step_tokens: int = 64, late: bool = False) -> Harness:
        if request.param == "local":
            return Harness(pages=pages, max_batch=max_batch, max_step_tokens=max_step_tokens, late=late)
        limits = Limits(max_batch, max_step_tokens, 100)
        harnesses.append(DaemonHarness(request.getfixturevalue("daemon"), pages, limits, late))
        return harnesses[-1]

    yield one
    for harness in harnesses:
        harness.source.close()


def lose(harness: Harness, *served: bool) -> None:
    """Lose the replies of the next exchanges, each after it was served or before."""
    harness.source.faults += [(KvCacheDown("lost"), one) for one in served]


def check_outputs(harness: Harness, *requests: Request) -> None:
    """Each sample got what it generates alone."""
    for request in requests:
        for one in (request, *request.others):
            assert harness.tokens[key_of(one.request_id, one.sample)] == alone(one)


def test_a_request_behind_does_not_keep_what_an_unanswered_opening_took(made: Made) -> None:
    harness = made(pages=9, max_batch=2, max_step_tokens=1)
    head = make_request("r0", [0, 1, 2, 3, 4, 0, 1, 2] + [0] * 8, max_tokens=14, n=2)
    behind = make_request("r1", [0] * 8, max_tokens=1)
    lose(harness, False, False, False, False)
    harness.submit(head)
    harness.iterate(5)
    harness.submit(behind)
    lose(harness, True)
    harness.until_idle()
    check_outputs(harness, head, behind)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_who_comes_before_an_unanswered_opening_has_its_pages(made: Made, n: int, served: bool) -> None:
    harness = made(pages=8, max_batch=2)
    low, high = make_request("low", [1] * 12, n=n), make_request("high", [2] * 24, max_tokens=8, priority=9)
    lose(harness, served)
    harness.submit(low)
    harness.iterate()
    harness.submit(high)
    harness.until_idle()
    check_outputs(harness, low, high)
    ends = [event.request_id for event in harness.events if event.outcome is not None]
    assert ends == ["high", *["low"] * n]


@pytest.mark.parametrize("removal_lost", [False, True])
def test_cancelling_an_unanswered_opening_is_told_once_its_pages_are_back(removal_lost: bool) -> None:
    harness = Harness(pages=8, max_batch=2)
    lose(harness, True, removal_lost)
    harness.submit(make_request("a", [1] * 12))
    harness.iterate()
    assert harness.local.live_sequences == 1
    watch_ends(harness)
    harness.loop.cancel("a")
    harness.until_idle()
    assert harness.reason("a") is FinishReason.CANCELLED
    harness.check_empty()


@pytest.mark.parametrize("served", [False, True])
def test_cancelling_what_was_preempted_is_told_once_its_pages_are_back(served: bool) -> None:
    harness = Harness(pages=9, max_batch=2)
    harness.submit(make_request("a", [1] * 8, max_tokens=16), make_request("b", [2] * 8, max_tokens=16))
    for _ in range(30):
        harness.iterate()
        if harness.loop.scheduler.preemptions:
            break
    assert list(harness.loop.scheduler._released.values()) == list(harness.loop.scheduler.waiting)
    lose(harness, served)
    harness.iterate()
    watch_ends(harness)
    harness.loop.cancel("b")
    harness.iterate()
    assert "b" not in harness.ended, "nobody said that its pages are back"
    harness.until_idle()
    assert harness.reason("b") is FinishReason.CANCELLED
    harness.check_empty()


def watch_ends(harness: Harness) -> None:
    """Hold the end of a request to its pages being back."""
    deliver = harness.loop._outbox

    def outbox(events: list[Event]) -> None:
        for event in events:
            if event.outcome is not None:
                held = [name for name in harness.local._sequences if name.endswith(f":{event.request_id}")]
                assert not held, f"{event.request_id} ended and {held} has pages"
        deliver(events)

    harness.loop._outbox = outbox


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("nth", range(14))
def test_any_reply_may_be_lost_where_pages_are_short(made: Made, nth: int, served: bool, late: bool) -> None:
    """Openings, forks with their copies, growths, preemptions and removals: each is the nth exchange of some."""
    harness = made(pages=9, max_batch=3, late=late)
    harness.source.faults += [None] * nth
    lose(harness, served, served)
    requests = [make_request(f"r{at}", [at] * 9, max_tokens=12, n=1 + at % 2, priority=at % 2) for at in range(4)]
    harness.submit(*requests)
    harness.until_idle()
    assert not harness.source.faults
    check_outputs(harness, *requests)


def test_openings_that_nobody_answers_add_up_to_nothing() -> None:
    """While the daemon is silent, what is to be removed does not grow with every attempt."""
    harness = Harness(max_batch=4, patience_s=1e9)
    harness.submit(*(make_request(f"r{at}") for at in range(8)))
    lose(harness, *[True] * 200)
    while harness.source.faults:
        harness.iterate()
        assert len(harness.loop.scheduler._released) + len(harness.loop.scheduler._unsure) <= 4
    harness.until_idle()
    harness.check_empty()


comes = st.tuples(prompts, st.integers(1, 14), st.sampled_from([1, 1, 2, 4]), st.sampled_from([0, 0, -1, 3]))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workload=st.lists(st.one_of(comes, comes, st.integers(0, 20), st.booleans(), st.booleans()), min_size=8),
    pages=st.integers(5, 16),
    max_batch=st.integers(1, 5),
    max_step_tokens=st.sampled_from([1, 2, 5, 24]),
    late=st.booleans(),
)
def test_whichever_replies_are_lost_everything_runs(
    made: Made, workload: list[Any], pages: int, max_batch: int, max_step_tokens: int, late: bool
) -> None:
    harness = made(pages=pages, max_batch=max_batch, max_step_tokens=max_step_tokens, late=late)
    asked: dict[Key, Request] = {}
    names = (f"r{at}" for at in itertools.count())
    for operation in workload:
        match operation:
            case (prompt, max_tokens, n, priority):
                request = make_request(next(names), prompt, max_tokens=max_tokens, n=n, priority=priority)
                asked |= {key_of(one.request_id, one.sample): one for one in (request, *request.others)}
                harness.submit(request)
            case bool(served):
                lose(harness, served)
            case int(nth):
                harness.loop.cancel(f"r{nth}")
                harness.iterate(nth % 5)
    harness.until_idle()
    for key, outcome in harness.ended.items():
        expected, got = alone(asked[key]), harness.tokens[key]
        if outcome.reason is FinishReason.CANCELLED:
            assert got == expected[: len(got)]
        elif not isinstance(outcome.error, ExceedsPool):
            assert outcome.error is None and got == expected
    assert {key for key in asked if asked[key].sample == 0} <= set(harness.ended)
    harness.source.close()
