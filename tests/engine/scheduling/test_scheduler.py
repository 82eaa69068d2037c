"""The scheduler's decisions, one by one. That all of them together change no output is test_workload's."""

from __future__ import annotations

import dataclasses

import pytest

from services.common.errors import (
    CapacityExceeded,
    ExceedsPool,
    FieldInvalid,
    Internal,
    KvCacheDown,
    QueueFull,
    RequestExists,
    SequenceRemoved,
    SequenceUnknown,
)
from services.engine.pages.source import Demand, Grant, Retention, ReuseHint
from services.engine.scheduling.queue.admission import ADMISSION_RETRY_S, Limits
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import FinishReason, Outcome, State
from tests.engine.fakes import Clock, Harness, make_request


def started(*, pages: int = 100, page_size: int = 4, **limits: int) -> tuple[Scheduler, Clock]:
    clock = Clock()
    chosen = Limits(**{"max_batch": 8, "max_step_tokens": 64, "max_queue": 10, **limits})
    return Scheduler(chosen, page_size, pages, clock), clock


def serve(scheduler: Scheduler, first_page: int = 0) -> list[Demand]:
    """Answer the next exchange with fresh pages counted from ``first_page`` on; what was demanded."""
    demands, _ = scheduler.demands()
    grants, page = [], first_page
    for demand in demands:
        count = max(0, demand.total_pages - demand.known_pages)
        grants.append(Grant(demand.sequence_id, demand.known_pages, tuple(range(page, page + count))))
        page += count
    scheduler.granted(grants)
    return demands


def step(scheduler: Scheduler, token: int = 0) -> list[tuple[str, int, int]]:
    """Run a step that samples ``token`` everywhere; what ran, as (id, start, count)."""
    chunks = scheduler.schedule()
    scheduler.apply(chunks, [token if chunk.samples else None for chunk in chunks])
    return [(chunk.sequence.id, chunk.start, chunk.count) for chunk in chunks]


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_long_prompt_runs_in_chunks_and_samples_after_the_last() -> None:
    scheduler, _ = started(max_step_tokens=4)
    sequence = scheduler.submit(make_request("a", [1] * 10))
    serve(scheduler)
    assert [step(scheduler) for _ in range(4)] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]]
    assert sequence.num_generated_tokens == 2


def test_a_long_prefill_leaves_those_behind_it_their_token() -> None:
    scheduler, _ = started(max_step_tokens=4)
    scheduler.submit(make_request("long", [1] * 20))
    scheduler.submit(make_request("b", [1]))
    scheduler.submit(make_request("c", [1]))
    serve(scheduler)
    for _ in range(3):
        assert [(name, count) for name, _, count in step(scheduler)] == [("long", 2), ("b", 1), ("c", 1)]


def test_with_a_budget_of_one_the_oldest_goes_on() -> None:
    scheduler, _ = started(max_step_tokens=1)
    scheduler.submit(make_request("old", [1, 1, 1]))
    scheduler.submit(make_request("young", [1]))
    serve(scheduler)
    assert [step(scheduler) for _ in range(3)] == [[("old", at, 1)] for at in range(3)]


def test_a_hit_is_not_computed() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a", [1] * 10))
    [demand] = scheduler.demands()[0]
    scheduler.granted([Grant(demand.sequence_id, 0, (5, 6, 7), cached_tokens=8)])
    assert step(scheduler) == [("a", 8, 2)]
    assert sequence.cached_tokens == scheduler.cached_tokens == 8


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_pages_are_asked_one_step_ahead_so_that_decoding_never_waits() -> None:
    harness = Harness(page_size=4)
    harness.submit(make_request("a", [1, 2, 3], max_tokens=40))
    harness.until_idle()
    # Every step after the first decodes a token: none was without a page to write to.
    assert harness.loop.totals.steps == 40


@pytest.mark.parametrize("late", [False, True])
def test_most_decode_steps_need_no_exchange(late: bool) -> None:
    harness = Harness(page_size=16, late=late)
    harness.submit(make_request("a", [1, 2, 3], max_tokens=160))
    harness.until_idle()
    # The opening, one exchange for each page behind the first, the last report, the removal.
    assert harness.loop.totals.page_calls <= 1 + 10 + 2


