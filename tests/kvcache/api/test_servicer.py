# mypy: disable-error-code="arg-type, list-item"
"""The daemon over the wire: what a client sees, and every error reason."""

# The table of reasons is one row a line.
# ruff: noqa: E501

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from tests.kvcache.cache.stateful.transactions import handle_of
from tests.kvcache.clients.messages import fork, opening, report, step
from tests.kvcache.conftest import LAYOUT_PB, Running, myself

PROTO = Path(__file__).parents[3] / "protos/rocmforge/kvcache/v1/kvcache.proto"


def allocate(running: Running, session: str, *demands: pb.Demand, removed: tuple[str, ...] = ()) -> Any:
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
    assert list(first.grants[0].page_ids) == [0, 1, 2] and list(first.grants[0].generations) == [0, 0, 0]
    assert first.epoch == running.daemon.epoch
    [second] = allocate(running, session, step("a", 0, range(9), pages=4, known=3)).grants
    assert second.first_index == 3 and len(second.page_ids) == len(second.generations) == 1
    request = pb.AppendTokensRequest(session_id=session, steps=report("a", 9, [9, 10, 11]))
    assert not running.stub.AppendTokens(request).errors
    got = running.stub.GetSequence(
        pb.GetSequenceRequest(session_id=session, sequence_id="a", include_tokens=True)
    ).sequence
    assert list(got.tokens) == list(range(12)) and len(got.page_ids) == 4 and got.pool_id == "pool"
    assert list(got.page_ids) == [*first.grants[0].page_ids, *second.page_ids] and len(got.generations) == 4
    assert (got.total_tokens, got.published_pages) == (12, 3)
    listed = running.stub.ListSequences(pb.ListSequencesRequest()).sequences
    assert [item.sequence_id for item in listed] == ["a"] and not listed[0].page_ids
    reply = running.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=session, sequence_ids=["a", "b"]))
    assert (reply.removed_sequences, list(reply.absent_sequence_ids)) == (1, ["b"])
    stats = running.stub.GetStats(pb.GetStatsRequest()).pools[0]
    assert (stats.active_sequences, stats.cached_pages, stats.free_pages, stats.total_pages) == (0, 3, 5, 8)
    assert stats.never_used_pages + stats.recycled_pages == stats.free_pages
    warm = allocate(running, session, opening("c", list(range(12)), 3)).grants[0]
    assert warm.cached_tokens == 8
    fsck = running.stub.Fsck(pb.FsckRequest())
    assert fsck.checked_pages == 8 and fsck.checked_sequences == 1 and not fsck.violations


def test_a_recycled_page_is_told_apart_by_its_generation(running: Running) -> None:
    session = running.session()
    allocate(running, session, opening("old", [1], 2))
    allocate(running, session, removed=("old",))
    [grant] = allocate(running, session, opening("a", [1, 2], 3)).grants
    assert sorted(zip(grant.page_ids, grant.generations, strict=True)) == [(0, 1), (1, 1), (2, 0)]


def test_demands_are_served_in_order_in_one_call(running: Running) -> None:
    session = running.session()
    allocate(running, session, opening("a", list(range(5)), 2))
    reply = allocate(
        running,
        session,
        opening("before", [*range(4), 9]),
        step("a", 0, range(4), known=2),
        opening("after", [*range(4), 9]),
        step("a", 4, [4], pages=3, known=2),
    )
    assert [(grant.sequence_id, grant.cached_tokens) for grant in reply.grants[:2]] == [("before", 0), ("after", 4)]
    assert reply.grants[2].sequence_id == "a" and reply.grants[2].first_index == 2 and len(reply.grants) == 3
    assert reply.available_pages == 5


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


def test_a_fork_shares_until_somebody_writes(running: Running) -> None:
    session = running.session()
    allocate(running, session, opening("a", [1, 2, 3, 4, 5], 2))
    allocate(running, session, step("a", 0, [1, 2, 3, 4, 5]))
    forked = allocate(running, session, fork("b", "a"))
    assert forked.grants[0].cached_tokens == 5 and list(forked.grants[0].page_ids) == [0, 1]
    assert allocate(running, session, fork("b", "a")) == forked
    for _ in range(2):
        [copy] = allocate(running, session, step("b", 5, pages=2, known=2)).grants[0].copies
        assert (copy.index, copy.source.page_id, copy.target.page_id) == (1, 1, 2)
    assert not allocate(running, session, step("b", 5, [9], pages=2, known=2)).grants
    assert not running.stub.Fsck(pb.FsckRequest()).violations


