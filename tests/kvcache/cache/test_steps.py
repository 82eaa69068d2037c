# mypy: disable-error-code="has-type, misc"
"""Steps in columns: the short path does what the long one does, and malformed steps get the right error."""

from __future__ import annotations

from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from services.kvcache.cache.opening import Opening
from services.kvcache.cache.steps import Steps
from services.kvcache.cache.walk import check
from tests.kvcache.cache.demands import Step, fork, in_columns, opening
from tests.kvcache.clients import messages
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
            list(check(self.cache)),
        )


def made(twin: Twin, steps: list[tuple[str, int, int, int, int]]) -> list[Step]:
    demands = []
    for name, count, off, more, unknown in steps:
        sequence = twin.sequences.get(name)
        resident, held = (len(sequence.tokens), len(sequence.pages)) if sequence else (0, 0)
        start = max(0, resident + off)
        tokens = tuple(range(7 * start, 7 * start + count))
        demands.append(Step(name, start, tokens, max(0, held + more), max(0, held - unknown)))
    return demands


def plain(result: Any) -> object:
    """An answer, comparable."""
    return (type(result), str(result)) if isinstance(result, ServiceError) else result


def sent(twin: Twin, call: list[Steps | Opening]) -> list[object]:
    told, _ = twin.cache.calls.allocate(twin.session.id, call, [])
    return [(name, plain(result)) for name, result in told]


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTION, max_size=25), st.sampled_from([None, 5]))
def test_what_needs_no_decision_is_done_as_all_else(actions: list[Any], quota: int | None) -> None:
    """One takes the short way where it can, for all in a row; the other looks closely at each by itself."""
    one, two = Twin(quota), Twin(quota)
    two.cache.pool_of(two.session).append_within_page = lambda *_: False  # type: ignore[method-assign]
    for action in actions:
        for twin in (one, two):
            twin.world.now += 1
        match action:
            case ("open", name, length, pages):
                assert sent(one, [opening(name, range(length), pages)]) == sent(
                    two, [opening(name, range(length), pages)]
                )
            case ("fork", parent, child):
                assert sent(one, [fork(child, parent)]) == sent(two, [fork(child, parent)])
            case ("remove", name):
                for twin in (one, two):
                    twin.cache.calls.remove(twin.session.id, [name])
            case ("steps", steps, True):
                rows = made(one, steps)
                by_itself = [told for row in rows for told in sent(two, [in_columns([row])])]
                assert sent(one, [in_columns(rows)]) == by_itself
            case ("steps", steps, False):
                rows = made(one, steps)
                failed = one.cache.calls.append(one.session.id, in_columns(rows, growing=False))
                by_itself = [
                    told
                    for row in rows
                    for told in two.cache.calls.append(two.session.id, in_columns([row], growing=False))
                ]
                assert [(name, plain(error)) for name, error in failed] == [
                    (name, plain(error)) for name, error in by_itself
                ]
        assert one.state() == two.state()
        assert not one.state()[-1]  # type: ignore[index]


def steps_message(**fields: Any) -> pb.SequenceSteps:
    given = {
        "sequence_ids": ["a", "b"],
        "starts": [5, 5],
        "token_counts": [1, 1],
        "tokens": [1, 2],
        "total_pages": [2, 2],
        "known_pages": [2, 2],
    }
    return pb.SequenceSteps(**{**given, **fields})


def opened(running: Running) -> str:
    """A session with sequences a and b of 5 tokens in 2 pages each."""
    session = running.session()
    for name, first in (("a", 1), ("b", 9)):
        running.stub.AllocatePages(
            pb.AllocatePagesRequest(session_id=session, demands=[messages.opening(name, [first], 2)])
        )
        steps = messages.report(name, 0, [first, 2, 3, 4, 5])
        running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
    return session


def test_a_step_over_the_wire(running: Running) -> None:
    session = opened(running)
    steps = steps_message(sequence_ids=["a", "none", "b"], starts=[5, 0, 5], tokens=[6, 7, 6, 7],
                          token_counts=[1, 0, 3], total_pages=[2, 1, 3], known_pages=[2, 0, 2])  # fmt: skip
    demands = [pb.Demand(steps=steps), messages.opening("c", [3], 1)]
    request = pb.AllocatePagesRequest(session_id=session, demands=demands)
    for _ in range(2):  # and again, as if the reply had been lost
        unknown, grown, opened_ = running.stub.AllocatePages(request).grants
        assert (unknown.sequence_id, grown.sequence_id, opened_.sequence_id) == ("none", "b", "c")
        assert rpc.error_from_status(unknown.error).reason == "SEQUENCE_UNKNOWN"
        assert grown.first_index == 2 and list(grown.page_ids) == [4]
        assert list(opened_.page_ids) == [5], "the page behind that of the step in front"
    for name, tokens in (("a", [1, 2, 3, 4, 5, 6]), ("b", [9, 2, 3, 4, 5, 7, 6, 7])):
        request_ = pb.GetSequenceRequest(session_id=session, sequence_id=name, include_tokens=True)
        assert list(running.stub.GetSequence(request_).sequence.tokens) == tokens


def test_appended_steps_tell_only_what_failed(running: Running) -> None:
    session = opened(running)
    steps = steps_message(sequence_ids=["a", "none", "b"], starts=[5, 0, 6], token_counts=[1, 1, 1], tokens=[6, 1, 6],
                          total_pages=[], known_pages=[])  # fmt: skip
    reply = running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
    assert [(e.sequence_id, rpc.error_from_status(e.error).reason) for e in reply.errors] == [
        ("none", "SEQUENCE_UNKNOWN"),
        ("b", "POSITION_MISMATCH"),
    ]
    request = pb.GetSequenceRequest(session_id=session, sequence_id="a")
    assert running.stub.GetSequence(request).sequence.total_tokens == 6


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"token_counts": []}, "steps.token_counts", "has 0 entries"),
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
    demands = [messages.step("a", 5), pb.Demand(steps=steps_message(**fields))]
    request = pb.AllocatePagesRequest(session_id=session, demands=demands)
    error = refusal(lambda: running.stub.AllocatePages(request))
    assert (error.reason, error.field) == ("FIELD_INVALID", f"demands[1].{field}") and words in error.message


def test_pages_are_not_appended(running: Running) -> None:
    request = pb.AppendTokensRequest(session_id=opened(running), steps=steps_message())
    assert refusal(lambda: running.stub.AppendTokens(request)).field == "steps.total_pages"


def refusal(call: Any) -> ServiceError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return rpc.error_from(caught.value)