def test_there_is_at_most_one_exchange_a_round_for_the_whole_batch() -> None:
    harness = Harness(page_size=4, max_batch=8)
    harness.submit(*(make_request(f"r{at}", [at] * 9, max_tokens=20) for at in range(8)))
    rounds = 0
    while harness.loop.scheduler.live or not rounds:
        before = len(harness.source.exchanges)
        harness.iterate()
        rounds += 1
        assert len(harness.source.exchanges) - before <= 1
    assert max(len(demands) for demands, _ in harness.source.exchanges) == 8


def test_nothing_is_asked_for_beyond_what_a_request_can_need() -> None:
    harness = Harness(page_size=4)
    harness.submit(make_request("a", [1, 2, 3], max_tokens=2))  # 4 resident tokens at most
    harness.until_idle()
    assert {demand.total_pages for demands, _ in harness.source.exchanges for demand in demands} <= {0, 1}


def test_an_opening_asks_for_its_whole_prompt_and_comes_behind_those_that_run() -> None:
    scheduler, _ = started()
    scheduler.submit(make_request("a", [1] * 4, max_tokens=9))
    serve(scheduler)
    step(scheduler)
    step(scheduler)
    scheduler.submit(make_request("b", [2] * 9, max_tokens=9))
    demands = serve(scheduler, first_page=50)
    assert [(demand.sequence_id, demand.opening is not None) for demand in demands] == [("1:a", False), ("2:b", True)]
    assert demands[1].total_pages == 3
    assert list(demands[0].tokens) == [1, 1, 1, 1, 0]


def test_a_long_prompt_reports_as_it_goes() -> None:
    scheduler, _ = started(max_step_tokens=8)
    scheduler.submit(make_request("a", [1] * 40))
    serve(scheduler)
    reported = []
    for _ in range(5):
        reported += [len(demand.tokens) for demand in serve(scheduler)]
        step(scheduler)
    assert reported == [16, 16]


def test_only_computed_tokens_are_reported_and_each_once() -> None:
    harness = Harness(page_size=4)
    harness.submit(make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=9))
    harness.until_idle()
    at = 0
    for demands, _ in harness.source.exchanges:
        for demand in demands:
            assert demand.start == at
            at += len(demand.tokens)
    assert at == 6 + 9 - 1  # the last token's K and V were never computed


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_complete_pages_are_reported_before_a_sequence_is_removed() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a", [1] * 8, max_tokens=1))
    serve(scheduler)
    step(scheduler)
    assert sequence.state is State.FINISHED
    demands, removed = scheduler.demands()
    assert [len(demand.tokens) for demand in demands] == [8] and not removed
    scheduler.granted([Grant(sequence.source_id)])
    assert not scheduler.take_settled()
    assert scheduler.demands() == ([], [sequence.source_id])
    scheduler.granted([])
    assert scheduler.take_settled() == [sequence]
    assert not scheduler.live


def test_without_a_complete_page_to_report_it_is_removed_at_once() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a", [1] * 3, max_tokens=1))
    serve(scheduler)
    step(scheduler)
    assert scheduler.demands() == ([], [sequence.source_id])


def test_what_failed_publishes_nothing() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a", [1] * 8, max_tokens=4))
    serve(scheduler)
    step(scheduler)
    scheduler.finish(sequence, Outcome(error=Internal("broken")))
    assert scheduler.demands() == ([], [sequence.source_id])


def test_a_report_that_is_refused_is_given_up() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a", [1] * 8, max_tokens=1))
    serve(scheduler)
    step(scheduler)
    scheduler.demands()
    scheduler.granted([Grant(sequence.source_id, error=SequenceUnknown("gone"))])
    assert scheduler.demands() == ([], [sequence.source_id])


def test_a_sequence_that_the_source_ended_is_removed_there_and_begins_anew() -> None:
    """The source keeps the pages until it hears that no step writes them."""
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a"))
    serve(scheduler)
    name = sequence.source_id
    while not scheduler.demands()[0]:
        step(scheduler)
    scheduler.granted([Grant(name, error=SequenceRemoved("expired"))])
    [again], removed = scheduler.demands()
    assert removed == [name] and again.opens and again.sequence_id != name