def test_a_prompt_is_explained(running: Running) -> None:
    session = running.session()
    publish(running, session, "a", list(range(8)))
    request = pb.ExplainPrefixRequest(pool_id="pool", prompt=[0, 1, 2, 3, 4, 5, 9, 9, 9])
    hit, diverged, last = running.stub.ExplainPrefix(request).pages
    assert hit.outcome == pb.PAGE_OUTCOME_HIT and hit.page.page_id == 0
    assert diverged.outcome == pb.PAGE_OUTCOME_DIVERGED and diverged.diverged_at == 6
    assert last.outcome == pb.PAGE_OUTCOME_LAST_TOKEN


def test_operators_evict_expire_and_drop(running: Running) -> None:
    session = running.session()
    allocate(running, session, opening("a", list(range(9)), 3), opening("idle", [1], 1))
    allocate(running, session, step("a", 0, range(9)))
    allocate(running, session, removed=("a",))
    assert running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", max_pages=1)).evicted_pages == 1
    assert running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool")).evicted_pages == 1
    running.now += 5
    older = duration_pb2.Duration(seconds=6)
    assert running.stub.ExpireSequences(pb.ExpireSequencesRequest(older_than=older)).expired_sequences == 0
    older = duration_pb2.Duration(seconds=5)
    assert running.stub.ExpireSequences(pb.ExpireSequencesRequest(older_than=older)).expired_sequences == 1
    stats = running.stub.GetStats(pb.GetStatsRequest())
    assert stats.expired_sequences == 1 and stats.pools[0].quarantined_pages == 1
    running.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
    running.now += 31
    running.sweep()
    running.stub.DropPool(pb.DropPoolRequest(pool_id="pool"))
    stats = running.stub.GetStats(pb.GetStatsRequest())
    assert not stats.pools and stats.arena_bytes == 0


def retention(ttl_s: float, priority: int) -> pb.Retention:
    message = pb.Retention(priority=priority)
    message.ttl.FromNanoseconds(round(ttl_s * 1e9))
    return message


def test_a_retained_prefix_survives_until_its_time_is_over(running: Running) -> None:
    session, system = running.session(), list(range(8))
    asked = retention(30.001, 80)
    allocate(running, session, opening("system", system, 2, retention=asked))
    allocate(running, session, step("system", 0, system))
    get = pb.GetSequenceRequest(session_id=session, sequence_id="system")
    assert running.stub.GetSequence(get).sequence.retention == asked
    allocate(running, session, fork("child", "system"))
    get.sequence_id = "child"
    assert running.stub.GetSequence(get).sequence.retention == asked
    allocate(running, session, removed=("system", "child"))

    def hits(name: str) -> int:
        grant = allocate(running, session, opening(name, [*system, 99], 3)).grants[0]
        allocate(running, session, removed=(name,))
        return int(grant.cached_tokens)

    def fill(turn: int) -> None:
        for at in range(8):
            publish(running, session, f"fill-{turn}-{at}", [100 + turn * 8 + at] * 12)

    fill(0)
    stats = running.stub.GetStats(pb.GetStatsRequest()).pools[0]
    assert (stats.retained_pages, stats.cached_pages) == (2, 7) and stats.evicted_pages > 10
    assert hits("early") == 8
    evicted = running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))
    assert evicted.evicted_pages > 0 and evicted.retained_pages == 2
    for _ in range(3):  # the lease is 10 s
        running.now += 9
        running.stub.RenewSession(pb.RenewSessionRequest(session_id=session))
    fill(1)
    assert hits("late") == 8
    running.now += 3.002
    running.sweep()
    assert running.stub.GetStats(pb.GetStatsRequest()).pools[0].retained_pages == 0
    fill(2)
    assert hits("too-late") == 0


def test_operators_evict_retained_pages_when_they_say_so(running: Running) -> None:
    session = running.session()
    publish(running, session, "other", [7] * 8)
    allocate(running, session, opening("kept", [8] * 5, 2, retention=retention(60, 1)))
    allocate(running, session, step("kept", 0, [8] * 5))
    allocate(running, session, removed=("kept",))
    told = []
    for fields in ({}, {"include_retained": True}):
        reply = running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", **fields))
        told.append((reply.evicted_pages, reply.retained_pages))
    assert told == [(2, 1), (1, 0)]
    assert running.stub.GetStats(pb.GetStatsRequest()).pools[0].cached_pages == 0
    assert not running.stub.Fsck(pb.FsckRequest()).violations


