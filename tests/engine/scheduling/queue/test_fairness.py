# mypy: disable-error-code="assignment, override, return-value"
"""Who goes first, for how long one can be overtaken, and what a step leaves for whom."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CapacityExceeded, DeadlineExceeded, KvCacheDown, ServiceError, SessionExpired
from services.engine.pages.source import Demand, Exchange, Grant, Opening
from services.engine.sampling.result import Computed
from services.engine.scheduling.queue.admission import ADMISSION_RETRY_S, Limits
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import FinishReason, Key, Outcome, Sequence, State, key_of
from services.engine.scheduling.step import Chunk
from tests.engine.fakes import Clock, Harness, TokenMemory, alone, make_request
from tests.engine.lower_tier import Act

STEP_S = 2.0
#: Pages that nobody has.
FRESH = itertools.count()


def started(*, pages: int = 100, page_size: int = 4, step_s: float = STEP_S, **limits: int) -> tuple[Scheduler, Clock]:
    clock = Clock()
    chosen = {"max_batch": 8, "max_step_tokens": 64, "max_queue": 100, **limits}
    return Scheduler(Limits(**chosen, priority_step_s=step_s), page_size, pages, clock), clock


def answer(scheduler: Scheduler, *, refused: frozenset[str] = frozenset()) -> list[str]:
    """Serve the next exchange, but for the openings of those in ``refused``; whose openings it has."""
    demands, _ = scheduler.demands()
    grants, names = [], []
    for demand in demands:
        name = demand.sequence_id.partition(":")[2]
        names += [name] if demand.opening else []
        if demand.opening and name in refused:
            grants.append(Grant(demand.sequence_id, error=CapacityExceeded("others hold them")))
            continue
        count = max(0, demand.total_pages - demand.known_pages)
        grants.append(Grant(demand.sequence_id, demand.known_pages, tuple(islice(FRESH, count))))
    scheduler.granted(grants)
    return names


def step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step, in which each sample draws its own number; how many tokens each had of it."""
    chunks = scheduler.schedule()
    drawn = [Computed(drawn=tuple(range(1 + len(chunk.sequence.forks)))) for chunk in chunks]
    scheduler.apply(chunks, [draw if chunk.samples else None for chunk, draw in zip(chunks, drawn, strict=True)])
    return {chunk.sequence.id: chunk.count for chunk in chunks}


def names(sequences: object) -> list[str]:
    return [sequence.id for sequence in sequences]  # type: ignore[attr-defined]


# --- order ------------------------------------------------------------------------------------------------------------


def test_of_those_that_wait_the_highest_priority_goes_first_and_equals_as_they_came() -> None:
    scheduler, _ = started(max_batch=1)
    for name, priority in (("a", 0), ("b", -1), ("c", 3), ("d", 0), ("e", 3)):
        scheduler.submit(make_request(name, priority=priority))
    assert names(scheduler.waiting) == ["c", "e", "a", "d", "b"]
    assert answer(scheduler) == ["c"]


@pytest.mark.parametrize(("after_s", "first"), [(2 * STEP_S - 0.001, "late"), (2 * STEP_S, "early")])
def test_it_is_overtaken_for_as_long_as_the_priorities_differ_by_and_no_longer(after_s: float, first: str) -> None:
    scheduler, clock = started()
    scheduler.submit(make_request("early", priority=1))
    clock.now += after_s
    scheduler.submit(make_request("late", priority=3))
    assert names(scheduler.waiting)[0] == first


def test_a_step_of_0_ignores_priorities() -> None:
    scheduler, _ = started(step_s=0.0)
    for name, priority in (("a", -100), ("b", 100)):
        scheduler.submit(make_request(name, priority=priority))
    assert names(scheduler.waiting) == ["a", "b"]


def test_an_endless_stream_of_better_ones_starves_nobody() -> None:
    scheduler, clock = started(max_batch=1)
    low = scheduler.submit(make_request("low", priority=-3))
    came, served, count = {}, [], 0
    while low.state is State.WAITING:
        came[f"s{count}"] = clock.now
        scheduler.submit(make_request(f"s{count}", priority=2))
        served += answer(scheduler)
        clock.now += 0.75
        for sequence in list(scheduler.running):
            scheduler.finish(sequence, Outcome(FinishReason.LENGTH))
        count += 1
        assert count < 100
    overtakers = served[: served.index("low")]
    assert overtakers and all(came[name] < 1000.0 + 5 * STEP_S for name in overtakers)


