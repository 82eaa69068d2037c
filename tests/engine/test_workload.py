"""Any workload, any pool, any failure: each request's output is what it generates alone, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.pagesource import Demand, Opening
from services.engine.sequence import FinishReason, Key, Request, key_of
from services.errors import ExceedsPool, KvCacheDown, ServiceError, SessionExpired
from tests.engine.fakes import Harness, alone, make_request

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


@dataclass(frozen=True)
class Cancel:
    nth: int


@dataclass(frozen=True)
class Rounds:
    count: int
    seconds: float


@dataclass(frozen=True)
class Neighbour:
    """Another engine on the same pool: it takes pages, or gives all it has back."""

    pages: int


@dataclass(frozen=True)
class Fault:
    error: ServiceError
    served: bool


class LeaseLost:
    pass


submits = st.builds(
    Submit,
    *(prompts, st.integers(1, 14), st.integers(0, 1), st.sampled_from(["", "", "s"]), st.booleans()),
    st.sampled_from([1, 1, 2, 4]),
)
operations = st.one_of(
    submits,
    submits,
    st.builds(Cancel, st.integers(0, 20)),
    st.builds(Rounds, st.integers(1, 6), st.sampled_from([0.0, 0.2])),
    st.builds(Neighbour, st.integers(0, 12)),
)
faults = st.one_of(
    st.builds(Fault, st.builds(KvCacheDown, st.just("down")), st.booleans()),
    st.builds(Fault, st.builds(SessionExpired, st.just("expired")), st.booleans()),
    st.builds(LeaseLost),
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
    taken: list[str] = []
    submitted = 0
    for operation in workload:
        match operation:
            case Submit(prompt, max_tokens, seed, salt, eos, n):
                name = f"r{submitted}"
                submitted += 1
                request = make_request(name, prompt, max_tokens=max_tokens, seed=seed, salt=salt, eos=eos, n=n)
                requests.update((key_of(name, one.sample), one) for one in (request, *request.others))
                harness.submit(request)
            case Cancel(nth):
                harness.loop.cancel(f"r{nth}")
                cancelled.add(f"r{nth}")
            case Rounds(count, seconds):
                harness.iterate(count)
                harness.clock.now += seconds
            case Neighbour(pages):
                taken = neighbour(harness, taken, pages)
            case Fault(error, served):
                harness.source.faults.append((error, served))
            case LeaseLost():
                harness.source.lease = False
    neighbour(harness, taken, 0)
    harness.until_idle()
    while harness.loop._lost:  # with its session, the source still has what the lost one held
        harness.iterate()
    harness.check_empty()
    refused = {name for name, one in harness.ended.items() if isinstance(one.error, ExceedsPool)}
    assert set(harness.ended) == {
        name for name, one in requests.items() if not one.sample or one.request_id not in refused or name in refused
    }
    for name, request in requests.items():
        if name not in harness.ended:
            continue
        expected, got, outcome = alone(request), harness.tokens[name], harness.ended[name]
        if isinstance(outcome.error, ExceedsPool):
            needed = -(-(len(request.prompt) + request.stopping.max_tokens - 1) // harness.local.page_size)
            assert needed > harness.local.total_pages and not got
        elif outcome.reason is FinishReason.CANCELLED:
            assert request.request_id in cancelled and got == expected[: len(got)]
        else:
            assert outcome.error is None, outcome.error
            assert got == expected


def shaped(steps: st.SearchStrategy[object]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Draws a workload and an engine for it: pools of a few prompts, budgets down to a token a step."""
    return given(
        st.lists(steps, min_size=15, max_size=50),
        st.integers(20, 90),
        st.integers(1, 4),
        st.integers(1, 6),
        st.integers(1, 24),
        st.booleans(),
    )


def harness_of(slots: int, page_size: int, max_batch: int, max_step_tokens: int, late: bool) -> Harness:
    return Harness(
        pages=slots // page_size,
        page_size=page_size,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        late=late,
    )


@settings(max_examples=300, deadline=None)
@shaped(operations)
def test_every_output_is_the_output_alone(
    workload: list[object], slots: int, page_size: int, max_batch: int, max_step_tokens: int, late: bool
) -> None:
    run_workload(harness_of(slots, page_size, max_batch, max_step_tokens, late), workload)


@settings(max_examples=200, deadline=None)
@shaped(st.one_of(operations, operations, faults))
def test_lost_replies_and_lost_sessions_change_no_output(
    workload: list[object], slots: int, page_size: int, max_batch: int, max_step_tokens: int, late: bool
) -> None:
    run_workload(harness_of(slots, page_size, max_batch, max_step_tokens, late), workload)