class Router:
    """A reader of WatchEvents that keeps a map of what is cached."""

    def __init__(self, running: Running, **fields: Any) -> None:
        self.known: set[tuple[str, int]] = set()
        self.resets: list[int] = []
        self.number = 0
        self._stream = running.stub.WatchEvents(pb.WatchEventsRequest(**fields), timeout=100)

    def read_until(self, done: Callable[[], bool]) -> None:
        while not done():
            answer = next(self._stream)
            self.number = answer.sequence_number
            kind = answer.WhichOneof("event")
            if kind == "reset":
                self.known.clear()
                self.resets.append(answer.reset.reason)
                continue
            links = getattr(answer, kind)
            hashes = {(links.pool_id, hash_) for hash_ in links.hashes}
            assert len(links.hashes) == len(links.parent_hashes)
            if kind == "stored":
                assert not hashes & self.known, "stored twice"
                self.known |= hashes
            else:
                assert hashes <= self.known, "gone, and was never stored"
                self.known -= hashes

    def close(self) -> None:
        self._stream.cancel()


def cached(running: Running) -> set[tuple[str, int]]:
    return {(pool.id, link.hash) for pool in running.daemon.cache.pools for link in pool.index.links()}


def publish(running: Running, session: str, name: str, tokens: list[int]) -> None:
    count = len(tokens) // 4 + 1
    allocate(running, session, opening(name, tokens, count))
    allocate(running, session, step(name, 0, tokens))
    allocate(running, session, removed=(name,))


def test_a_router_keeps_a_true_map(running: Running) -> None:
    session = running.session()
    publish(running, session, "before", list(range(8)))
    router = Router(running)
    router.read_until(lambda: len(router.known) == 2)
    assert router.resets == [pb.RESET_REASON_START]
    for at in range(30):
        publish(running, session, f"s{at}", [at, at, at, at, 9, 9, 9, 9, at])
    router.read_until(lambda: router.known == cached(running))
    running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", max_pages=3))
    router.read_until(lambda: router.known == cached(running))
    resumed = Router(running, after_sequence_number=router.number, epoch=running.daemon.epoch)
    resumed.known = set(router.known)
    publish(running, session, "after", [7] * 4)
    resumed.read_until(lambda: resumed.known == cached(running))
    assert resumed.resets == []
    running.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
    running.stub.DropPool(pb.DropPoolRequest(pool_id="pool"))
    router.read_until(lambda: not router.known)
    router.close()
    resumed.close()


def test_a_router_that_fell_behind_or_met_a_restart_is_told(running: Running) -> None:
    session = running.session()
    for at in range(8):
        publish(running, session, f"s{at}", [at] * 4)
    ring = running.daemon.cache.events
    assert ring.last_number
    for fields, why in (
        ({"after_sequence_number": 1, "epoch": 5}, pb.RESET_REASON_NEW_EPOCH),
        ({"after_sequence_number": 10**9, "epoch": running.daemon.epoch}, pb.RESET_REASON_GAP),
    ):
        router = Router(running, **fields)
        router.read_until(lambda router=router: router.known == cached(running))  # type: ignore[misc]
        assert router.resets == [why]
        router.close()


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


def item_error(running: Running, demand: pb.Demand) -> ServiceError:
    session = running.session()
    allocate(running, session, opening("live", [1, 2], 1), opening("gone", [1], 1))
    [grant] = allocate(running, session, demand, removed=("gone",)).grants
    return rpc.error_from_status(grant.error)


def over_quota(running: Running) -> ServiceError:
    session = running.session(max_pages=2)
    allocate(running, session, opening("a", [1], 2))
    return rpc.error_from_status(allocate(running, session, opening("b", [1], 1)).grants[0].error)


def append_error(running: Running, name: str, **fields: Any) -> ServiceError:
    session = running.session()
    allocate(running, session, opening("live", [1, 2], 1), opening("gone", [1], 1))
    allocate(running, session, removed=("gone",))
    request = pb.AppendTokensRequest(session_id=session, steps=report(name, **fields))
    return rpc.error_from_status(running.stub.AppendTokens(request).errors[0].error)


