"""The daemon through its wire: what a client sees, and every reason it can be told."""

# The table of reasons is one row a line.
# ruff: noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services import rpc
from services.errors import ServiceError
from tests.kvcache.conftest import LAYOUT_PB, Running

PROTO = Path(__file__).parents[2] / "protos/rocmforge/kvcache/v1/kvcache.proto"


def opening(name: str, prompt: list[int], pages: int, **fields: Any) -> pb.SequenceDemand:
    return pb.SequenceDemand(sequence_id=name, opening=pb.SequenceOpening(prompt=prompt, **fields), total_pages=pages)


def allocate(running: Running, session: str, *demands: pb.SequenceDemand, removed: tuple[str, ...] = ()) -> Any:
    return running.stub.AllocatePages(
        pb.AllocatePagesRequest(session_id=session, demands=demands, remove_sequence_ids=removed)
    )


def refused(call: Callable[[], Any]) -> ServiceError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return rpc.error_from(caught.value)


def test_a_sequence_from_opening_to_removal(running: Running) -> None:
    session = running.session()
    first = allocate(running, session, opening("a", list(range(9)), 3))
    assert [page.page_id for page in first.grants[0].pages] == [0, 1, 2]
    assert first.epoch == running.daemon.epoch
    demand = pb.SequenceDemand(sequence_id="a", tokens=range(9), known_pages=3, total_pages=4)
    second = allocate(running, session, demand)
    assert second.grants[0].first_index == 3 and len(second.grants[0].pages) == 1
    progress = running.stub.AppendTokens(
        pb.AppendTokensRequest(
            session_id=session, appends=[pb.SequenceTokens(sequence_id="a", start=9, tokens=[9, 10, 11])]
        )
    ).progress[0]
    assert (progress.total_tokens, progress.published_pages) == (12, 3)
    got = running.stub.GetSequence(
        pb.GetSequenceRequest(session_id=session, sequence_id="a", include_tokens=True)
    ).sequence
    assert list(got.tokens) == list(range(12)) and len(got.pages) == 4 and got.pool_id == "pool"
    listed = running.stub.ListSequences(pb.ListSequencesRequest()).sequences
    assert [item.sequence_id for item in listed] == ["a"] and not listed[0].pages
    reply = running.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=session, sequence_ids=["a", "b"]))
    assert [(item.sequence_id, item.removed) for item in reply.sequences] == [("a", True), ("b", False)]
    stats = running.stub.GetStats(pb.GetStatsRequest()).pools[0]
    assert (stats.active_sequences, stats.cached_pages, stats.free_pages, stats.total_pages) == (0, 3, 5, 8)
    assert stats.never_used_pages + stats.recycled_pages == stats.free_pages
    warm = allocate(running, session, opening("c", list(range(12)), 3)).grants[0]
    assert warm.cached_tokens == 8
    fsck = running.stub.Fsck(pb.FsckRequest())
    assert fsck.checked_pages == 8 and fsck.checked_sequences == 1 and not fsck.violations


def test_a_failing_item_leaves_the_others(running: Running) -> None:
    session = running.session()
    reply = allocate(
        running, session, opening("a", [1], 2), opening("b", [1], 9), opening("c", [1], 7), opening("d", [1], 1)
    )
    errors = [rpc.error_from_status(grant.error).reason if grant.HasField("error") else "" for grant in reply.grants]
    assert errors == ["", "EXCEEDS_POOL", "NO_PAGES", ""]
    no_pages = rpc.error_from_status(reply.grants[2].error)
    assert no_pages.retry_after_s == 0.1 and no_pages.metadata["free_pages"] == "6"


def test_listing_goes_page_by_page(running: Running) -> None:
    session = running.session()
    allocate(running, session, *(opening(f"s{at}", [1], 0) for at in range(5)))
    names, cursor = [], ""
    while True:
        reply = running.stub.ListSequences(pb.ListSequencesRequest(session_id=session, limit=2, cursor=cursor))
        names += [item.sequence_id for item in reply.sequences]
        cursor = reply.next_cursor
        if not cursor:
            break
    assert names == [f"s{at}" for at in range(5)]


def test_an_expired_lease(running: Running) -> None:
    session = running.session()
    allocate(running, session, opening("a", [1, 2], 1))
    running.now += 11
    assert refused(lambda: allocate(running, session)).reason == "SESSION_EXPIRED"
    running.sweep()
    stats = running.stub.GetStats(pb.GetStatsRequest())
    assert stats.expired_sessions == 1 and stats.pools[0].quarantined_pages == 1


OPEN = {"pool_id": "pool", "layout": LAYOUT_PB, "pool_pages": 8}


