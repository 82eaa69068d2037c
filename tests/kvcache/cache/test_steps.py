"""Steps in columns do what the same demands do one by one: two caches, one told either way, stay equal."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from services.kvcache.cache.demand import Demand, Grant
from services.kvcache.cache.steps import Steps
from tests.kvcache.conftest import Running
from tests.kvcache.fakes import World

NAMES = ["a", "b", "c", "d"]

#: (name, tokens, how far start is off, pages more than held, pages of the table that the client does not know)
STEP = st.tuples(
    st.sampled_from(NAMES), st.integers(0, 5), st.sampled_from([0, 0, 0, 0, -1, 1]), st.integers(-1, 2),
    st.sampled_from([0, 0, 0, 1, -1]),
)  # fmt: skip
ACTION = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(NAMES), st.integers(1, 6), st.integers(0, 3)),
    st.tuples(st.just("fork"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("steps"), st.lists(STEP, min_size=1, max_size=6), st.booleans()),
)


class Twin:
    """One of the two caches."""

    def __init__(self, quota: int | None) -> None:
        self.world = World(12)
        self.cache = self.world.cache
        self.session = self.world.attached(max_pages=quota)
        self.sequences = self.session.sequences

    def state(self) -> object:
        """All that the step calls may change."""
        pool = self.cache.pool_of(self.session)
        return (
            [(s.id, s.pages, s.tokens, s.published, s.copy, s.last_access, s.access_count) for s in pool.sequences],
            pool.totals,
            [(pool.table.state(page), pool.table.generation(page)) for page in range(pool.table.total)],
            self.session.held_pages,
            list(self.cache.check()),
        )


def columns(twin: Twin, steps: list[tuple[str, int, int, int, int]]) -> list[Demand]:
    demands = []
    for name, count, off, more, unknown in steps:
        sequence = twin.sequences.get(name)
        resident, held = (len(sequence.tokens), len(sequence.pages)) if sequence else (0, 0)
        start = max(0, resident + off)
        tokens = list(range(7 * start, 7 * start + count))
        demands.append(Demand(name, None, "", start, tokens, max(0, held + more), max(0, held - unknown)))
    return demands


def as_steps(demands: list[Demand], *, growing: bool, all_ones: bool) -> Steps:
    return Steps(
        [d.sequence_id for d in demands],
        [d.start for d in demands],
        [token for d in demands for token in d.tokens],
        [] if all_ones else [len(d.tokens) for d in demands],
        [d.total_pages for d in demands] if growing else [],
        [d.known_pages for d in demands] if growing else [],
    )


def plain(result: Any) -> object:
    """An answer, comparable."""
    return (type(result), str(result)) if isinstance(result, ServiceError) else result


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTION, max_size=25), st.sampled_from([None, 5]))
def test_columns_and_demands_are_the_same(actions: list[Any], quota: int | None) -> None:
    one, two = Twin(quota), Twin(quota)
    for action in actions:
        for twin in (one, two):
            twin.world.now += 1
        match action:
            case ("open", name, length, pages):
                for twin in (one, two):
                    demand = Demand(name, list(range(length)), "", 0, [], pages, 0)
                    twin.cache.allocate(twin.session.id, [demand], [])
            case ("fork", parent, child):
                for twin in (one, two):
                    with contextlib.suppress(ServiceError):
                        twin.cache.fork(twin.session.id, parent, child)
            case ("remove", name):
                for twin in (one, two):
                    twin.cache.remove(twin.session.id, [name])
            case ("steps", steps, growing):
                demands = columns(one, steps)
                given = as_steps(demands, growing=growing, all_ones=all(len(d.tokens) == 1 for d in demands))
                if growing:
                    told, _ = one.cache.step(one.session.id, given, [])
                    results, _ = two.cache.allocate(two.session.id, demands, [])
                    expected = [
                        (demand.sequence_id, plain(result))
                        for demand, result in zip(demands, results, strict=True)
                        if not isinstance(result, Grant) or result.pages or result.copies
                    ]
                else:
                    errors = one.cache.append_steps(one.session.id, given)
                    told = list(errors)
                    outcomes = two.cache.append(two.session.id, [(d.sequence_id, d.start, d.tokens) for d in demands])
                    expected = [
                        (demand.sequence_id, plain(outcome))
                        for demand, outcome in zip(demands, outcomes, strict=True)
                        if isinstance(outcome, ServiceError)
                    ]
                assert [(name, plain(result)) for name, result in told] == expected
        assert one.state() == two.state()
        assert not one.state()[-1]  # type: ignore[index]


def steps_message(**fields: Any) -> pb.SequenceSteps:
    given = {
        "sequence_ids": ["a", "b"],
        "starts": [5, 5],
        "tokens": [1, 2],
        "total_pages": [2, 2],
        "known_pages": [2, 2],
    }
    return pb.SequenceSteps(**{**given, **fields})


def opened(running: Running) -> str:
    """A session with sequences a and b of 5 tokens in 2 pages each."""
    session = running.session()
    for name, first in (("a", 1), ("b", 9)):
        opening = pb.SequenceOpening(prompt=[first])
        demand = pb.SequenceDemand(sequence_id=name, opening=opening, total_pages=2)
        running.stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=[demand]))
        tokens = pb.SequenceTokens(sequence_id=name, tokens=[first, 2, 3, 4, 5])
        running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, appends=[tokens]))
    return session


def test_a_step_over_the_wire(running: Running) -> None:
    session = opened(running)
    steps = steps_message(sequence_ids=["a", "none", "b"], starts=[5, 0, 5], tokens=[6, 7, 6, 7],
                          token_counts=[1, 0, 3], total_pages=[2, 1, 3], known_pages=[2, 0, 2])  # fmt: skip
    demand = pb.SequenceDemand(sequence_id="c", opening=pb.SequenceOpening(prompt=[3]), total_pages=1)
    request = pb.AllocatePagesRequest(session_id=session, steps=steps, demands=[demand])
    for _ in range(2):  # and again, as if the reply had been lost
        reply = running.stub.AllocatePages(request)
        assert [grant.sequence_id for grant in reply.step_grants] == ["none", "b"]
        assert rpc.error_from_status(reply.step_grants[0].error).reason == "SEQUENCE_UNKNOWN"
        [page] = reply.step_grants[1].pages
        assert reply.step_grants[1].first_index == 2 and page.page_id == 4
        # Steps come first: the page behind theirs is the demand's.
        assert [p.page_id for p in reply.grants[0].pages] == [5]
    for name, tokens in (("a", [1, 2, 3, 4, 5, 6]), ("b", [9, 2, 3, 4, 5, 7, 6, 7])):
        request_ = pb.GetSequenceRequest(session_id=session, sequence_id=name, include_tokens=True)
        assert list(running.stub.GetSequence(request_).sequence.tokens) == tokens


def test_appended_steps_tell_only_what_failed(running: Running) -> None:
    session = opened(running)
    steps = steps_message(
        sequence_ids=["a", "none", "b"], starts=[5, 0, 6], tokens=[6, 1, 6], total_pages=[], known_pages=[]
    )
    reply = running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
    assert [(e.sequence_id, rpc.error_from_status(e.error).reason) for e in reply.step_errors] == [
        ("none", "SEQUENCE_UNKNOWN"),
        ("b", "POSITION_MISMATCH"),
    ]
    request = pb.GetSequenceRequest(session_id=session, sequence_id="a")
    assert running.stub.GetSequence(request).sequence.total_tokens == 6


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"starts": [5]}, "steps.starts", "has 1 entries; for 2 sequences it must have 2"),
        ({"tokens": [1]}, "steps.tokens", "has 1 entries"),
        ({"token_counts": [2]}, "steps.token_counts", "has 1 entries"),
        ({"token_counts": [1, 2]}, "steps.tokens", "it must have 3"),
        ({"total_pages": []}, "steps.total_pages", "has 0 entries"),
        ({"known_pages": [1, 1, 1]}, "steps.known_pages", "has 3 entries"),
        ({"sequence_ids": ["a", ""]}, "steps.sequence_ids[1]", "1 to 128"),
        ({"sequence_ids": ["a" * 129, "b"]}, "steps.sequence_ids[0]", "129"),
        ({"sequence_ids": ["a"] * 4097}, "steps.sequence_ids", "4096"),
    ],
)  # fmt: skip
def test_columns_of_different_lengths_are_refused(running: Running, fields: Any, field: str, words: str) -> None:
    session = opened(running)
    request = pb.AllocatePagesRequest(session_id=session, steps=steps_message(**fields))
    error = refusal(lambda: running.stub.AllocatePages(request))
    assert (error.reason, error.field) == ("FIELD_INVALID", field) and words in error.message


def test_pages_are_not_appended(running: Running) -> None:
    request = pb.AppendTokensRequest(session_id=opened(running), steps=steps_message())
    assert refusal(lambda: running.stub.AppendTokens(request)).field == "steps.total_pages"


def refusal(call: Any) -> ServiceError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return rpc.error_from(caught.value)