def test_the_last_in_order_is_preempted_even_when_it_is_the_oldest() -> None:
    scheduler, _ = started(pages=9)
    low = scheduler.submit(make_request("low", [1] * 7, max_tokens=9, priority=-1))
    high = scheduler.submit(make_request("high", [2] * 7, max_tokens=9))
    answer(scheduler)
    assert scheduler.running == [high, low]
    step(scheduler)
    demands, _ = scheduler.demands()
    scheduler.granted([Grant(demand.sequence_id, error=CapacityExceeded("full")) for demand in demands])
    assert (scheduler.running, list(scheduler.waiting)) == ([high], [low])


def test_what_is_preempted_keeps_its_place() -> None:
    scheduler, clock = started(pages=9)
    for name in ("first", "second"):
        scheduler.submit(make_request(name, [1] * 7, max_tokens=9))
    answer(scheduler)
    step(scheduler)
    clock.now += 1
    scheduler.submit(make_request("late", [3] * 2))
    demands, _ = scheduler.demands()
    scheduler.granted([Grant(demand.sequence_id, error=CapacityExceeded("full")) for demand in demands])
    assert names(scheduler.waiting) == ["second", "late"]


def test_a_deadline_ends_what_is_overtaken() -> None:
    harness = Harness(max_batch=1)
    harness.submit(make_request("high", max_tokens=60, priority=9))
    harness.submit(make_request("low", deadline=harness.clock.now + 0.01))
    harness.until_idle()
    assert harness.reason("high") is FinishReason.LENGTH
    assert isinstance(harness.ended["low"].error, DeadlineExceeded)


# --- who was refused --------------------------------------------------------------------------------------------------


def test_a_refused_one_is_overtaken_by_those_it_was_tried_with_and_by_no_more() -> None:
    scheduler, clock = started(pages=500)
    refused = frozenset({"large"})
    scheduler.submit(make_request("large", [1] * 40))
    scheduler.submit(make_request("small", [2]))
    assert answer(scheduler, refused=refused) == ["large", "small"]
    assert names(scheduler.running) == ["small"]
    for at in range(5):  # a stream of small ones, and other engines' requests have what the large one needs
        scheduler.submit(make_request(f"late{at}", [3]))
        clock.now += ADMISSION_RETRY_S
        assert answer(scheduler, refused=refused) == ["large"]
    clock.now += ADMISSION_RETRY_S
    assert answer(scheduler) == ["large"]
    assert answer(scheduler) == [f"late{at}" for at in range(5)]


def test_who_may_come_before_an_overtaken_one_does_and_it_is_not_forgotten() -> None:
    scheduler, clock = started(pages=500)
    refused = frozenset({"large"})
    for name in ("large", "small"):
        scheduler.submit(make_request(name))
    answer(scheduler, refused=refused)
    for name, priority in (("late", 0), ("high", 1)):
        scheduler.submit(make_request(name, priority=priority))
    clock.now += ADMISSION_RETRY_S
    assert answer(scheduler) == ["high"]
    for _ in range(3):
        assert answer(scheduler, refused=refused) == ["large"]
        clock.now += ADMISSION_RETRY_S
    assert answer(scheduler) == ["large"]
    assert answer(scheduler) == ["late"]


def test_those_that_were_refused_and_not_overtaken_are_tried_together() -> None:
    scheduler, clock = started(pages=500)
    for at in range(4):
        scheduler.submit(make_request(f"r{at}"))
    answer(scheduler, refused=frozenset({"r0", "r1", "r2", "r3"}))
    clock.now += ADMISSION_RETRY_S
    assert [answer(scheduler) for _ in range(3)] == [["r0"], ["r1", "r2", "r3"], []]


