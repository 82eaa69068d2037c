# mypy: disable-error-code="arg-type, assignment"
"""Any workload, any pool, any failure: each request's output is what it generates alone, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import (
    DeadlineExceeded,
    Draining,
    ExceedsPool,
    ForwardFailed,
    KvCacheDown,
    ServiceError,
    SessionExpired,
)
from services.engine.pages.source import Demand, Opening
from services.engine.scheduling.sequence import FinishReason, Key, Request, key_of
from services.engine.scheduling.step import Chunk
from tests.engine.fakes import Harness, alone, make_request
from tests.engine.lower_tier import Act

#: Without asynchronous steps, and with them on a device that computes as early and as late as it may.
AHEAD = (None, "early", "late")

prompts = st.builds(
    lambda prefix, tail: prefix + tail,
    st.sampled_from([[], [0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 1, 1, 1, 1, 2, 2, 2, 2]]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)


@dataclass(frozen=True)
class Submit:
    prompt: list[int]
    max_tokens: int
    seed: int
    salt: str
    eos: bool
    n: int
    priority: int
    seconds: float | None
    stop: tuple[str, ...]
    min_tokens: int


@dataclass(frozen=True)
class Break:
    """The model fails at a given token of a request, in whichever sample reaches it first."""

    nth: int
    token: int


@dataclass(frozen=True)
class Cancel:
    nth: int


@dataclass(frozen=True)
class Rounds:
    count: int
    seconds: float


@dataclass(frozen=True)
class Neighbour:
    """Another engine on the same pool: it takes pages, or gives all of its pages back."""

    pages: int


@dataclass(frozen=True)
class Fault:
    error: ServiceError
    served: bool


class LeaseLost:
    pass


class Drain:
    pass


submits = st.builds(
    Submit,
    *(prompts, st.integers(1, 14), st.integers(0, 1), st.sampled_from(["", "", "s"]), st.booleans()),
    st.sampled_from([1, 1, 2, 4]),
    st.sampled_from([0, 0, 0, -2, 3]),
    st.sampled_from([None, None, None, 0.02, 0.5]),
    st.sampled_from([(), (), (), ("b",), ("ac", "dd")]),
    st.sampled_from([0, 0, 3]),
)
operations = st.one_of(
    submits,
    submits,
    st.builds(Cancel, st.integers(0, 20)),
    st.builds(Rounds, st.integers(1, 6), st.sampled_from([0.0, 0.2])),
    st.builds(Neighbour, st.integers(0, 12)),
    st.builds(Break, st.integers(0, 20), st.integers(0, 5)),
)
faults = st.one_of(
    st.builds(Fault, st.builds(KvCacheDown, st.just("down")), st.booleans()),
    st.builds(Fault, st.builds(SessionExpired, st.just("expired")), st.booleans()),
    st.builds(LeaseLost),
    st.builds(Drain),
)


def neighbour(harness: Harness, taken: list[str], pages: int) -> list[str]:
    if not pages:
        harness.local.exchange([], taken)
        return []
    name = f"neighbour {len(harness.source.exchanges)} {len(taken)}"
    demand = Demand(name, start=0, tokens=[], total_pages=pages, known_pages=0, opening=Opening([9]))
    grants = harness.local.exchange([demand], []).result()
    harness.memory.poison(grants[0].pages)
    return [*taken, name] if grants[0].error is None else taken


def run_workload(harness: Harness, workload: list[object]) -> None:
    requests: dict[Key, Request] = {}
    cancelled = set()
    broken: dict[str, int] = {}
    taken: list[str] = []
    submitted, refused_from = 0, 1000

    def fault(chunk: Chunk) -> ServiceError | None:
        breaks = chunk.samples and broken.get(chunk.sequence.id) == chunk.sequence.num_generated_tokens
        return ForwardFailed("broken") if breaks else None

    harness.memory.fault = fault
    # Now and then a step that none may be launched behind, as one with a penalty.
    harness.memory.unfollowed = lambda step: len(harness.memory.steps) % 7 in (2, 3, 5)
    for operation in workload:
        match operation:
            case Submit(prompt, max_tokens, seed, salt, eos, n, priority, seconds, stop, min_tokens):
                name = f"r{submitted}"
                submitted += 1
                deadline = None if seconds is None else harness.clock.now + seconds
                request = make_request(
                    *(name, prompt),
                    **{"max_tokens": max_tokens, "seed": seed, "salt": salt, "eos": eos, "n": n},
                    deadline=deadline,
                    priority=priority,
                    stop=stop,
                    min_tokens=min_tokens,
                )
                requests.update((key_of(name, one.sample), one) for one in (request, *request.others))
                harness.submit(request)
            case Cancel(nth):
                harness.loop.cancel(f"r{nth}")
                cancelled.add(f"r{nth}")
            case Break(nth, token):
                broken[f"r{nth}"] = token
            case Rounds(count, seconds):
                harness.iterate(count)
                harness.clock.now += seconds
            case Neighbour(pages):
                taken = neighbour(harness, taken, pages)
            case Fault(error, served):
                harness.source.faults.append((error, served))
            case Drain():
                harness.loop.drain(Draining("over"))
                refused_from = min(refused_from, submitted)
            case LeaseLost():
                harness.source.lease = False
            case Act():
                operation.act(harness)
    neighbour(harness, taken, 0)
    harness.until_idle()
    while harness.loop._lost:  # with its session, the source still has what the lost one held
        harness.iterate()
    harness.check_empty()
    totals, scheduler = harness.loop.totals, harness.loop.scheduler
    late = {name for name in harness.ended if isinstance(name, str) and int(name[1:]) >= refused_from}
    refused = late | {name for name, one in harness.ended.items() if isinstance(one.error, ExceedsPool)}
    begun = [one for one in requests.values() if one.request_id not in refused]
    assert set(harness.ended) == {key_of(one.request_id, one.sample) for one in begun} | refused
    for name, request in requests.items():
        if name not in harness.ended:
            continue
        expected, got, outcome = alone(request), harness.tokens[name], harness.ended[name]
        if isinstance(outcome.error, ExceedsPool):
            needed = -(-(len(request.prompt) + request.stopping.max_tokens - 1) // harness.local.page_size)
            assert needed > harness.local.total_pages and not got
        elif isinstance(outcome.error, Draining):
            assert int(request.request_id[1:]) < submitted and refused_from < 1000 and not got
        elif outcome.reason is FinishReason.CANCELLED:
            assert request.request_id in cancelled and got == expected[: len(got)]
        elif isinstance(outcome.error, DeadlineExceeded):
            assert request.deadline is not None and got == expected[: len(got)]
        elif isinstance(outcome.error, ForwardFailed):
            assert request.request_id in broken and got == expected[: len(got)]
        else:
            assert outcome.error is None, outcome.error
            assert got == expected
    for one in begun:  # samples fail together, but for those that were done before
        ends = [harness.ended[key_of(one.request_id, at)] for at in range(len(one.others) + 1)]
        assert len({type(end.error) for end in ends if end.error is not None}) <= 1
        assert all(end.error is None for end in ends) or all(end.reason is not FinishReason.CANCELLED for end in ends)
    assert totals.prompt_tokens == sum(len(one.prompt) for one in begun)
    assert totals.generated_tokens == sum(map(len, harness.tokens.values()))
    assert totals.finished_requests + totals.cancelled_requests + totals.failed_requests == len(begun)
    assert sum(totals.refused.values()) == len(refused)
    assert scheduler.cached_tokens <= scheduler.looked_up_tokens <= totals.prompt_tokens
    assert harness.loop.stats.first_token.count == sum(map(bool, harness.tokens.values()))
    assert harness.loop.stats.request.count == len(begun)


def shaped(
    steps: st.SearchStrategy[object], *more: st.SearchStrategy[object]
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Draws a workload and an engine for it: pools of a few prompts, budgets down to a token a step; then ``more``."""
    return given(
        st.lists(steps, min_size=15, max_size=50),
        st.integers(20, 90),
        st.integers(1, 4),
        st.integers(1, 6),
        st.integers(1, 24),
        st.booleans(),
        st.sampled_from(AHEAD),
        *more,
    )


def harness_of(
    slots: int,
    page_size: int,
    max_batch: int,
    max_step_tokens: int,
    late: bool,
    ahead: str | None,
    *,
    make: Callable[..., Harness] = Harness,
) -> Harness:
    return make(
        pages=slots // page_size,
        page_size=page_size,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        late=late,
        ahead=ahead,
    )


@settings(max_examples=300, deadline=None)
@shaped(operations)
def test_every_output_is_the_output_alone(
    workload: list[object],
    slots: int,
    page_size: int,
    max_batch: int,
    max_step_tokens: int,
    late: bool,
    ahead: str | None,
) -> None:
    run_workload(harness_of(slots, page_size, max_batch, max_step_tokens, late, ahead), workload)


@settings(max_examples=200, deadline=None)
@shaped(st.one_of(operations, operations, faults))
def test_lost_replies_and_lost_sessions_change_no_output(
    workload: list[object],
    slots: int,
    page_size: int,
    max_batch: int,
    max_step_tokens: int,
    late: bool,
    ahead: str | None,
) -> None:
    run_workload(harness_of(slots, page_size, max_batch, max_step_tokens, late, ahead), workload)
