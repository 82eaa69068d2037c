# mypy: disable-error-code="arg-type, comparison-overlap, misc, union-attr"
"""Calls that meet: each order of each pair, replies that are lost, and requests that arrive late or twice.

Over real connections, with the clock in the test's hands and nobody sweeping but the test. Where two calls race, both
are in flight, and the one that loses is held at the server's door until the other is through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from tests.kvcache.api.wire import Loop, Wire
from tests.kvcache.cache import demands
from tests.kvcache.cache.demands import Step
from tests.kvcache.cache.stateful.transactions import (
    Allocate,
    Append,
    Close,
    Evict,
    Expire,
    Get,
    Grant,
    Granted,
    Kill,
    Open,
    Operation,
    PassTime,
    Recorded,
    Refused,
    Release,
    Remove,
    Removed,
    Renew,
    Sweep,
    Table,
)
from tests.kvcache.fakes import World

TTL_S = 10.0
DRAIN_S = 30.0
PAGES = 12


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.close()


def world(epoch: int = 7) -> World:
    one = World(PAGES, default_ttl_s=TTL_S, drain_s=DRAIN_S)
    one.cache.epoch = epoch
    return one


@pytest.fixture
def wire(loop: Loop, tmp_path: Path) -> Iterator[Wire]:
    """A daemon of 12 pages of 4 tokens."""
    one = Wire(world(), loop, tmp_path)
    yield one
    assert one.violations() == []
    one.close()


def opened(wire: Wire, pid: int = 2) -> str:
    return str(wire.ask(Open(pid, None)))


def opening(session: str, name: str, prompt: list[int], pages: int) -> Allocate:
    return Allocate(session, (demands.opening(name, prompt, pages),))


def fork(session: str, name: str, parent: str) -> Allocate:
    return Allocate(session, (demands.fork(name, parent),))


def step(session: str, name: str, start: int, tokens: list[int], pages: int, known: int = 0) -> Allocate:
    return Allocate(session, (demands.growth(name, start, tokens, pages, known),))


def report(session: str, name: str, start: int, tokens: list[int]) -> Append:
    return Append(session, (Step(name, start, tuple(tokens)),))


def running(wire: Wire, name: str = "a") -> str:
    """A session with a sequence of 6 tokens in 3 pages: one is complete, and shared with whoever has the prefix."""
    session = opened(wire)
    granted(wire.ask(opening(session, name, [1, 2, 3, 4, 5, 6], 3)))
    recorded(wire.ask(report(session, name, 0, [1, 2, 3, 4, 5, 6])))
    return session


def granted(answer: Any) -> Grant:
    """The one grant of an answer."""
    assert isinstance(answer, Granted), answer
    [(_, grant)] = answer.told
    assert isinstance(grant, Grant), grant
    return grant


def recorded(answer: Any) -> None:
    assert answer == Recorded(())


def reached(wire: Wire, session: str, name: str = "a") -> tuple[int, int]:
    """Tokens and published pages of a sequence."""
    table = wire.ask(Get(session, name))
    assert isinstance(table, Table), table
    return len(table.tokens), table.published_pages


def reason(answer: Any) -> str:
    """Why the call, or its one item, was refused."""
    if isinstance(answer, Granted):
        [(_, answer)] = answer.told
    if isinstance(answer, Recorded):
        [(_, answer)] = answer.failed
    assert isinstance(answer, Refused), answer
    return answer.reason


def counts(wire: Wire) -> dict[str, int]:
    names = ("free", "held", "cached", "quarantined")
    stats = wire.stats()
    return {name: stats[f"{name}_pages"] for name in names if stats[f"{name}_pages"]}


def state(wire: Wire) -> object:
    """All there is but leases, and when and how often what was used."""

    def read() -> object:
        cache = wire.world.cache
        sessions = [
            (session.id, session.attached, session.held_pages, sorted(session.removed), sorted(session.sequences))
            for session in cache._sessions.all()
        ]
        pools = [
            (
                sorted((one.session_id, one.id, one.pages, list(one.tokens), one.copy) for one in pool.sequences),
                [(pool.table.state(page), pool.table.generation(page)) for page in range(pool.table.total)],
                list(pool.table.cached),
            )
            for pool in cache.pools
        ]
        return sessions, pools

    return wire.loop.run(read)


def calls_of(session: str) -> list[Operation]:
    """Every call that a live session may make of its sequence "a"."""
    return [
        Renew(session),
        opening(session, "b", [7], 1),
        step(session, "a", 6, [7], 3),
        report(session, "a", 6, [7]),
        fork(session, "b", "a"),
        Remove(session, ("a",)),
        Get(session, "a"),
    ]


# --- a lease ends, and a call renews it -------------------------------------------------------------------------------


def test_a_renewal_just_before_the_deadline_beats_the_sweep_at_it(wire: Wire) -> None:
    session = running(wire)
    wire.ask(PassTime(TTL_S - 0.001))
    assert wire.ask(Renew(session)) == TTL_S
    wire.ask(PassTime(0.001))
    assert wire.ask(Sweep()) == frozenset()
    assert counts(wire) == {"free": 9, "held": 3}
    wire.ask(PassTime(TTL_S - 0.001))
    assert wire.ask(Sweep()) == {session}, "the renewed lease ends when it says"


def test_at_the_deadline_the_lease_is_over_whoever_comes_first(loop: Loop, tmp_path: Path) -> None:
    ends = []
    for calls in ((Renew, Sweep), (Sweep, Renew)):
        wire = Wire(world(), loop, tmp_path)
        session = running(wire)
        wire.ask(PassTime(TTL_S))
        for call in calls:
            if call is Renew:
                assert reason(wire.ask(Renew(session))) == "SESSION_EXPIRED"
            else:
                assert wire.ask(Sweep()) == {session}
        assert counts(wire) == {"free": 9, "cached": 1, "quarantined": 2}
        ends.append(state(wire))
        wire.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("nth", range(7), ids=[type(call).__name__ for call in calls_of("")])
def test_no_call_at_the_deadline_revives_a_session_or_does_anything(wire: Wire, nth: int) -> None:
    session = running(wire)
    wire.ask(PassTime(TTL_S))
    before = state(wire)
    assert reason(wire.ask(calls_of(session)[nth])) == "SESSION_EXPIRED"
    assert state(wire) == before
    assert wire.ask(Sweep()) == {session}


def test_a_call_that_waits_while_its_lease_ends_is_too_late(wire: Wire) -> None:
    session = running(wire)
    *_, late = wire.overtaken(step(session, "a", 6, [7], 4, 3), PassTime(TTL_S), Sweep())
    assert reason(late) == "SESSION_EXPIRED"
    assert counts(wire) == {"free": 9, "cached": 1, "quarantined": 2}


def test_closing_at_the_deadline_and_after_it_frees_at_once(wire: Wire) -> None:
    session = running(wire)
    wire.ask(PassTime(TTL_S))
    assert wire.ask(Close(session)) == 1, "the engine vouches that it touches no page any more"
    assert counts(wire) == {"free": 11, "cached": 1}
    other = opened(wire)
    granted(wire.ask(opening(other, "a", [9], 2)))
    wire.ask(PassTime(TTL_S))
    assert wire.ask(Sweep()) == {other}
    assert counts(wire) == {"free": 9, "cached": 1, "quarantined": 2}
    wire.ask(PassTime(100 * DRAIN_S))
    wire.ask(Sweep())
    assert counts(wire) == {"free": 9, "cached": 1, "quarantined": 2}, "no time frees them"
    assert wire.ask(Close(other)) == 0, "it vouches for a session that is lost, too"
    assert counts(wire) == {"free": 11, "cached": 1}


def test_a_removal_of_what_expired_vouches_for_its_pages_alone(wire: Wire) -> None:
    session = running(wire)
    granted(wire.ask(opening(session, "b", [9], 2)))
    assert wire.ask(Expire(0.0)) == 2
    assert counts(wire) == {"free": 7, "held": 1, "quarantined": 4}
    assert reason(wire.ask(report(session, "a", 6, [7]))) == "SEQUENCE_REMOVED"
    wire.ask(Allocate(session, (), ("a",)))
    assert counts(wire) == {"free": 9, "cached": 1, "quarantined": 2}
    assert wire.ask(Remove(session, ("b",))) == Removed(0, ("b",), PAGES)
    assert counts(wire) == {"free": 11, "cached": 1}


def test_a_process_proven_gone_loses_its_session_though_its_lease_was_just_renewed(wire: Wire) -> None:
    session = running(wire)
    assert wire.ask(Renew(session)) == TTL_S
    wire.ask(Kill(2))
    assert wire.ask(Sweep()) == {session}
    assert reason(wire.ask(Renew(session))) == "SESSION_EXPIRED"
    assert counts(wire) == {"free": 11, "cached": 1}


@pytest.mark.parametrize("used", [True, False])
def test_a_use_at_the_last_moment_keeps_a_sequence_from_expiring(wire: Wire, used: bool) -> None:
    session = running(wire)
    wire.ask(PassTime(5.0))
    if used:
        assert isinstance(wire.ask(Get(session, "a")), Table)
    assert wire.ask(Expire(5.0)) == (0 if used else 1)
    after = wire.ask(report(session, "a", 6, [7]))
    if used:
        recorded(after)
        assert reached(wire, session) == (7, 1)
    else:
        assert reason(after) == "SEQUENCE_REMOVED"
        assert counts(wire) == {"free": 9, "held": 1, "quarantined": 2}, "its engine may be in a step there"


def test_an_append_that_waits_while_its_sequence_expires_is_refused(wire: Wire) -> None:
    session = running(wire)
    expired, late = wire.overtaken(report(session, "a", 6, [7, 8]), Expire(0.0))
    assert expired == 1 and reason(late) == "SEQUENCE_REMOVED"
    assert counts(wire) == {"free": 9, "held": 1, "quarantined": 2}


# --- a removal, and the calls it meets --------------------------------------------------------------------------------


def test_an_append_before_the_removal_publishes_what_it_completes(wire: Wire) -> None:
    session = running(wire)
    appended, removed = wire.overtaken(Remove(session, ("a",)), report(session, "a", 6, [7, 8]))
    recorded(appended)
    assert removed == Removed(1, (), PAGES)
    assert counts(wire) == {"free": 10, "cached": 2}


def test_an_append_overtaken_by_the_removal_publishes_nothing(wire: Wire) -> None:
    session = running(wire)
    removed, late = wire.overtaken(report(session, "a", 6, [7, 8]), Remove(session, ("a",)))
    assert removed == Removed(1, (), PAGES) and reason(late) == "SEQUENCE_REMOVED"
    assert counts(wire) == {"free": 11, "cached": 1}


def test_in_one_call_the_removal_comes_first(wire: Wire) -> None:
    session = running(wire)
    for demand in (demands.growth("a", 6, [7], 4), demands.opening("a", [1, 2, 3, 4, 5, 6], 3)):
        assert reason(wire.ask(Allocate(session, (demand,), ("a",)))) == "SEQUENCE_REMOVED"
        assert counts(wire) == {"free": 11, "cached": 1}


def test_a_growth_overtaken_by_the_removal_takes_no_page(wire: Wire) -> None:
    session = running(wire)
    _, late = wire.overtaken(step(session, "a", 6, [], 9, 3), Remove(session, ("a",)))
    assert reason(late) == "SEQUENCE_REMOVED"
    assert counts(wire) == {"free": 11, "cached": 1}


def test_an_opening_overtaken_by_the_removal_of_its_id_opens_nothing(wire: Wire) -> None:
    session = running(wire)
    before = counts(wire)
    removed, late = wire.overtaken(opening(session, "b", [9], 2), Remove(session, ("b",)))
    assert removed == Removed(0, ("b",), 9) and reason(late) == "SEQUENCE_REMOVED"
    assert counts(wire) == before


def test_a_fork_overtaken_by_the_removal_of_either_side_is_refused(wire: Wire) -> None:
    session = running(wire)
    _, late = wire.overtaken(fork(session, "b", "a"), Remove(session, ("b",)))
    assert reason(late) == "SEQUENCE_REMOVED"
    _, late = wire.overtaken(fork(session, "c", "a"), Remove(session, ("a",)))
    assert reason(late) == "SEQUENCE_REMOVED"
    assert counts(wire) == {"free": 11, "cached": 1}


def test_a_fork_before_the_removal_of_its_parent_keeps_the_pages(wire: Wire) -> None:
    session = running(wire)
    forked, _ = wire.overtaken(Remove(session, ("a",)), fork(session, "b", "a"))
    assert granted(forked).cached_tokens == 6
    assert counts(wire) == {"free": 10, "held": 2}


def test_nothing_of_a_removed_sequence_can_be_sent_again(wire: Wire) -> None:
    session = running(wire)
    history = [
        opening(session, "a", [1, 2, 3, 4, 5, 6], 3),
        report(session, "a", 0, [1, 2, 3, 4, 5, 6]),
        report(session, "a", 6, [7]),
        step(session, "a", 6, [7], 3, 3),
        fork(session, "b", "a"),
        Get(session, "a"),
    ]
    wire.ask(Remove(session, ("a",)))
    before = state(wire)
    for call in history:
        assert reason(wire.ask(call)) == "SEQUENCE_REMOVED"
        assert state(wire) == before


def test_a_cancelled_request_is_not_brought_back_by_what_it_had_sent(wire: Wire) -> None:
    """Cancelled calls, the removal that follows, and then what was cancelled arrives after all."""
    session = running(wire)
    late = [
        opening(session, "b", [1, 2, 3, 4, 9], 3),
        step(session, "a", 6, [7, 8], 4, 3),
        report(session, "a", 6, [7]),
    ]
    wire.run(late, give_up=True)
    wire.ask(Allocate(session, (), ("a", "b")))
    for call in late:
        assert reason(wire.ask(call)) == "SEQUENCE_REMOVED"
    stats = wire.stats()
    assert (stats["active_sequences"], stats["held_pages"], stats["quarantined_pages"]) == (0, 0, 0)
    assert wire.ask(Close(session)) == 0


# --- the end of a session, and the calls it meets ---------------------------------------------------------------------


def test_an_allocation_before_the_close_ends_with_it(wire: Wire) -> None:
    session = running(wire)
    grant, closed = wire.overtaken(Close(session), opening(session, "b", [9], 4))
    assert len(granted(grant).pages) == 4 and closed == 2
    assert counts(wire) == {"free": 11, "cached": 1}


@pytest.mark.parametrize("nth", range(7), ids=[type(call).__name__ for call in calls_of("")])
def test_a_call_overtaken_by_the_close_does_nothing(wire: Wire, nth: int) -> None:
    session = running(wire)
    closed, late = wire.overtaken(calls_of(session)[nth], Close(session))
    assert closed == 1 and reason(late) == "SESSION_EXPIRED"
    assert counts(wire) == {"free": 11, "cached": 1}


def test_two_sessions_are_granted_different_pages_whoever_comes_first(wire: Wire) -> None:
    one, other = opened(wire), opened(wire)
    first, second = wire.overtaken(opening(one, "a", [1], 6), opening(other, "a", [1], 7))
    assert len(granted(first).pages) == 7 and reason(second) == "NO_PAGES"
    assert counts(wire) == {"free": 5, "held": 7}


# --- another run of the daemon ----------------------------------------------------------------------------------------


def test_after_a_restart_old_ids_are_nobodys(wire: Wire, loop: Loop, tmp_path: Path) -> None:
    session = running(wire)
    again = Wire(world(epoch=8), loop, tmp_path)
    running(again, "other")  # the pool is there again, and warm
    before = state(again)
    for call in calls_of(session):
        assert reason(again.ask(call)) == "SESSION_EXPIRED"
    assert again.ask(Close(session)) is None
    assert state(again) == before
    # The random part of the id is the same in this test: it is the epoch that tells the runs apart.
    fresh = opened(again)
    assert fresh != session and {one.split("-")[0] for one in (session, fresh)} == {f"{7:016x}", f"{8:016x}"}
    grant = granted(again.ask(opening(fresh, "a", [1, 2, 3, 4, 5, 6], 3)))
    assert grant.cached_tokens == 4, "of the run before nothing is left; this was computed in this one"
    recorded(again.ask(report(fresh, "a", 4, [5, 6])))
    assert reached(again, fresh) == (6, 1)
    for stub, epoch in ((wire.stubs[0], 7), (again.stubs[0], 8)):
        assert stub.GetStats(pb.GetStatsRequest()).epoch == epoch
    again.close()


# --- everything twice -------------------------------------------------------------------------------------------------

Call = Callable[[Wire, str], Any]


def drop(wire: Wire, session: str) -> Any:
    """The pool, once nobody uses it any more."""
    wire.ask(Close(session))
    try:
        return wire.stubs[0].DropPool(pb.DropPoolRequest(pool_id="pool"))
    except grpc.RpcError as failure:
        return rpc.error_from(failure).reason


def release(wire: Wire, session: str) -> Any:
    """What was lost, once its process is gone and before a sweep sees that."""
    wire.ask(PassTime(TTL_S))
    wire.ask(Sweep())
    wire.ask(Kill(2))
    answer = wire.ask(Release(session))
    return answer if isinstance(answer, int) else reason(answer)


def attach(wire: Wire, session: str) -> Any:
    canary = wire.world.cache._sessions._by_id[session].canary
    return wire.stubs[0].AttachSession(pb.AttachSessionRequest(session_id=session, seen=canary))


SAME_ANSWER: dict[str, list[Call]] = {
    "AttachSession": [attach],
    "RenewSession": [lambda wire, session: wire.ask(Renew(session))],
    "AllocatePages": [
        lambda wire, session: wire.ask(opening(session, "b", [1, 2, 3, 4, 5], 4)),
        lambda wire, session: wire.ask(step(session, "a", 6, [7, 8, 9], 5, 3)),
        lambda wire, session: wire.ask(step(session, "a", 4, [5, 6, 7], 4, 2)),
        lambda wire, session: wire.ask(Allocate(session, (demands.opening("b", [9], 10),), ("a",))),
        lambda wire, session: wire.ask(fork(session, "b", "a")),
        lambda wire, session: wire.ask(opening(session, "b", [9], 99)),
    ],
    "AppendTokens": [
        lambda wire, session: wire.ask(report(session, "a", 6, [7, 8, 9])),
        lambda wire, session: wire.ask(report(session, "a", 5, [6, 7, 8])),
        lambda wire, session: wire.ask(report(session, "a", 7, [7])),
    ],
    "ExpireSequences": [lambda wire, session: wire.ask(Expire(1.0))],
}
#: The second answer says that there was nothing to do any more.
GONE: dict[str, tuple[Call, Any, Any]] = {
    "RemoveSequences": (
        lambda wire, session: wire.ask(Remove(session, ("a",))),
        Removed(1, (), PAGES),
        Removed(0, ("a",), PAGES),
    ),
    "CloseSession": (lambda wire, session: wire.ask(Close(session)), 1, None),
    "ReleaseQuarantine": (release, 2, "QUARANTINE_UNKNOWN"),
    "DropPool": (drop, pb.DropPoolResponse(epoch=7), "POOL_UNKNOWN"),
}
#: What is asked for is asked for again: an operator's wish for room, and a session, which ends with its lease.
AGAIN = {"EvictPages", "OpenSession"}
READS = {"GetSequence", "ListSequences", "ExplainPrefix", "GetStats", "Fsck", "WatchEvents"}


def test_every_call_of_the_protocol_is_told_below_what_it_does_the_second_time() -> None:
    told = [*SAME_ANSWER, *GONE, *AGAIN, *READS]
    assert sorted(told) == sorted(pb.DESCRIPTOR.services_by_name["KvCacheService"].methods_by_name)


@pytest.mark.parametrize(
    "call",
    [call for calls in SAME_ANSWER.values() for call in calls],
    ids=[f"{name}-{at}" for name, calls in SAME_ANSWER.items() for at in range(len(calls))],
)
def test_the_second_time_changes_nothing_and_is_answered_the_same(wire: Wire, call: Call) -> None:
    session = running(wire)
    first = call(wire, session)
    before = state(wire)
    for _ in range(2):
        assert call(wire, session) == first
        assert state(wire) == before


@pytest.mark.parametrize("name", GONE)
def test_the_second_time_there_is_nothing_to_do(wire: Wire, name: str) -> None:
    session = running(wire)
    call, first, second = GONE[name]
    assert call(wire, session) == first
    before = state(wire)
    for _ in range(2):
        assert call(wire, session) == second
        assert state(wire) == before


def test_a_session_opened_twice_is_two_and_the_unheard_one_ends_with_its_lease(wire: Wire) -> None:
    unheard, session = opened(wire), opened(wire)
    assert unheard != session
    wire.ask(PassTime(TTL_S / 2))
    wire.ask(Renew(session))
    wire.ask(PassTime(TTL_S / 2))
    assert wire.ask(Sweep()) == {unheard}
    assert wire.stats()["sessions"] == 1


def test_room_asked_for_twice_is_made_twice(wire: Wire) -> None:
    session = running(wire)
    recorded(wire.ask(report(session, "a", 6, [7, 8])))
    wire.ask(Remove(session, ("a",)))
    assert [wire.ask(Evict(1, False)).count for _ in range(3)] == [1, 1, 0]


# --- lost replies -----------------------------------------------------------------------------------------------------


def traffic(wire: Wire, session: str) -> None:
    """Another engine fills the pool and leaves, an operator evicts, time passes, and the session works on."""
    other = opened(wire)
    for at in range(4):
        wire.ask(opening(other, f"x{at}", [50 + at] * 5, 3))
        wire.ask(report(other, f"x{at}", 0, [50 + at] * 5))
    wire.ask(Remove(other, ("x0",)))
    wire.ask(Evict(1, False))
    wire.ask(PassTime(TTL_S / 2))
    granted(wire.ask(opening(session, "new", [1, 2, 3, 4, 77], 2)))
    wire.ask(Close(other))
    wire.ask(Sweep())


@pytest.mark.parametrize(
    "made",
    [
        lambda session: opening(session, "b", [1, 2, 3, 4, 5], 4),
        lambda session: opening(session, "b", [9, 9], 2),
        lambda session: step(session, "a", 6, [7, 8, 9], 5, 3),
        lambda session: fork(session, "b", "a"),
    ],
    ids=["opening-cached", "opening", "step", "fork"],
)
def test_a_grant_whose_reply_was_lost_is_told_again_after_much_else(
    wire: Wire, made: Callable[[str], Operation]
) -> None:
    session = running(wire)
    lost = wire.ask(made(session))
    traffic(wire, session)
    before = state(wire)
    assert granted(wire.ask(made(session))).pages == granted(lost).pages, "the same pages, of the same generations"
    assert state(wire) == before


def test_a_report_whose_reply_was_lost_is_told_again_after_the_sequence_went_on(wire: Wire) -> None:
    session = running(wire)
    lost = report(session, "a", 6, [7, 8, 9])
    recorded(wire.ask(lost))
    assert reached(wire, session) == (9, 2)
    recorded(wire.ask(report(session, "a", 9, [10, 11, 12])))
    traffic(wire, session)
    before = state(wire)
    recorded(wire.ask(lost))
    assert reached(wire, session) == (12, 3), "where it is now"
    assert state(wire) == before


def test_a_growth_whose_reply_was_lost_tells_what_was_granted_since(wire: Wire) -> None:
    session = running(wire)
    lost = step(session, "a", 6, [], 4, 3)
    first = granted(wire.ask(lost)).pages
    second = granted(wire.ask(step(session, "a", 6, [], 6, 4))).pages
    assert granted(wire.ask(lost)).pages == first + second


def test_a_copy_whose_order_was_lost_is_ordered_again_until_it_was_made(wire: Wire) -> None:
    session = running(wire)
    wire.ask(fork(session, "b", "a"))
    ask = step(session, "b", 6, [], 2, 2)
    [copy] = granted(wire.ask(ask)).copies
    traffic(wire, session)
    before = state(wire)
    assert granted(wire.ask(ask)).copies == (copy,)
    assert state(wire) == before
    recorded(wire.ask(report(session, "b", 6, [70])))
    answer = wire.ask(ask)
    assert isinstance(answer, Granted) and answer.told == (), "it was made, and there is nothing to tell"


def test_a_removal_whose_reply_was_lost_removes_nothing_else(wire: Wire) -> None:
    session = running(wire)
    lost = Allocate(session, (), ("a",))
    wire.ask(lost)
    traffic(wire, session)
    before = state(wire)
    wire.ask(lost)
    assert wire.ask(Remove(session, ("a",))) == Removed(
        0, ("a",), wire.stats()["free_pages"] + wire.stats()["cached_pages"]
    )
    assert state(wire) == before


def test_a_close_whose_reply_was_lost_closes_no_other_session(wire: Wire) -> None:
    session = running(wire)
    assert wire.ask(Close(session)) == 1
    other = opened(wire)
    granted(wire.ask(opening(other, "a", [1, 2, 3, 4, 5], 2)))
    before = state(wire)
    assert wire.ask(Close(session)) is None
    assert state(wire) == before


def test_an_expiry_by_an_operator_whose_reply_was_lost_ends_only_what_is_old_by_then(wire: Wire) -> None:
    session = running(wire)
    wire.ask(PassTime(2.0))
    assert wire.ask(Expire(2.0)) == 1
    granted(wire.ask(opening(session, "b", [5], 1)))
    assert wire.ask(Expire(2.0)) == 0