def test_a_refused_one_that_ends_holds_nobody_up() -> None:
    scheduler, clock = started(pages=500)
    large = scheduler.submit(make_request("large"))
    scheduler.submit(make_request("small"))
    answer(scheduler, refused=frozenset({"large"}))
    for name in ("a", "b"):
        scheduler.submit(make_request(name))
    scheduler.finish(large, Outcome(FinishReason.CANCELLED))
    assert not scheduler._admission._overtaken
    clock.now += ADMISSION_RETRY_S
    assert answer(scheduler) == ["a"]
    assert answer(scheduler) == ["b"]


def test_samples_of_a_prompt_that_runs_do_not_take_the_place_of_one_that_comes_before_them() -> None:
    scheduler, _ = started(max_batch=2)
    scheduler.submit(make_request("short", [1], max_tokens=1))
    family = scheduler.submit(make_request("family", [1] * 6, max_tokens=9, n=3))
    answer(scheduler)
    scheduler.submit(make_request("high", [2], priority=1))
    assert step(scheduler) == {"short": 1, "family": 6}
    assert answer(scheduler) == ["high"]
    assert [sequence.key for sequence in scheduler.running] == ["high", "family"]
    assert [sequence.key for sequence in scheduler.waiting] == [("family", 1), ("family", 2)]
    assert not family.forks


@pytest.mark.parametrize(("pages", "forked"), [(12, True), (6, False)])
def test_samples_fork_beside_one_that_comes_before_them_where_there_is_room_for_all(pages: int, forked: bool) -> None:
    scheduler, _ = started(pages=pages)
    scheduler.submit(make_request("family", [1] * 6, max_tokens=5, n=2))
    answer(scheduler)
    scheduler.submit(make_request("high", [2] * 7, max_tokens=5, priority=1))
    step(scheduler)
    demands, _ = scheduler.demands()
    assert any(demand.parent for demand in demands) == forked
    assert any(demand.opening and demand.opening.prompt == (2,) * 7 for demand in demands)


def test_samples_of_a_first_one_that_ended_keep_their_place() -> None:
    scheduler, _ = started(max_batch=2)
    scheduler.submit(make_request("early", [1] * 6, max_tokens=9, n=2, stop_token_ids=(0,)))
    scheduler.submit(make_request("late", [2] * 6, max_tokens=9, n=2))
    answer(scheduler)
    step(scheduler)
    assert [sequence.key for sequence in scheduler.leaving.values()] == ["early"]
    answer(scheduler)
    assert [sequence.key for sequence in scheduler.running] == [("early", 1), "late"]
    assert [sequence.key for sequence in scheduler.waiting] == [("late", 1)]


def test_samples_do_not_come_before_one_that_was_overtaken() -> None:
    scheduler, clock = started(pages=500)
    scheduler.submit(make_request("large", [1] * 40))
    scheduler.submit(make_request("family", [2] * 6, max_tokens=9, n=3))
    answer(scheduler, refused=frozenset({"large"}))
    scheduler.submit(make_request("high", [2], priority=1))
    clock.now += ADMISSION_RETRY_S
    assert answer(scheduler) == ["high"]
    step(scheduler)
    assert answer(scheduler, refused=frozenset({"large"})) == ["large"]
    assert [sequence.key for sequence in scheduler.running] == ["high", "family"]


def test_samples_that_are_forked_in_front_of_one_that_is_refused_overtake_it_once() -> None:
    scheduler, clock = started(pages=500)
    scheduler.submit(make_request("family", [2] * 6, max_tokens=9, n=2))
    answer(scheduler)
    large = scheduler.submit(make_request("large", [1] * 40, priority=1))
    step(scheduler)
    assert answer(scheduler, refused=frozenset({"large"})) == ["large"]
    assert [sequence.key for sequence in scheduler.running] == ["family", ("family", 1)]
    assert scheduler._admission._overtaken == {large}
    scheduler.submit(make_request("late", [3]))
    clock.now += ADMISSION_RETRY_S
    assert answer(scheduler, refused=frozenset({"large"})) == ["large"]


# --- the budget of a step ---------------------------------------------------------------------------------------------