def open_with(running: Running, **fields: Any) -> ServiceError:
    return refused(lambda: running.stub.OpenSession(pb.OpenSessionRequest(**{**OPEN, **fields})))


def item_error(running: Running, demand: pb.SequenceDemand) -> ServiceError:
    session = running.session()
    allocate(running, session, opening("live", [1, 2], 1), opening("gone", [1], 1))
    [grant] = allocate(running, session, demand, removed=("gone",)).grants
    return rpc.error_from_status(grant.error)


def layout(**fields: int) -> pb.PageLayout:
    changed = pb.PageLayout()
    changed.CopyFrom(LAYOUT_PB)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def unattached(running: Running) -> str:
    return str(running.stub.OpenSession(pb.OpenSessionRequest(**OPEN)).session_id)


#: (rpc, what provokes it, status code, reason, field or "", words of the sentence)
REASONS: list[tuple[str, Callable[[Running], ServiceError], str, str, str, str]] = [
    *(
        (
            "OpenSession",
            lambda running, name=name: open_with(running, layout=layout(**{name: 0})),
            "INVALID_ARGUMENT",
            "INVALID_CONFIGURATION",
            f"layout.{name}",
            f"layout.{name} is (0|unset)",
        )
        for name in ("page_size", "layers", "kv_heads", "head_dim", "data_type")
    ),
    ("OpenSession", lambda r: open_with(r, layout=layout(head_dim=1025)), "INVALID_ARGUMENT", "INVALID_CONFIGURATION", "layout.head_dim", "1 to 1024"),
    ("OpenSession", lambda r: open_with(r, pool_id=""), "INVALID_ARGUMENT", "FIELD_INVALID", "pool_id", "1 to 128"),
    ("OpenSession", lambda r: open_with(r, client_name="x" * 129), "INVALID_ARGUMENT", "FIELD_INVALID", "client_name", "129"),
    ("OpenSession", lambda r: open_with(r, layout=None), "INVALID_ARGUMENT", "FIELD_INVALID", "layout", "missing"),
    ("OpenSession", lambda r: open_with(r, ttl=duration_pb2.Duration(seconds=601)), "INVALID_ARGUMENT", "FIELD_INVALID", "ttl", "1 to 600"),
    ("OpenSession", lambda r: open_with(r, pool_pages=0), "INVALID_ARGUMENT", "INVALID_CONFIGURATION", "pool_pages", "must be 1"),
    ("OpenSession", lambda r: open_with(r, pool_pages=2**31 - 1), "FAILED_PRECONDITION", "EXCEEDS_BUDGET", "pool_pages", "budget of 1048576"),
    ("OpenSession", lambda r: r.session() and open_with(r, layout=layout(page_size=8)), "FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout", "page_size=4"),  # type: ignore[return-value]
    ("OpenSession", lambda r: [r.session() for _ in range(256)] and open_with(r), "RESOURCE_EXHAUSTED", "TOO_MANY_SESSIONS", "", "256"),  # type: ignore[return-value]
    ("AttachSession", lambda r: refused(lambda: r.stub.AttachSession(pb.AttachSessionRequest(session_id="x"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AttachSession", lambda r: refused(lambda: r.stub.AttachSession(pb.AttachSessionRequest(session_id=unattached(r), seen=bytes(32)))), "FAILED_PRECONDITION", "ATTACH_MISMATCH", "seen", "canary"),
    ("RenewSession", lambda r: refused(lambda: r.stub.RenewSession(pb.RenewSessionRequest())), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x")), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, unattached(r))), "FAILED_PRECONDITION", "SESSION_NOT_ATTACHED", "", "AttachSession"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", *[pb.SequenceDemand()] * 4097)), "INVALID_ARGUMENT", "FIELD_INVALID", "demands", "4096"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", pb.SequenceDemand())), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[0].sequence_id", "1 to 128"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", removed=("",))), "INVALID_ARGUMENT", "FIELD_INVALID", "remove_sequence_ids[0]", "1 to 128"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", opening("a", [1], 1, salt="s" * 129))), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[0].opening.salt", "129"),
    ("AllocatePages", lambda r: item_error(r, opening("n", [], 1)), "INVALID_ARGUMENT", "FIELD_INVALID", "opening.prompt", "at least one"),
    ("AllocatePages", lambda r: item_error(r, pb.SequenceDemand(sequence_id="n")), "NOT_FOUND", "SEQUENCE_UNKNOWN", "", "'n'"),
    ("AllocatePages", lambda r: item_error(r, opening("gone", [1], 1)), "FAILED_PRECONDITION", "SEQUENCE_REMOVED", "", "'gone'"),
    ("AllocatePages", lambda r: item_error(r, opening("live", [9], 1)), "FAILED_PRECONDITION", "SEQUENCE_MISMATCH", "opening", "'live'"),
    ("AllocatePages", lambda r: item_error(r, pb.SequenceDemand(sequence_id="live", start=1)), "FAILED_PRECONDITION", "POSITION_MISMATCH", "", "gap"),
    ("AllocatePages", lambda r: item_error(r, opening("n", [1], 8)), "RESOURCE_EXHAUSTED", "NO_PAGES", "", "of 8, 7 free"),
    ("AllocatePages", lambda r: item_error(r, opening("n", [1], 9)), "FAILED_PRECONDITION", "EXCEEDS_POOL", "total_pages", "pool has 8"),
    ("AppendTokens", lambda r: refused(lambda: r.stub.AppendTokens(pb.AppendTokensRequest(session_id="x"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AppendTokens", lambda r: refused(lambda: r.stub.AppendTokens(pb.AppendTokensRequest(session_id=unattached(r)))), "FAILED_PRECONDITION", "SESSION_NOT_ATTACHED", "", "AttachSession"),
    ("AppendTokens", lambda r: refused(lambda: r.stub.AppendTokens(pb.AppendTokensRequest(appends=[pb.SequenceTokens()]))), "INVALID_ARGUMENT", "FIELD_INVALID", "appends[0].sequence_id", "1 to 128"),
    ("RemoveSequences", lambda r: refused(lambda: r.stub.RemoveSequences(pb.RemoveSequencesRequest(sequence_ids=[""]))), "INVALID_ARGUMENT", "FIELD_INVALID", "sequence_ids[0]", "1 to 128"),
    ("RemoveSequences", lambda r: refused(lambda: r.stub.RemoveSequences(pb.RemoveSequencesRequest())), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest())), "INVALID_ARGUMENT", "FIELD_INVALID", "sequence_id", "1 to 128"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest(sequence_id="a"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest(session_id=r.session(), sequence_id="a"))), "NOT_FOUND", "SEQUENCE_UNKNOWN", "", "'a'"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(limit=1001))), "INVALID_ARGUMENT", "FIELD_INVALID", "limit", "1000"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(cursor="x"))), "INVALID_ARGUMENT", "FIELD_INVALID", "cursor", "'x'"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(session_id="x"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("ForkSequence", lambda r: refused(lambda: r.stub.ForkSequence(pb.ForkSequenceRequest())), "UNIMPLEMENTED", "NOT_IMPLEMENTED", "", "ForkSequence"),
    ("EvictPages", lambda r: refused(lambda: r.stub.EvictPages(pb.EvictPagesRequest())), "UNIMPLEMENTED", "NOT_IMPLEMENTED", "", "EvictPages"),
    ("ExpireSequences", lambda r: refused(lambda: r.stub.ExpireSequences(pb.ExpireSequencesRequest())), "UNIMPLEMENTED", "NOT_IMPLEMENTED", "", "ExpireSequences"),
    ("WatchEvents", lambda r: refused(lambda: list(r.stub.WatchEvents(pb.WatchEventsRequest()))), "UNIMPLEMENTED", "NOT_IMPLEMENTED", "", "WatchEvents"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("provoke", "code", "reason", "field", "words"),
    [row[1:] for row in REASONS],
    ids=[f"{row[0]}-{row[3]}-{row[4]}" for row in REASONS],
)
def test_reasons(
    running: Running, provoke: Callable[[Running], ServiceError], code: str, reason: str, field: str, words: str
) -> None:
    error = provoke(running)
    assert (error.code, error.reason, error.field) == (code, reason, field)
    assert re.search(words, error.message), error.message
    assert running.stub.GetStats(pb.GetStatsRequest()).epoch == running.daemon.epoch, "the daemon goes on"
    assert not running.stub.Fsck(pb.FsckRequest()).violations


def test_every_documented_reason_is_reached() -> None:
    """The comment above each rpc lists its reasons; the table above provokes exactly those."""
    documented: dict[str, set[str]] = {}
    for comment, name in re.findall(r"((?:  //[^\n]*\n)+)  rpc (\w+)\(", PROTO.read_text()):
        assert "Reasons" in comment, f"{name} documents no reasons"
        documented[name] = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", comment))
    reached: dict[str, set[str]] = {name: set() for name in documented}
    for name, _, _, reason, _, _ in REASONS:
        reached[name].add(reason)
    # Its limit needs tens of thousands of sequences; test_cache reaches it with a small one.
    reached["AllocatePages"].add("TOO_MANY_SEQUENCES")
    # An item's reasons are one function's for both calls; GetSequence and AppendTokens differ in what they ask of it.
    reached["AppendTokens"] |= {"SEQUENCE_UNKNOWN", "SEQUENCE_REMOVED", "POSITION_MISMATCH"}
    assert reached == documented