def short_of_memory(running: Running, call: Callable[[str], ServiceError]) -> ServiceError:
    """What a session hears when nothing more fits into the daemon's own memory."""
    session, memory = running.session(), running.daemon.cache.memory
    allocate(running, session, opening("live", [1, 2], 1), opening("salted", [1, 2], 1, salt="s"))
    limit, memory.limit = memory.limit, memory.used
    try:
        return call(session)
    finally:
        memory.limit = limit


def grown(running: Running, session: str) -> ServiceError:
    return rpc.error_from_status(allocate(running, session, opening("n", [1], 1)).grants[0].error)


def salted(running: Running, session: str) -> ServiceError:
    steps = report("salted", tokens=[1, 2, 3, 4])
    request = pb.AppendTokensRequest(session_id=session, steps=steps)
    return rpc.error_from_status(running.stub.AppendTokens(request).errors[0].error)


def get_removed(running: Running) -> ServiceError:
    session = running.session()
    allocate(running, session, removed=("gone",))
    return refused(lambda: running.stub.GetSequence(pb.GetSequenceRequest(session_id=session, sequence_id="gone")))


def watch_until_drained(running: Running) -> ServiceError:
    router = Router(running)
    router.read_until(lambda: bool(router.resets))
    running.call(running.drain)
    return refused(lambda: router.read_until(lambda: False))


def layout(**fields: int) -> pb.PageLayout:
    changed = pb.PageLayout()
    changed.CopyFrom(LAYOUT_PB)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def opaque(label: str = "a", page_bytes: int = 128, layers: int = 0) -> pb.PageLayout:
    """As many bytes a page as the layout of the other sessions has."""
    return pb.PageLayout(page_size=4, layers=layers, opaque=pb.OpaquePage(label=label, page_bytes=page_bytes))


def unattached(running: Running) -> str:
    return str(running.stub.OpenSession(pb.OpenSessionRequest(**OPEN)).session_id)