def test_several_prefills_leave_every_decoding_request_its_token() -> None:
    scheduler, _ = started(max_step_tokens=8, max_batch=6)
    for name, length in (("long", 20), ("b", 1), ("longer", 30), ("c", 1), ("longest", 40), ("d", 1)):
        scheduler.submit(make_request(name, [1] * length, max_tokens=20))
    answer(scheduler)
    for _ in range(4):
        assert step(scheduler) == {"long": 5, "b": 1, "c": 1, "d": 1}
        answer(scheduler)
    assert step(scheduler) == {"long": 1, "b": 1, "longer": 4, "c": 1, "d": 1}


def test_an_older_prompt_of_any_length_lets_younger_ones_decode() -> None:
    scheduler, _ = started(pages=2000, max_step_tokens=16, max_batch=4)
    scheduler.submit(make_request("huge", [1] * 5000, max_tokens=2))
    young = [scheduler.submit(make_request(name, [2], max_tokens=50)) for name in ("a", "b", "c")]
    for done in range(1, 11):
        answer(scheduler)
        assert step(scheduler) == {"huge": 13, "a": 1, "b": 1, "c": 1}
        assert [sequence.num_generated_tokens for sequence in young] == [done] * 3


def test_a_full_batch_of_decoding_requests_lets_a_prompt_be_computed() -> None:
    scheduler, _ = started(max_step_tokens=4, max_batch=4)
    for name in ("a", "b", "c"):
        scheduler.submit(make_request(name, [1], max_tokens=50))
    answer(scheduler)
    step(scheduler)
    prompt = scheduler.submit(make_request("prompt", [2] * 6, max_tokens=9, priority=-50))
    while not prompt.num_generated_tokens:
        answer(scheduler)
        assert step(scheduler)["prompt"] == 1


def test_a_budget_smaller_than_the_batch_still_goes_to_both() -> None:
    scheduler, _ = started(max_step_tokens=3, max_batch=8)
    for name in ("a", "b", "c", "d"):
        scheduler.submit(make_request(name, [1], max_tokens=50))
    scheduler.submit(make_request("prompt", [2] * 6, max_tokens=9))
    answer(scheduler)
    assert step(scheduler) == {"a": 1, "b": 1, "prompt": 1}