def test_ending_twice_changes_nothing() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a"))
    scheduler.finish(sequence, Outcome(FinishReason.CANCELLED))
    scheduler.finish(sequence, Outcome(error=Internal("late")))
    assert scheduler.take_settled() == [sequence]
    assert sequence.outcome == Outcome(FinishReason.CANCELLED)


def test_a_request_that_was_never_sent_ends_without_an_exchange() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a"))
    scheduler.finish(sequence, Outcome(FinishReason.CANCELLED))
    assert scheduler.take_settled() == [sequence]
    assert scheduler.demands() == ([], [])


def test_an_opening_nobody_answered_may_have_been_served_and_is_removed() -> None:
    harness = Harness()
    harness.source.faults = [(KvCacheDown("reply lost"), True)]
    harness.submit(make_request("a"))
    harness.iterate()
    assert harness.local.live_sequences == 1
    harness.loop.cancel("a")
    harness.until_idle()
    harness.check_empty()


def test_an_opening_nobody_answered_is_sent_again_under_its_id() -> None:
    harness = Harness()
    harness.source.faults = [(KvCacheDown("reply lost"), True)]
    harness.submit(make_request("a", max_tokens=1))
    harness.until_idle()
    first, second = (demands[0] for demands, _ in harness.source.exchanges[:2])
    assert first == second
    harness.check_empty()


def test_a_source_id_is_never_used_twice() -> None:
    harness = Harness(pages=6, page_size=2, max_batch=3)
    for again in range(3):
        harness.submit(*(make_request(f"{again} {at}", [at], max_tokens=10) for at in range(3)))
        harness.until_idle()
    assert harness.loop.scheduler.preemptions
    removed = [name for _, names in harness.source.exchanges for name in names]
    assert len(removed) == len(set(removed)) >= 9
    assert all(len(name) <= 128 for name in removed)


def test_a_long_request_id_still_makes_a_source_id_of_its_own() -> None:
    scheduler, _ = started()
    for at in range(2):
        scheduler.submit(make_request("x" * 127 + str(at)))
    names = [demand.sequence_id for demand in scheduler.demands()[0]]
    assert len(set(names)) == 2 and all(len(name) <= 128 for name in names)


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_beyond_what_can_run() -> None:
    scheduler, _ = started(max_batch=2, max_queue=3)
    for at in range(5):
        scheduler.submit(make_request(f"r{at}"))
    with pytest.raises(QueueFull) as caught:
        scheduler.submit(make_request("r5"))
    assert caught.value.retry_after_s
    full = "the queue is full: 3 requests are waiting, and at most 3 can"
    assert caught.value.message == full, "the two that run from the next step on do not count"
    serve(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 3)
    with pytest.raises(QueueFull) as caught:
        scheduler.submit(make_request("r5"))
    assert caught.value.message == full


def test_a_request_of_several_samples_is_not_counted_among_those_that_wait() -> None:
    scheduler, _ = started(max_batch=2, max_queue=3)
    for at in range(4):
        scheduler.submit(make_request(f"r{at}"))
    with pytest.raises(QueueFull) as caught:
        scheduler.submit(make_request("family", n=2))
    assert caught.value.message == "the queue has no room for 2 samples: 2 requests are waiting, and at most 3 can"
    with pytest.raises(FieldInvalid, match=r"^n is 6; at most 5 requests can run or wait$"):
        scheduler.submit(make_request("family", n=6))


