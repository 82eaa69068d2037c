"""The step call on the wire: nothing is lost, reordered or taken for another's."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocmforge.client import demands, messages
from rocmforge.client.demands import Demand, Grant, Opening, Retention, ReuseHint
from rocmforge.client.errors import CapacityExceeded, ExceedsPool, InvalidConfiguration
from rocmforge.client.layout import Layout, OpaqueLayout, PageLayout
from rocmforge.client.statuses import error_from, error_from_status
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.rpc import status_of

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=9)
LIMIT = 6  # of tokens in a call: small, so that it is reached


@st.composite
def batches(draw: st.DrawFn) -> list[Demand]:
    """Steps, prompts and forks in any order, each of a sequence of its own."""
    found = []
    for at in range(draw(st.integers(0, 12))):
        name, pages = f"s{at}", draw(st.integers(0, 5))
        kind = draw(st.sampled_from(("step", "prompt", "fork")))
        if kind == "step":
            tokens = draw(TOKENS)[:LIMIT]
            found.append(Demand.of_step(name, draw(st.integers(0, 2**40)), tokens, pages, draw(st.integers(0, 5))))
        elif kind == "prompt":
            retention = draw(st.none() | st.builds(Retention, st.floats(0.001, 86400), st.integers(1, 100)))
            seconds = st.none() | st.floats(0.001, 86400)
            hint = draw(
                st.none() | st.builds(ReuseHint, st.text(max_size=3), st.integers(0, 9), st.booleans(), seconds)
            )
            tokens, salt = draw(TOKENS) or [1], draw(st.text(max_size=3))
            wait = draw(st.none() | st.sampled_from([0.0, 0.25, 600.0]))
            opening = Opening(tokens, salt, retention, hint, wait)
            found.append(Demand(name, 0, (), pages, 0, opening))
        else:
            found.append(Demand.of_fork(name, "parent", pages))
    return found


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "STEP_TOKENS", LIMIT)


def asked(demand: Demand) -> tuple[Any, ...]:
    """What a demand says, in the form in which `heard` returns that of a message."""
    if demand.opening is not None:
        retention = demand.opening.retention
        kept = None if retention is None else (round(retention.ttl_s * 1e9), retention.priority)
        hint, wait = demand.opening.reuse_hint, demand.opening.fill_wait_s
        known: tuple[Any, ...] | None = None
        if hint is not None:
            back = None if hint.expected_return_s is None else round(hint.expected_return_s * 1e9)
            known = (hint.category, hint.turn, hint.tool_call_pending, back)
        prompt, salt = list(demand.opening.prompt), demand.opening.salt
        return (demand.sequence_id, demand.total_pages, prompt, salt, kept, known, wait)
    if demand.parent:
        return (demand.sequence_id, demand.total_pages, demand.parent)
    return (demand.sequence_id, demand.total_pages, demand.start, list(demand.tokens), demand.known_pages)


def heard(request: pb.AllocatePagesRequest) -> list[tuple[Any, ...]]:
    """What a message says, demand by demand."""
    found: list[tuple[Any, ...]] = []
    for demand in request.demands:
        if demand.HasField("opening"):
            one, prompt = demand.opening, demand.opening.prompt
            if one.WhichOneof("origin") == "parent_sequence_id":
                found.append((one.sequence_id, one.total_pages, one.parent_sequence_id))
                continue
            kept = (prompt.retention.ttl.ToNanoseconds(), prompt.retention.priority)
            said = kept if prompt.HasField("retention") else None
            hint, known = prompt.reuse_hint, None
            if prompt.HasField("reuse_hint"):
                back = hint.expected_return.ToNanoseconds() if hint.HasField("expected_return") else None
                known = (hint.category, hint.turn, hint.tool_call_pending, back)
            wait = one.fill_wait.ToNanoseconds() / 1e9 if one.HasField("fill_wait") else None
            tokens_sent = list(prompt.tokens)
            found.append((one.sequence_id, one.total_pages, tokens_sent, prompt.salt, said, known, wait))
        else:
            steps, tokens = demand.steps, iter(demand.steps.tokens)
            for at, name in enumerate(steps.sequence_ids):
                told = [next(tokens) for _ in range(steps.token_counts[at])]
                found.append((name, steps.total_pages[at], steps.starts[at], told, steps.known_pages[at]))
            assert next(tokens, None) is None, "no token is left over"
    return found


def token_count(request: pb.AllocatePagesRequest) -> int:
    """How many tokens a message has."""
    return sum(len(demand.steps.tokens) + len(demand.opening.prompt.tokens) for demand in request.demands)


@pytest.mark.usefixtures("few_tokens")
def test_a_batch_arrives_as_it_was_asked() -> None:
    @given(batches())
    def check(batch: list[Demand]) -> None:
        parts = [demands for _, demands in messages.in_parts(batch)]
        requests = [pb.AllocatePagesRequest(demands=messages.demand_messages(part)) for part in parts]
        told = [one for request in requests for one in heard(request)]
        fits = [demand for demand in batch if demand.opening is None or len(demand.opening.prompt) <= LIMIT]
        assert told == [asked(demand) for demand in fits]
        assert all(token_count(request) <= LIMIT for request in requests)

    check()


@pytest.mark.usefixtures("few_tokens")
def test_each_demand_has_its_own_answer() -> None:
    """Of steps, only those with something to hear are answered."""

    @given(batches(), st.data())
    def check(batch: list[Demand], data: st.DataObject) -> None:
        reply, expected = pb.AllocatePagesResponse(), list[tuple[str, Any]]()
        for demand in batch:
            if demand.opening is not None and len(demand.opening.prompt) > LIMIT:
                expected.append((demand.sequence_id, ExceedsPool))
                continue
            kind = data.draw(st.sampled_from(("pages", "error") if demand.opens else ("pages", "error", "nothing")))
            if kind == "pages":
                pages = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
                reply.grants.add(sequence_id=demand.sequence_id, first_index=demand.known_pages, page_ids=pages)
                expected.append((demand.sequence_id, tuple(pages)))
            elif kind == "error":
                status = status_of(CapacityExceeded("none is free", retry_after_s=0.5), "rocmforge.kvcache")
                reply.grants.add(sequence_id=demand.sequence_id, error=status)
                expected.append((demand.sequence_id, CapacityExceeded))
            else:
                expected.append((demand.sequence_id, ()))
        found = messages.grants(reply, batch)
        assert [(one.sequence_id, type(one.error) if one.error else one.pages) for one in found] == expected
        assert all(one.first_index == demand.known_pages for one, demand in zip(found, batch, strict=True) if one.pages)

    check()


def test_copies_are_told_with_their_places() -> None:
    reply = pb.AllocatePagesResponse()
    grant = reply.grants.add(sequence_id="a", first_index=0, page_ids=[3, 7], cached_tokens=6)
    grant.copies.add(index=1, source=pb.PageRef(page_id=5), target=pb.PageRef(page_id=7))
    [found] = messages.grants(reply, [Demand.of_fork("a", "b", 2)])
    assert found == Grant("a", 0, (3, 7), 6, copies=(demands.PageCopy(1, 5, 7),))


@given(st.text(max_size=20), st.sampled_from(("", "layout.layers")), st.none() | st.floats(0.001, 100))
def test_an_error_arrives_as_it_was_raised(words: str, field: str, retry: float | None) -> None:
    sent = CapacityExceeded(words, field=field, retry_after_s=retry, limit=3)
    got = error_from_status(status_of(sent, "rocmforge.kvcache"))
    assert isinstance(got, CapacityExceeded)
    assert (got.message, got.field, got.metadata) == (words, field, {"limit": "3"})
    assert got.retry_after_s == pytest.approx(0.1 if retry is None else retry, abs=1e-9)


def test_an_error_of_tomorrow_keeps_its_reason() -> None:
    status = status_of(CapacityExceeded("no"), "rocmforge.kvcache")
    status.details[0].value = status.details[0].value.replace(b"NO_PAGES", b"NO_LUNCH")
    got = error_from_status(status)
    assert (got.reason, got.code, got.message) == ("NO_LUNCH", "RESOURCE_EXHAUSTED", "no")


class Failure(grpc.RpcError):
    """A failed call with details of a status of this code."""

    def __init__(self, code: int) -> None:
        self._status = status_of(CapacityExceeded("none is free"), "rocmforge.kvcache")
        self._status.code = code

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "words of gRPC"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("other", b"1"), ("grpc-status-details-bin", self._status.SerializeToString()))


def test_details_count_only_for_the_status_that_they_are_of() -> None:
    own, foreign = error_from(Failure(8)), error_from(Failure(5))
    assert (own.reason, own.message) == ("NO_PAGES", "none is free")
    assert (foreign.reason, foreign.code, foreign.message) == ("UNKNOWN", "RESOURCE_EXHAUSTED", "words of gRPC")


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (PageLayout(1 << 32, 1, 1, 8, "f32"), "layout.page_size"),
        (PageLayout(4, 1, 1, 1 << 40, "f32"), "layout.head_dim"),
        (PageLayout(4, -1, 1, 8, "f32"), "layout.layers"),
        (OpaqueLayout(4, "label", 1 << 64), "layout.opaque.page_bytes"),
    ],
)
def test_a_number_that_no_message_carries_is_named(layout: Layout, field: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{field} is -?[0-9]+; it must be 0 to") as caught:
        messages.opening_request(
            "pool",
            layout,
            client_name="",
            engine_name="",
            model="",
            pool_pages=None,
            max_pages=None,
            ttl_s=None,
            device_ordinal=None,
        )
    assert caught.value.field == field