def test_the_time_to_a_first_token_is_bounded_by_the_prompts_before_it() -> None:
    budget, batch = 16, 6
    scheduler, _ = started(pages=500, max_step_tokens=budget, max_batch=batch)
    prompts = [
        scheduler.submit(make_request(f"p{at}", [1] * length, max_tokens=90)) for at, length in enumerate((33, 70, 5))
    ]
    for name in ("a", "b", "c"):
        scheduler.submit(make_request(name, [2], max_tokens=90))
    answer(scheduler)
    first, steps = dict[str, int](), 0
    while len(first) < len(prompts):
        answer(scheduler)
        step(scheduler)
        steps += 1
        first |= {s.id: steps for s in prompts if s.num_generated_tokens and s.id not in first}
    ahead = 0
    for sequence in prompts:
        ahead += len(sequence.request.prompt)
        assert first[sequence.id] <= -(-ahead // (budget - (batch - 1)))


@dataclass(frozen=True)
class Round:
    """Who comes, by priority; which openings of the exchange are refused, by their place; whether all that run end."""

    come: list[int]
    refused: list[bool]
    end: bool
    seconds: float


rounds = st.builds(
    Round,
    st.lists(st.integers(-2, 2), max_size=3),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.booleans(),
    st.sampled_from([0.05, ADMISSION_RETRY_S, STEP_S]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(rounds, min_size=4, max_size=30), st.integers(1, 8))
def test_whatever_a_source_refuses_one_exchange_of_strangers_is_the_most(workload: list[Round], max_batch: int) -> None:
    scheduler, clock = started(pages=1000, max_batch=max_batch)
    places: dict[str, tuple[float, int]] = {}
    tried: list[list[str]] = []
    came, let_in = dict[str, int](), dict[str, int]()
    willing = Round([], [False] * 8, end=True, seconds=ADMISSION_RETRY_S)
    while workload or scheduler.waiting:
        now = workload.pop(0) if workload else willing
        for priority in now.come:
            name = f"r{len(places)}"
            places[name], came[name] = (clock.now - priority * STEP_S, len(places)), len(tried)
            scheduler.submit(make_request(name, priority=priority))
        demands, _ = scheduler.demands()
        grants, openings = [], list[str]()
        for demand in demands:
            openings += [demand.sequence_id.partition(":")[2]] if demand.opening else []
            if demand.opening and now.refused[len(openings) - 1]:
                grants.append(Grant(demand.sequence_id, error=CapacityExceeded("others hold them")))
            else:
                count = max(0, demand.total_pages - demand.known_pages)
                grants.append(Grant(demand.sequence_id, demand.known_pages, tuple(islice(FRESH, count))))
        scheduler.granted(grants)
        let_in |= {sequence.id: len(tried) for sequence in scheduler.running if sequence.id not in let_in}
        tried.append(openings)
        assert set(scheduler._admission._overtaken) <= set(scheduler.waiting)
        for sequence in list(scheduler.running) if now.end else []:
            scheduler.finish(sequence, Outcome(FinishReason.LENGTH))
        clock.now += now.seconds
        assert len(tried) < 1000
    for name, place in places.items():
        before = {
            exchange: other
            for other, exchange in let_in.items()
            if came[name] <= exchange < let_in[name] and places[other] > place
        }
        assert len(before) <= 1 and all(name in tried[exchange] for exchange in before)


# --- any workload -----------------------------------------------------------------------------------------------------


class WatchedMemory(TokenMemory):
    """Holds every step against what it owes to those that run."""

    def __init__(self, total_pages: int, page_size: int, budget: int) -> None:
        super().__init__(total_pages, page_size)
        self.budget = budget
        self.running: list[Sequence] = []

    def run(self, step: object) -> list[int | ServiceError | None]:
        chunks: list[Chunk] = list(step)  # type: ignore[call-overload]
        had = {chunk.sequence.key: chunk.count for chunk in chunks}
        assert sum(had.values()) <= self.budget
        missing = {s.key: s.num_tokens - s.num_computed_tokens for s in self.running}
        ready = {
            s.key: min(s.num_tokens, len(s.pages) * self.page_size) - s.num_computed_tokens
            for s in self.running
            if len(s.pages) * self.page_size > s.num_computed_tokens and not s.held
        }
        decoding = [name for name in ready if missing[name] == 1]
        left = self.budget - len(decoding)
        assert all(had.get(name) == 1 for name in decoding)
        for name in ready:
            if missing[name] > 1:
                assert had.get(name, 0) == min(ready[name], left)
                left -= had.get(name, 0)
        return super().run(chunks)


class FairHarness(Harness):
    """Knows when each request came, and in which exchange it was let in first."""

    def __init__(self, *, slots: int, page_size: int, max_batch: int, spare: int, late: bool) -> None:
        super().__init__(pages=slots // page_size, page_size=page_size, late=late)
        budget = max_batch + spare
        self.memory = WatchedMemory(self.local.total_pages, page_size, budget)
        self.source.tokens = self.memory
        self.loop._runner = self.memory
        self.loop._limits = Limits(max_batch, budget, 1000, priority_step_s=STEP_S)
        self.loop.scheduler = self.loop._new_scheduler()
        self.memory.running = self.loop.scheduler.running
        self.came: dict[str, float] = {}
        self.let_in: dict[Key, int] = {}
        self.could_be_let_in: dict[Key, int] = {}
        self.asked: list[set[Key]] = []  # whose openings, of forks too, each exchange has
        self.excused: list[set[Key]] = []  # who may be overtaken in it
        send = self.source.exchange

        def exchange(demands: list[Demand], removed: list[str]) -> Exchange:
            keys = {s.source_id: key for key, s in self.loop.scheduler.live.items()}
            self.asked.append({keys[d.sequence_id] for d in demands if d.opening or d.parent})
            self.excused.append(self.in_fills())
            return send(demands, removed)

        self.source.exchange = exchange

    def in_fills(self) -> set[Key]:
        """Who waits for pages from a lower tier."""
        return set()

    def come(self, name: str, prompt: list[int], max_tokens: int, priority: int, n: int) -> None:
        self.came[name] = self.clock.now
        self.could_be_let_in[name] = len(self.asked)
        self.submit(make_request(name, prompt, max_tokens=max_tokens, priority=priority, n=n))

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            super().iterate()
            for sequence in self.loop.scheduler.running:
                self.let_in.setdefault(sequence.key, len(self.asked) - 1)
            for key, sequence in self.loop.scheduler.live.items():
                if sequence.num_generated_tokens:  # before, its prompt is another's to compute
                    self.could_be_let_in.setdefault(key, len(self.asked))


@dataclass(frozen=True)
class Come:
    prompt: list[int]
    max_tokens: int
    priority: int
    n: int


@dataclass(frozen=True)
class Pass:
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Neighbour:
    """Another engine on the pool takes pages, or gives all of its back: then the guess at what is free is wrong."""

    pages: int


@dataclass(frozen=True)
class Cancel:
    nth: int


@dataclass(frozen=True)
class Fault:
    """What befalls the next exchange."""

    error: ServiceError
    served: bool


comes = st.builds(
    Come,
    st.lists(st.integers(0, 2), min_size=1, max_size=16),
    *(st.integers(1, 9), st.integers(-3, 3), st.sampled_from([1, 1, 2, 4])),
)
operations = st.one_of(
    comes,
    comes,
    st.builds(Pass, st.integers(1, 5), st.sampled_from([0.0, 0.3, STEP_S])),
    st.builds(Neighbour, st.integers(0, 10)),
    st.builds(Cancel, st.integers(0, 20)),
    st.builds(
        Fault,
        st.one_of(st.builds(KvCacheDown, st.just("down")), st.builds(SessionExpired, st.just("over"))),
        st.booleans(),
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(operations, min_size=12, max_size=40),
    st.integers(24, 90),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
)
def test_nobody_is_overtaken_but_by_those_that_may_and_all_come_to_an_end(
    workload: list[object], slots: int, page_size: int, max_batch: int, spare: int, late: bool
) -> None:
    run_fairly(FairHarness(slots=slots, page_size=page_size, max_batch=max_batch, spare=spare, late=late), workload)


def run_fairly(harness: FairHarness, workload: list[object]) -> None:
    slots, page_size = harness.local.total_pages * harness.local.page_size, harness.local.page_size
    asked: dict[str, Come] = {}
    taken: list[str] = []
    for operation in workload:
        match operation:
            case Come(prompt, max_tokens, priority, n) if len(prompt) + max_tokens <= slots // page_size * page_size:
                asked[f"r{len(asked)}"] = operation
                harness.come(f"r{len(asked) - 1}", prompt, max_tokens, priority, n)
            case Pass(rounds, seconds):
                harness.iterate(rounds)
                harness.clock.now += seconds
            case Cancel(nth):
                harness.loop.cancel(f"r{nth}")
            case Fault(error, served):
                harness.source.faults.append((error, served))
            case Neighbour(0):
                harness.local.exchange([], taken)
                taken = []
            case Neighbour(pages):
                name = f"neighbour {len(harness.source.exchanges)} {len(taken)}"
                [grant] = harness.local.exchange([Demand(name, 0, [], pages, 0, Opening([9]))], []).result()
                taken += [name] if grant.error is None else []
                harness.memory.poison(grant.pages)
            case Act():
                operation.act(harness)
    harness.local.exchange([], taken)
    harness.until_idle()
    while harness.loop._lost:  # with its session, the source still has what the lost one held
        harness.iterate()
    harness.check_empty()
    places = {
        key_of(name, sample): (harness.came[name] - STEP_S * come.priority, int(name[1:]), sample)
        for name, come in asked.items()
        for sample in range(come.n)
    }
    for name, come in asked.items():
        request = make_request(name, come.prompt, max_tokens=come.max_tokens, n=come.n)
        for one in (request, *request.others):
            key = key_of(name, one.sample)
            if harness.reason(key) is FinishReason.CANCELLED:
                continue
            assert harness.tokens[key] == alone(one)
            if key not in harness.let_in:  # its one token came with the first sample's
                assert one.sample and len(harness.tokens[key]) == 1
                continue
            strangers = {
                exchange
                for other, exchange in harness.let_in.items()
                if harness.could_be_let_in[key] <= exchange < harness.let_in[key] and places[other] > places[key]
                if key not in harness.excused[exchange]
            }
            # They were asked for together with it, and it was refused.
            assert len(strangers) <= 1 and all(key in harness.asked[exchange] for exchange in strangers)