def test_the_queue_is_bounded_in_tokens_too() -> None:
    scheduler, _ = started(max_batch=1, max_queue_tokens=10)
    scheduler.submit(make_request("runs", [1] * 30))  # takes the free place, whatever its length
    serve(scheduler)
    scheduler.submit(make_request("long", [1] * 30))  # and so does the first in an empty queue
    with pytest.raises(QueueFull) as caught:
        scheduler.submit(make_request("late", [1]))
    error = caught.value
    assert "30 tokens" in error.message and "10 tokens" in error.message
    assert error.metadata == {"limit_tokens": "10", "queued_tokens": "30", "tokens": "1"}
    scheduler.finish(scheduler.live["long"], Outcome(FinishReason.CANCELLED))
    for name in ("a", "b"):
        scheduler.submit(make_request(name, [1] * 5))
    assert scheduler.waiting.tokens == 10
    with pytest.raises(QueueFull):
        scheduler.submit(make_request("c", [1]))
    scheduler.finish(scheduler.live["runs"], Outcome(FinishReason.CANCELLED))
    scheduler.submit(make_request("c", [1] * 5))  # "a" waits only for the next step
    assert len(scheduler.waiting) == 3


def test_a_refusal_tells_when_a_place_will_be_free() -> None:
    scheduler, clock = started(max_batch=1, max_queue=10, max_queue_tokens=40)
    for at in range(11):
        scheduler.submit(make_request(f"r{at}", [1] * 4))
    for at in range(4):
        serve(scheduler)
        clock.now += 2
        scheduler.finish(scheduler.live[f"r{at}"], Outcome(FinishReason.CANCELLED))
    for at in range(11, 15):
        scheduler.submit(make_request(f"r{at}", [1] * 4))
    serve(scheduler)
    with pytest.raises(QueueFull) as caught:
        scheduler.submit(make_request("late", [1] * 12))
    assert caught.value.retry_after_s == pytest.approx(2.0)  # a place, by their number
    scheduler.finish(scheduler.live["r14"], Outcome(FinishReason.CANCELLED))
    with pytest.raises(QueueFull) as caught:
        scheduler.submit(make_request("late", [1] * 12))
    assert caught.value.metadata["queued_tokens"] == "36"
    assert caught.value.retry_after_s == pytest.approx(2 * 8 / 5)  # 8 tokens too many, 4 to a request, 5 ended in 8 s


def test_an_id_is_live_once() -> None:
    scheduler, _ = started()
    scheduler.submit(make_request("a"))
    with pytest.raises(RequestExists):
        scheduler.submit(make_request("a"))
    assert len(scheduler.waiting) == 1


def test_what_could_never_fit_is_refused_and_what_just_fits_is_not() -> None:
    # The last token's K and V are never needed: 5 + 4 - 1 tokens in 2 pages of 4.
    scheduler, _ = started(pages=2)
    scheduler.submit(make_request("fits", [1] * 5, max_tokens=4))
    with pytest.raises(ExceedsPool):
        scheduler.submit(make_request("does not", [1] * 5, max_tokens=5))
    assert list(scheduler.live) == ["fits"]


def test_first_come_first_served() -> None:
    harness = Harness(max_batch=1)
    harness.submit(*(make_request(f"r{at}", max_tokens=2) for at in range(5)))
    harness.until_idle()
    assert list(harness.ended) == [f"r{at}" for at in range(5)]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    harness = Harness(pages=8, page_size=4)
    harness.submit(make_request("first", [1] * 20, max_tokens=5))
    harness.iterate(2)
    harness.submit(make_request("large", [2] * 20, max_tokens=4), make_request("small", [3], max_tokens=1))
    harness.until_idle()
    assert list(harness.ended) == ["first", "small", "large"] or list(harness.ended) == ["first", "large", "small"]
    arrival = {sequence.id: sequence for sequence in (e.sequence for e in harness.events if e.sequence)}
    assert arrival["large"].admitted_at <= arrival["small"].admitted_at  # type: ignore[operator]


# --- running out of pages ---------------------------------------------------------------------------------------------


