"""Several samples of one prompt: computed once, then each on its own, and each what it would be alone."""

from __future__ import annotations

import dataclasses

import pytest

from services.common.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Draining,
    FieldInvalid,
    ForwardFailed,
    KvCacheDown,
    QueueFull,
    RequestExists,
    SessionExpired,
)
from services.engine.pages.source import Demand, Grant
from services.engine.scheduling.sequence import FinishReason, Request, key_of
from tests.engine.fakes import Harness, alone, make_request

PROMPT = [0, 1, 2, 3, 4, 0, 1]


def each(request: Request) -> list[Request]:
    """The requests that the samples are."""
    return [dataclasses.replace(one, sample=0, others=()) for one in (request, *request.others)]


def check_done(harness: Harness, request: Request) -> None:
    for sample, single in enumerate(each(request)):
        name = key_of(request.request_id, sample)
        assert harness.ended[name].error is None, harness.ended[name]
        assert harness.tokens[name] == alone(single), name
    harness.check_empty()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [3, 4, 7, 8, 9])
def test_the_prompt_is_computed_once_and_each_sample_is_what_it_is_alone(length: int, late: bool) -> None:
    harness = Harness(late=late)
    request = make_request("a", (PROMPT * 2)[:length], max_tokens=9, n=4)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == length + 4 * 8
    # Each writes in a page of its own, and the one they all copied is nobody's any more.
    assert len(harness.memory.copies) == (4 if length % 4 else 0)
    assert len({copy.source for copy in harness.memory.copies}) == (length % 4 > 0)
    forked = [demand for demands, _ in harness.source.exchanges for demand in demands if demand.parent]
    assert len(forked) == 3


def test_a_long_prompt_in_chunks_is_computed_once() -> None:
    harness = Harness(max_step_tokens=5)
    request = make_request("a", PROMPT * 5, max_tokens=3, n=3)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == len(PROMPT * 5) + 3 * 2


def test_usage_is_each_samples_own_and_tells_that_the_prompt_was_shared() -> None:
    harness = Harness()
    harness.submit(make_request("a", PROMPT, max_tokens=3, n=3))
    harness.until_idle()
    ends = [event for event in harness.events if event.outcome is not None]
    usages = {event.sample: event.sequence.usage for event in ends if event.sequence is not None}
    assert [usages[at].cached_tokens for at in range(3)] == [0, 7, 7]
    assert all(usage.prompt_tokens == 7 and usage.completion_tokens == 3 for usage in usages.values())
    assert harness.loop.totals.prompt_tokens - harness.loop.scheduler.cached_tokens == 7


def test_one_token_each_needs_no_fork() -> None:
    harness = Harness()
    request = make_request("a", PROMPT, max_tokens=1, n=4)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == 7 and not harness.memory.copies


@pytest.mark.parametrize("length", [3, 7])
@pytest.mark.parametrize("seed", range(12))
def test_a_first_sample_that_ends_at_once_is_still_forked(seed: int, length: int) -> None:
    harness = Harness()
    request = make_request("a", PROMPT[:length], max_tokens=6, n=3, seed=seed, eos=True)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == length + sum(len(alone(single)) - 1 for single in each(request))


def test_samples_that_the_batch_has_no_room_for_come_later() -> None:
    harness = Harness(max_batch=2)
    request = make_request("a", PROMPT, max_tokens=9, n=5)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert max(len(step) for step in harness.memory.steps) == 2


@pytest.mark.parametrize("pages", [5, 6, 7, 8])
def test_samples_that_the_pool_has_no_room_for_change_no_output(pages: int) -> None:
    harness = Harness(pages=pages)
    request = make_request("a", PROMPT, max_tokens=12, n=4)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)


@pytest.mark.parametrize(("pages", "forked"), [(3, False), (4, True)])
def test_nobody_forks_where_the_first_sample_would_have_no_page_of_its_own(pages: int, forked: bool) -> None:
    harness = Harness(pages=pages)
    request = make_request("a", PROMPT[:6], max_tokens=2, n=2)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert any(demand.parent for demands, _ in harness.source.exchanges for demand in demands) == forked
    assert harness.loop.scheduler.preemptions == 0


def test_a_preempted_sample_goes_on_alone() -> None:
    harness = Harness(pages=16)
    request = make_request("a", PROMPT, max_tokens=20, n=4)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.loop.scheduler.preemptions > 0


@pytest.mark.parametrize("rounds", range(1, 8))
def test_a_lost_session_changes_no_output(rounds: int) -> None:
    harness = Harness()
    request = make_request("a", PROMPT, max_tokens=9, n=4)
    harness.submit(request)
    harness.iterate(rounds)
    harness.source.faults.append((SessionExpired("expired"), True))
    harness.until_idle()
    while harness.loop._lost:
        harness.iterate()
    check_done(harness, request)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("nth", range(6))
def test_a_lost_reply_changes_no_output(nth: int, served: bool) -> None:
    harness = Harness()
    harness.source.faults += [None] * nth + [(KvCacheDown("down"), served)] * 2
    request = make_request("a", PROMPT, max_tokens=9, n=4)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == 7 + 4 * 8


@pytest.mark.parametrize("rounds", range(7))
def test_cancelling_ends_every_sample(rounds: int) -> None:
    harness = Harness()
    harness.submit(make_request("a", PROMPT, max_tokens=50, n=4))
    harness.iterate(rounds)
    harness.loop.cancel("a")
    harness.until_idle()
    assert [harness.reason(key_of("a", at)) for at in range(4)] == [FinishReason.CANCELLED] * 4
    harness.check_empty()