#: (rpc, what provokes it, status code, reason, field or "", words of the sentence)
def lost_and_alive(running: Running) -> str:
    """A lost session of this process, as the daemon names it."""
    session = running.session(process=myself())
    running.now += 11
    running.sweep()
    return handle_of(session)


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
    ("OpenSession", lambda r: open_with(r, layout=opaque(page_bytes=0)), "INVALID_ARGUMENT", "INVALID_CONFIGURATION", "layout.opaque.page_bytes", "is 0"),
    ("OpenSession", lambda r: open_with(r, layout=opaque(label="")), "INVALID_ARGUMENT", "FIELD_INVALID", "layout.opaque.label", "1 to 128"),
    ("OpenSession", lambda r: open_with(r, layout=opaque(layers=2)), "INVALID_ARGUMENT", "INVALID_CONFIGURATION", "layout.layers", "must be unset"),
    ("OpenSession", lambda r: r.session(layout=opaque()) and open_with(r, layout=opaque(label="b")), "FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout", "label=a"),  # type: ignore[return-value]
    ("OpenSession", lambda r: r.session() and open_with(r, layout=opaque()), "FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout", "label=a"),  # type: ignore[return-value]
    ("OpenSession", lambda r: open_with(r, pool_id=""), "INVALID_ARGUMENT", "FIELD_INVALID", "pool_id", "1 to 128"),
    ("OpenSession", lambda r: open_with(r, client_name="x" * 129), "INVALID_ARGUMENT", "FIELD_INVALID", "client_name", "129"),
    ("OpenSession", lambda r: open_with(r, layout=None), "INVALID_ARGUMENT", "FIELD_INVALID", "layout", "missing"),
    ("OpenSession", lambda r: open_with(r, ttl=duration_pb2.Duration(seconds=601)), "INVALID_ARGUMENT", "FIELD_INVALID", "ttl", "1 to 600"),
    ("OpenSession", lambda r: open_with(r, pool_pages=0), "INVALID_ARGUMENT", "INVALID_CONFIGURATION", "pool_pages", "must be 1"),
    ("OpenSession", lambda r: open_with(r, pool_pages=4_000_000), "FAILED_PRECONDITION", "EXCEEDS_BUDGET", "pool_pages", "budget of 1048576"),
    ("OpenSession", lambda r: r.session() and open_with(r, layout=layout(page_size=8)), "FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout", "page_size=4"),  # type: ignore[return-value]
    ("OpenSession", lambda r: [r.session() for _ in range(64)] and open_with(r), "RESOURCE_EXHAUSTED", "TOO_MANY_SESSIONS", "", "64 sessions, the limit of one identity"),  # type: ignore[return-value]
    ("AttachSession", lambda r: refused(lambda: r.stub.AttachSession(pb.AttachSessionRequest(session_id="x"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AttachSession", lambda r: refused(lambda: r.stub.AttachSession(pb.AttachSessionRequest(session_id=unattached(r), seen=bytes(32)))), "FAILED_PRECONDITION", "ATTACH_MISMATCH", "seen", "canary"),
    ("RenewSession", lambda r: refused(lambda: r.stub.RenewSession(pb.RenewSessionRequest())), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x")), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, unattached(r))), "FAILED_PRECONDITION", "SESSION_NOT_ATTACHED", "", "AttachSession"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", *[step("a")] * 4000, *[opening("b", [1])] * 97)), "INVALID_ARGUMENT", "FIELD_INVALID", "demands", "4097 sequences; they may be of 4096"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", step("a"), opening("", [1]))), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[1].opening.sequence_id", "1 to 128"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", step("a"), pb.Demand())), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[1]", "neither steps nor an opening"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", pb.Demand(opening=pb.SequenceOpening(sequence_id="a")))), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[0].opening", "neither a prompt nor a parent_sequence_id"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", removed=("",))), "INVALID_ARGUMENT", "FIELD_INVALID", "remove_sequence_ids[0]", "1 to 128"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", opening("a", [1], 1, salt="s" * 129))), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[0].opening.prompt.salt", "129"),
    ("AllocatePages", lambda r: item_error(r, opening("n", [], 1)), "INVALID_ARGUMENT", "FIELD_INVALID", "prompt.tokens", "at least one"),
    *(
        ("AllocatePages", lambda r, bad=bad: item_error(r, opening("n", [1], 1, retention=bad)), "INVALID_ARGUMENT", "FIELD_INVALID", f"prompt.retention.{field}", words)
        for bad, field, words in (
            (retention(0, 1), "ttl", "above 0 s"),
            (retention(86400.5, 1), "ttl", "at most 86400 s"),
            (pb.Retention(priority=5), "ttl", "is 0 s"),
            (retention(1, 0), "priority", "is 0; it must be 1 to 100"),
            (retention(1, 101), "priority", "is 101"),
        )
    ),
    *(
        ("AllocatePages", lambda r, bad=bad: item_error(r, opening("n", [1], 1, reuse_hint=bad)), "INVALID_ARGUMENT", "FIELD_INVALID", f"prompt.reuse_hint.{field}", words)
        for bad, field, words in (
            (pb.ReuseHint(category="x" * 65), "category", "has 65 characters; it may have 64"),
            (pb.ReuseHint(turn=1_000_001), "turn", "is 1000001"),
            (pb.ReuseHint(expected_return=duration_pb2.Duration()), "expected_return", "is 0 s; it must be above 0 s"),
            (pb.ReuseHint(expected_return=duration_pb2.Duration(seconds=86401)), "expected_return", "at most 86400 s"),
        )
    ),
    ("AllocatePages", lambda r: item_error(r, opening("live", [1, 2], 1, retention=retention(1, 1))), "FAILED_PRECONDITION", "SEQUENCE_MISMATCH", "prompt", "retention"),
    ("AllocatePages", lambda r: item_error(r, step("n")), "NOT_FOUND", "SEQUENCE_UNKNOWN", "", "'n'"),
    ("AllocatePages", lambda r: item_error(r, opening("gone", [1], 1)), "FAILED_PRECONDITION", "SEQUENCE_REMOVED", "", "'gone'"),
    ("AllocatePages", lambda r: item_error(r, opening("live", [9], 1)), "FAILED_PRECONDITION", "SEQUENCE_MISMATCH", "prompt", "'live'"),
    ("AllocatePages", lambda r: item_error(r, step("live", 1)), "FAILED_PRECONDITION", "POSITION_MISMATCH", "", "gap"),
    ("AllocatePages", lambda r: refused(lambda: allocate(r, "x", fork("n", "p" * 129))), "INVALID_ARGUMENT", "FIELD_INVALID", "demands[0].opening.parent_sequence_id", "129"),
    ("AllocatePages", lambda r: item_error(r, fork("n", "none")), "NOT_FOUND", "SEQUENCE_UNKNOWN", "", "'none'"),
    ("AllocatePages", lambda r: item_error(r, fork("n", "gone")), "FAILED_PRECONDITION", "SEQUENCE_REMOVED", "", "'gone'"),
    ("AllocatePages", lambda r: item_error(r, fork("live", "other")), "FAILED_PRECONDITION", "SEQUENCE_MISMATCH", "parent_sequence_id", "no fork of 'other'"),
    ("AllocatePages", lambda r: item_error(r, opening("n", [1], 8)), "RESOURCE_EXHAUSTED", "NO_PAGES", "", "of 8, 7 free"),
    ("AllocatePages", lambda r: item_error(r, opening("n", [1], 9)), "FAILED_PRECONDITION", "EXCEEDS_POOL", "total_pages", "pool has 8"),
    ("AppendTokens", lambda r: refused(lambda: r.stub.AppendTokens(pb.AppendTokensRequest(session_id="x"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AppendTokens", lambda r: refused(lambda: r.stub.AppendTokens(pb.AppendTokensRequest(session_id=unattached(r)))), "FAILED_PRECONDITION", "SESSION_NOT_ATTACHED", "", "AttachSession"),
    ("AppendTokens", lambda r: refused(lambda: r.stub.AppendTokens(pb.AppendTokensRequest(steps=report("")))), "INVALID_ARGUMENT", "FIELD_INVALID", "steps.sequence_ids[0]", "1 to 128"),
    ("AppendTokens", lambda r: append_error(r, "none"), "NOT_FOUND", "SEQUENCE_UNKNOWN", "", "'none'"),
    ("AppendTokens", lambda r: append_error(r, "gone"), "FAILED_PRECONDITION", "SEQUENCE_REMOVED", "", "'gone'"),
    ("AppendTokens", lambda r: append_error(r, "live", start=1), "FAILED_PRECONDITION", "POSITION_MISMATCH", "", "gap"),
    ("GetSequence", lambda r: get_removed(r), "FAILED_PRECONDITION", "SEQUENCE_REMOVED", "", "'gone'"),
    ("WatchEvents", lambda r: watch_until_drained(r), "UNAVAILABLE", "DRAINING", "", "shutting down"),
    ("RemoveSequences", lambda r: refused(lambda: r.stub.RemoveSequences(pb.RemoveSequencesRequest(sequence_ids=[""]))), "INVALID_ARGUMENT", "FIELD_INVALID", "sequence_ids[0]", "1 to 128"),
    ("RemoveSequences", lambda r: refused(lambda: r.stub.RemoveSequences(pb.RemoveSequencesRequest())), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest())), "INVALID_ARGUMENT", "FIELD_INVALID", "sequence_id", "1 to 128"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest(sequence_id="a"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest(session_id="x", session_handle="y", sequence_id="a"))), "INVALID_ARGUMENT", "FIELD_INVALID", "session_handle", "both set"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(session_id="x", session_handle="y"))), "INVALID_ARGUMENT", "FIELD_INVALID", "session_handle", "both set"),
    ("GetSequence", lambda r: refused(lambda: r.stub.GetSequence(pb.GetSequenceRequest(session_id=r.session(), sequence_id="a"))), "NOT_FOUND", "SEQUENCE_UNKNOWN", "", "'a'"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(limit=1001))), "INVALID_ARGUMENT", "FIELD_INVALID", "limit", "1000"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(cursor="x"))), "INVALID_ARGUMENT", "FIELD_INVALID", "cursor", "'x'"),
    ("ListSequences", lambda r: refused(lambda: r.stub.ListSequences(pb.ListSequencesRequest(session_id="x"))), "FAILED_PRECONDITION", "SESSION_EXPIRED", "", "open a new one"),
    ("AllocatePages", lambda r: item_error(r, step("live", 0, known=2)), "INVALID_ARGUMENT", "FIELD_INVALID", "known_pages", "known_pages is 2"),
    ("AllocatePages", lambda r: over_quota(r), "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", "", "quota is 2"),
    ("OpenSession", lambda r: short_of_memory(r, lambda _: open_with(r, pool_id="other")), "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXCEEDED", "pool_pages", "'other' of 8 pages needs [0-9]+ bytes .* --host-memory"),
    ("AllocatePages", lambda r: short_of_memory(r, lambda s: grown(r, s)), "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXCEEDED", "", "'n' needs .* --host-memory"),
    ("AppendTokens", lambda r: short_of_memory(r, lambda s: salted(r, s)), "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXCEEDED", "", "'salted' needs .* --host-memory"),
    ("RemoveSequences", lambda r: short_of_memory(r, lambda s: refused(lambda: r.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=s, sequence_ids=["new"])))), "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXCEEDED", "", "remember 1 removed"),
    ("OpenSession", lambda r: open_with(r, device_ordinal=0), "INVALID_ARGUMENT", "FIELD_INVALID", "device_ordinal", "leave it unset"),
    ("OpenSession", lambda r: open_with(r, max_pages=0), "INVALID_ARGUMENT", "FIELD_INVALID", "max_pages", "at least one"),
    ("ExplainPrefix", lambda r: refused(lambda: r.stub.ExplainPrefix(pb.ExplainPrefixRequest(pool_id="none", prompt=[1]))), "NOT_FOUND", "POOL_UNKNOWN", "pool_id", "'none'"),
    ("ExplainPrefix", lambda r: refused(lambda: r.session() and r.stub.ExplainPrefix(pb.ExplainPrefixRequest(pool_id="pool"))), "INVALID_ARGUMENT", "FIELD_INVALID", "prompt", "at least one"),
    ("EvictPages", lambda r: refused(lambda: r.stub.EvictPages(pb.EvictPagesRequest(pool_id="none"))), "NOT_FOUND", "POOL_UNKNOWN", "pool_id", "'none'"),
    ("ExpireSequences", lambda r: refused(lambda: r.stub.ExpireSequences(pb.ExpireSequencesRequest())), "INVALID_ARGUMENT", "FIELD_INVALID", "older_than", "0 s or more"),
    ("ReleaseQuarantine", lambda r: refused(lambda: r.stub.ReleaseQuarantine(pb.ReleaseQuarantineRequest(session_handle=r.session()))), "NOT_FOUND", "QUARANTINE_UNKNOWN", "session_handle", "no lost session"),
    ("ReleaseQuarantine", lambda r: refused(lambda: r.stub.ReleaseQuarantine(pb.ReleaseQuarantineRequest(session_handle=lost_and_alive(r)))), "FAILED_PRECONDITION", "ENGINE_ALIVE", "session_handle", f"process {os.getpid()} is alive"),
    ("DropPool", lambda r: refused(lambda: r.stub.DropPool(pb.DropPoolRequest(pool_id="none"))), "NOT_FOUND", "POOL_UNKNOWN", "pool_id", "'none'"),
    ("DropPool", lambda r: refused(lambda: r.session() and r.stub.DropPool(pb.DropPoolRequest(pool_id="pool"))), "FAILED_PRECONDITION", "POOL_IN_USE", "pool_id", "1 sessions"),
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
        documented[name] = set(re.findall(r"\b(?:DRAINING|[A-Z]+(?:_[A-Z]+)+)\b", comment))
    reached: dict[str, set[str]] = {name: set() for name in documented}
    for name, _, _, reason, _, _ in REASONS:
        reached[name].add(reason)
    # Its limit needs tens of thousands of sequences; test_cache reaches it with a small one.
    reached["AllocatePages"].add("TOO_MANY_SEQUENCES")
    # A daemon without checksums has nothing to read for; test_scrubber starts one.
    reached["Fsck"].add("FIELD_INVALID")
    # test_devicearena provokes these on GPUs.
    reached["OpenSession"] |= {"ATTACH_BUSY", "GPU_ERROR"}
    # test_identity needs several callers for these, or another limit.
    reached["OpenSession"] |= {"EXCEEDS_SHARE", "TOO_MANY_POOLS"}
    reached["AttachSession"].add("GPU_ERROR")
    # And test_zeroing these.
    reached["AllocatePages"].add("GPU_ERROR")
    reached["GetSequence"].add("GPU_ERROR")
    # A daemon with lower tiers says this, as test_tiered_daemon's does.
    reached["AllocatePages"].add("PAGES_FILLING")
    assert reached == documented


@pytest.mark.parametrize("body", [b"\x0a\x02\xff\xfe", b"\x0a\xff"], ids=["UTF-8", "wire format"])
def test_a_message_that_cannot_be_read(running: Running, body: bytes) -> None:
    call = running.channel.unary_unary("/rocmforge.kvcache.v1.KvCacheService/OpenSession")
    error = refused(lambda: call(body))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_INVALID")
    assert "OpenSessionRequest" in error.message