def test_the_youngest_makes_room_and_the_oldest_never_does() -> None:
    harness = Harness(pages=6, page_size=2, max_batch=3)
    # The estimate admits all three; together they need more than there is.
    harness.submit(*(make_request(f"r{at}", [at], max_tokens=10) for at in range(3)))
    harness.until_idle()
    by_id = {event.request_id: event.sequence for event in harness.events if event.sequence}
    assert by_id["r0"].preemptions == 0 and any(s.preemptions for s in by_id.values() if s)
    assert list(harness.ended) == ["r0", "r1", "r2"]


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    harness = Harness(pages=8, page_size=2, max_batch=2)
    harness.submit(make_request("a", [0] * 4, max_tokens=7), make_request("b", [1] * 5, max_tokens=7))
    harness.until_idle()
    assert harness.loop.scheduler.preemptions
    openings = [d for demands, _ in harness.source.exchanges for d in demands if d.opening and ":b" in d.sequence_id]
    assert len(openings) > 1
    recomputed = [c for step in harness.memory.steps for c in step if c.sequence.id == "b" and c.count > 1]
    assert recomputed[-1].start > 0


def test_pages_on_their_way_back_are_waited_for_before_anybody_is_preempted() -> None:
    scheduler, _ = started(pages=9)
    old = scheduler.submit(make_request("old", [1] * 7, max_tokens=9))
    done = scheduler.submit(make_request("done", [2] * 4, max_tokens=1))
    young = scheduler.submit(make_request("young", [3] * 2, max_tokens=2))
    serve(scheduler)
    step(scheduler)
    assert done.state is State.FINISHED

    def refuse_growth() -> None:
        demands, _ = scheduler.demands()
        assert any(demand.sequence_id == old.source_id for demand in demands)
        refusal = CapacityExceeded("full")
        scheduler.granted(
            [Grant(d.sequence_id, error=refusal if d.sequence_id == old.source_id else None) for d in demands]
        )

    refuse_growth()
    assert scheduler.preemptions == 0 and scheduler.running == [old, young]
    refuse_growth()  # the last page of `done` went back, and that was not enough
    assert scheduler.preemptions == 1 and list(scheduler.waiting) == [young]


def test_alone_and_short_it_steps_back_and_waits_a_while() -> None:
    scheduler, clock = started(pages=4)
    sequence = scheduler.submit(make_request("a", [1] * 7, max_tokens=9))
    serve(scheduler)
    step(scheduler)
    demands, _ = scheduler.demands()
    scheduler.granted([Grant(demands[0].sequence_id, error=CapacityExceeded("others hold them"))])
    assert sequence.state is State.WAITING and sequence.preemptions == 1
    assert scheduler.demands() == ([], [demands[0].sequence_id])
    scheduler.granted([])
    assert scheduler.demands() == ([], [])
    assert scheduler.admits_at == clock.now + ADMISSION_RETRY_S
    clock.now += ADMISSION_RETRY_S
    [again], _ = scheduler.demands()
    assert again.sequence_id != demands[0].sequence_id
    assert list(again.opening.prompt) == [*[1] * 7, 0]  # type: ignore[union-attr]


def test_whoever_opens_a_sequence_again_asks_for_the_same_retention_and_says_the_same() -> None:
    scheduler, clock = started(pages=4)
    asked, hint = Retention(60.0, 7), ReuseHint("agent", 2, True)
    scheduler.submit(dataclasses.replace(make_request("a", [1] * 7, max_tokens=9), retention=asked, reuse_hint=hint))
    openings = [demand.opening for demand in serve(scheduler)]
    step(scheduler)
    [more], _ = scheduler.demands()
    scheduler.granted([Grant(more.sequence_id, error=CapacityExceeded("others hold them"))])
    serve(scheduler)
    clock.now += ADMISSION_RETRY_S
    openings += [demand.opening for demand in serve(scheduler)]
    step(scheduler)
    scheduler.lost_pages()
    openings += [demand.opening for demand in serve(scheduler)]
    assert all(opening is not None and opening.reuse_hint == hint for opening in openings)
    assert [opening and (len(opening.prompt), opening.retention) for opening in openings] == [
        (7, asked), (8, asked), (9, asked)
    ]  # fmt: skip


def test_after_a_refused_opening_the_head_of_the_queue_is_tried_alone() -> None:
    scheduler, clock = started(pages=8)
    for name in ("large", "small"):
        scheduler.submit(make_request(name, [1] * (20 if name == "large" else 2)))
    demands, _ = scheduler.demands()
    assert len(demands) == 2
    scheduler.granted([Grant(d.sequence_id, error=CapacityExceeded("full")) for d in demands])
    assert scheduler.demands() == ([], [])
    clock.now += ADMISSION_RETRY_S
    assert [d.sequence_id for d in scheduler.demands()[0]] == [demands[0].sequence_id]