@pytest.mark.parametrize("rounds", range(5))
def test_a_deadline_ends_every_sample(rounds: int) -> None:
    harness = Harness()
    harness.submit(make_request("a", PROMPT, max_tokens=50, n=3, deadline=harness.clock.now + 5))
    harness.iterate(rounds)
    harness.clock.now += 10
    harness.until_idle()
    assert all(isinstance(harness.ended[key_of("a", at)].error, DeadlineExceeded) for at in range(3))
    harness.check_empty()


@pytest.mark.parametrize("sample", range(3))
@pytest.mark.parametrize("generated", [0, 1, 3])
def test_samples_fail_together(sample: int, generated: int) -> None:
    harness = Harness()
    harness.memory.fault = lambda chunk: (
        ForwardFailed("at fault")
        if chunk.sequence.request.sample in (0, sample) and chunk.sequence.num_generated_tokens == generated
        else None
    )
    harness.submit(make_request("a", PROMPT, max_tokens=9, n=3), make_request("b", PROMPT, max_tokens=1))
    harness.until_idle()
    assert all(isinstance(harness.ended[key_of("a", at)].error, ForwardFailed) for at in range(3))
    harness.check_empty()


def test_the_queue_counts_every_sample() -> None:
    harness = Harness(max_batch=2, max_queue=3)
    harness.submit(make_request("a", PROMPT, max_tokens=30, n=4))
    harness.iterate(1)
    harness.submit(make_request("b", PROMPT, n=3))
    harness.iterate(1)
    assert isinstance(harness.ended["b"].error, QueueFull)
    assert key_of("b", 1) not in harness.ended, "a request that is refused has one end"
    harness.until_idle()
    harness.check_empty()


def test_more_samples_than_ever_find_a_place_are_not_told_to_come_again() -> None:
    harness = Harness(max_batch=2, max_queue=1)
    for name, n in (("three", 3), ("four", 4)):
        harness.submit(make_request(name, PROMPT, max_tokens=3, n=n))
        harness.until_idle()
    assert harness.ended["three"].error is None
    error = harness.ended["four"].error
    assert isinstance(error, FieldInvalid) and error.retry_after_s is None
    assert (error.field, error.metadata) == ("n", {"limit": "3"})
    harness.check_empty()


def test_draining_lets_samples_of_a_prompt_that_runs_end() -> None:
    harness = Harness(max_step_tokens=4)
    request = make_request("a", PROMPT, max_tokens=5, n=3)
    harness.submit(request)
    harness.iterate(2)
    harness.loop.drain(Draining("over"))
    harness.until_idle()
    check_done(harness, request)


def test_a_session_lost_while_the_prompt_runs_still_computes_it_for_all() -> None:
    harness = Harness(max_step_tokens=4)
    request = make_request("a", PROMPT * 3, max_tokens=3, n=3)
    harness.submit(request)
    harness.iterate(2)
    before = harness.memory.computed
    assert 0 < before < 21
    harness.source.lease = False
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == before + 21 + 3 * 2


@pytest.mark.parametrize("rounds", [1, 2])
def test_forks_of_what_the_source_gave_up_go_on_alone(rounds: int) -> None:
    harness = Harness()
    request = make_request("a", PROMPT, max_tokens=9, n=3)
    harness.submit(request)
    harness.iterate(rounds)
    harness.local.exchange([], [harness.loop.scheduler.live["a"].source_id])
    harness.until_idle()
    check_done(harness, request)


def test_a_first_sample_that_is_refused_a_page_of_its_own_writes_in_nobody_elses() -> None:
    harness = Harness()
    serve, refusals = harness.local._serve, [CapacityExceeded("another engine was faster")] * 2

    def short(demand: Demand) -> Grant:
        if "a" in harness.loop.scheduler.live and demand.total_pages and not demand.opening and not demand.parent:
            first = demand.sequence_id == harness.loop.scheduler.live["a"].source_id
            if first and refusals:
                return Grant(demand.sequence_id, error=refusals.pop())
        return serve(demand)

    harness.local._serve = short  # type: ignore[method-assign]
    request = make_request("a", PROMPT, max_tokens=9, n=3)
    later = [make_request(name, [3] * 5, max_tokens=20) for name in ("b", "c")]
    harness.submit(request, *later)
    harness.until_idle()
    check_done(harness, request)
    assert not refusals and harness.loop.scheduler.preemptions == 2


def test_samples_find_what_is_cached_of_the_prompt() -> None:
    harness = Harness()
    before = make_request("before", PROMPT, max_tokens=1)
    harness.submit(before)
    harness.until_idle()
    request = make_request("a", PROMPT, max_tokens=5, n=3)
    harness.submit(request)
    harness.until_idle()
    check_done(harness, request)
    assert harness.memory.computed == 7 + 3 + 3 * 4


def test_an_id_is_live_until_its_last_sample_has_ended() -> None:
    harness = Harness()
    harness.submit(make_request("a", PROMPT, max_tokens=5, n=3))
    harness.iterate(2)
    harness.submit(make_request("a", PROMPT, n=1))
    harness.iterate(1)
    assert isinstance(harness.ended["a"].error, RequestExists)
    harness.ended.clear()
    harness.until_idle()
    harness.check_empty()
    again = make_request("a", PROMPT, max_tokens=5, n=3)
    harness.tokens.clear()
    harness.ended.clear()
    harness.submit(again)
    harness.until_idle()
    check_done(harness, again)