def test_admission_leaves_a_page_for_each_that_may_grow() -> None:
    scheduler, _ = started(pages=4)
    old = scheduler.submit(make_request("a", [1] * 4, max_tokens=9))
    serve(scheduler)
    step(scheduler)  # two pages, and one more before long
    scheduler.submit(make_request("b", [2] * 6, max_tokens=1))
    assert scheduler.demands() == ([], [])
    scheduler.finish(old, Outcome(error=Internal("gone")))
    assert [(d.opening is not None, d.total_pages) for d in serve(scheduler)] == [(True, 2)]


def test_once_an_opening_is_granted_the_queue_moves_as_before() -> None:
    scheduler, clock = started(pages=50)
    for at in range(4):
        scheduler.submit(make_request(f"r{at}"))
    demands, _ = scheduler.demands()
    scheduler.granted([Grant(d.sequence_id, error=CapacityExceeded("full")) for d in demands])
    clock.now += ADMISSION_RETRY_S
    assert [len(serve(scheduler, first_page=10 * at)) for at in range(3)] == [1, 3, 0]


def test_pages_that_go_back_in_an_exchange_are_there_for_its_openings() -> None:
    scheduler, _ = started(pages=3)
    scheduler.submit(make_request("stays", [1] * 3, max_tokens=2))  # one page, for good
    going = scheduler.submit(make_request("goes", [2] * 5, max_tokens=1))
    serve(scheduler)
    assert scheduler.held_pages == 3
    scheduler.submit(make_request("comes", [3] * 5, max_tokens=1))
    assert scheduler.demands() == ([], [])
    scheduler.finish(going, Outcome(error=Internal("gone")))
    demands, removed = scheduler.demands()
    assert [demand.opening is not None for demand in demands] == [True] and removed == [going.source_id]
    assert scheduler.held_pages == 3  # until the source says so


def test_while_the_gate_is_closed_free_places_in_the_batch_are_none() -> None:
    scheduler, clock = started(pages=50, max_batch=4, max_queue=2)
    scheduler.submit(make_request("a"))
    [demand], _ = scheduler.demands()
    scheduler.granted([Grant(demand.sequence_id, error=CapacityExceeded("others hold them"))])
    scheduler.submit(make_request("b"))
    with pytest.raises(QueueFull):
        scheduler.submit(make_request("c"))
    clock.now += ADMISSION_RETRY_S
    scheduler.submit(make_request("c"))


def test_very_long_prompts_are_opened_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.scheduling.queue.admission.OPENING_TOKENS", 50)
    scheduler, _ = started(pages=500)
    for at in range(5):
        scheduler.submit(make_request(f"r{at}", [1] * (60 if at < 2 else 20)))
    assert [len(serve(scheduler, first_page=100 * at)) for at in range(4)] == [1, 1, 2, 1]


@pytest.mark.parametrize(("salt", "reported"), [("other", 20), ("", 4)])
def test_only_pages_that_surely_will_be_shared_count_as_such(salt: str, reported: int) -> None:
    scheduler, _ = started(pages=8)
    first = scheduler.submit(make_request("a", [1] * 20, max_tokens=8))
    serve(scheduler)
    step(scheduler)
    first.num_reported_tokens = reported
    scheduler.submit(make_request("b", [*[1] * 20, 2], max_tokens=3, salt=salt))
    assert all(demand.opening is None for demand in scheduler.demands()[0])


def test_a_prompt_that_shares_running_pages_needs_fewer() -> None:
    harness = Harness(pages=8, page_size=4)
    harness.submit(make_request("a", [1] * 20, max_tokens=8))
    harness.iterate(3)
    harness.submit(make_request("b", [*[1] * 20, 2], max_tokens=3))
    harness.iterate(3)
    assert len(harness.loop.scheduler.running) == 2
    harness.until_idle()
    assert harness.loop.scheduler.preemptions == 0


# --- a source that misbehaves -----------------------------------------------------------------------------------------


def test_a_sequence_the_source_forgot_starts_over() -> None:
    harness = Harness(page_size=4)
    harness.submit(make_request("a", [1, 2, 3], max_tokens=12))
    harness.iterate(3)
    harness.local.exchange([], [harness.loop.scheduler.live["a"].source_id])
    harness.until_idle()
    assert harness.ended["a"].reason is FinishReason.LENGTH
    harness.check_empty()


def test_a_refusal_that_makes_no_sense_ends_the_request_as_internal() -> None:
    scheduler, _ = started()
    sequence = scheduler.submit(make_request("a"))
    [demand], _ = scheduler.demands()
    scheduler.granted([Grant(demand.sequence_id, error=FieldInvalid("what is this"))])
    assert sequence.outcome is not None and isinstance(sequence.outcome.error, Internal)


def test_a_pool_that_came_back_smaller_ends_what_no_longer_fits() -> None:
    scheduler, _ = started(pages=10)
    large = scheduler.submit(make_request("large", [1] * 20, max_tokens=1))
    small = scheduler.submit(make_request("small", [1], max_tokens=1))
    serve(scheduler)
    scheduler.lost_pages()
    assert [s.state for s in (large, small)] == [State.WAITING] * 2
    scheduler.lost_pages(total_pages=2)
    assert scheduler.take_settled() == [large]
    assert isinstance(large.outcome.error, ExceedsPool)  # type: ignore[union-attr]
    assert list(scheduler.waiting) == [small]


# --- pages ahead of need ----------------------------------------------------------------------------------------------


def test_a_growing_request_asks_for_several_pages_where_they_are_plenty() -> None:
    harness = Harness(pages=1024, page_size=4, max_batch=4)
    harness.submit(make_request("a", [1] * 4, max_tokens=100))
    harness.until_idle()
    grown = [demand.total_pages for demands, _ in harness.source.exchanges for demand in demands if demand.total_pages]
    assert grown == [2, 10, 18, 26]  # the opening; then 8 at a time, and never more than it can ever need
    harness.check_empty()


def test_where_pages_are_few_it_asks_for_what_it_needs() -> None:
    harness = Harness(pages=40, page_size=4, max_batch=4)
    harness.submit(make_request("a", [1] * 4, max_tokens=20))
    harness.until_idle()
    grown = [demand.total_pages for demands, _ in harness.source.exchanges for demand in demands if demand.total_pages]
    assert grown == [2, 3, 4, 5, 6]


def test_a_refusal_of_pages_ahead_of_need_preempts_nobody() -> None:
    scheduler, clock = started(pages=1024, max_batch=2)
    requests = [scheduler.submit(make_request(name, [1] * 7, max_tokens=90)) for name in ("a", "b")]
    serve(scheduler)
    step(scheduler)
    demands, _ = scheduler.demands()
    assert [(demand.known_pages, demand.total_pages) for demand in demands] == [(2, 10)] * 2
    scheduler.granted([Grant(demand.sequence_id, error=CapacityExceeded("full")) for demand in demands])
    assert scheduler.running == requests and not scheduler.preemptions
    assert [demand.total_pages for demand in serve(scheduler, first_page=4)] == [3, 3], "now what it needs"
    clock.now += ADMISSION_RETRY_S
    for _ in range(4):
        step(scheduler)
    assert [demand.total_pages for demand in serve(scheduler, first_page=6)] == [11, 11], "and ahead again, later"


def test_a_refusal_of_what_is_needed_preempts_the_last() -> None:
    scheduler, _ = started(pages=1024, max_batch=2)
    first, last = (scheduler.submit(make_request(name, [1] * 7, max_tokens=90)) for name in ("a", "b"))
    serve(scheduler)
    step(scheduler)
    for _ in range(2):
        demands, _ = scheduler.demands()
        scheduler.granted([Grant(demand.sequence_id, error=CapacityExceeded("full")) for demand in demands])
    assert scheduler.running == [first] and list(scheduler.waiting) == [last] and scheduler.preemptions == 1
