"""What a lost session may still write: no time frees it, and what does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog

from services.common.errors import EngineAlive, ExceedsBudget, QuarantineUnknown, SessionExpired, TooManySessions
from services.kvcache.lease.quarantine import KILL, Fence
from services.kvcache.lease.sessions import Session
from services.kvcache.lease.witness import Process
from tests.kvcache.cache.demands import Step, fork, grouped, in_columns, opening
from tests.kvcache.fakes import LAYOUT, OWN_UID, World

DRAIN_S = 30.0
AGES_S = 1e9


def lost(pid: int | None = 5, *, seen: bool = True, **limits: Any) -> tuple[World, Session]:
    """A session lost a moment ago, with one complete page and two that its engine may still write."""
    world = World(10, drain_s=DRAIN_S, **limits)
    session = world.attached(pid=pid, seen=seen)
    world.cache.calls.allocate(session.id, grouped([opening("a", [1, 2, 3, 4, 5, 6], 3)]), [])
    world.cache.calls.append(session.id, in_columns([Step("a", 0, (1, 2, 3, 4, 5, 6))], growing=False))
    world.now += 11
    assert world.cache.sweep() == [session]
    assert counts(world) == (7, 1, 2), "complete pages stay, unfinished ones wait"
    return world, session


def counts(world: World) -> tuple[int, int, int]:
    """Free, cached and quarantined pages."""
    world.sound()
    [pool] = world.cache.pools
    return pool.table.free_count, pool.table.cached_count, pool.table.quarantined_count


def pass_time(world: World, seconds: float) -> None:
    world.now += seconds
    world.cache.sweep()


def fence(world: World) -> Fence:
    [record] = world.cache.quarantine.lost()
    return record.fence


FREE = (9, 1, 0)
WAITING = (7, 1, 2)


@pytest.mark.parametrize(
    ("pid", "seen", "then"), [(5, True, Fence.ALIVE), (5, False, Fence.UNSEEN), (None, True, Fence.UNSEEN)]
)
def test_no_time_frees_a_page(pid: int | None, seen: bool, then: Fence) -> None:
    world, session = lost(pid, seen=seen)
    with pytest.raises(SessionExpired):
        world.cache.renew_session(session.id)
    assert fence(world) is Fence.DRAINING
    pass_time(world, DRAIN_S - 0.001)
    assert fence(world) is Fence.DRAINING
    with structlog.testing.capture_logs() as events:
        pass_time(world, 0.001)
        pass_time(world, AGES_S)
    assert (counts(world), fence(world)) == (WAITING, then)
    [told] = events
    assert told == {
        "event": "engine_fenced",
        "log_level": "warning",
        "fence": then.name.lower(),
        "session": session.handle,
        "client": "test",
        "pool": "pool",
        "pid": pid if seen else None,
        "pages": 2,
    }


def gone(world: World, session: Session) -> None:
    world.processes.kill(5)
    world.cache.sweep()


def vouched(world: World, session: Session) -> None:
    assert world.cache.close_session(session.id) == 0
    assert world.cache.close_session(session.id) is None


@pytest.mark.parametrize("after_s", [0.0, AGES_S])
@pytest.mark.parametrize("proof", [gone, vouched])
def test_proof_frees_them_at_once(proof: Callable[[World, Session], None], after_s: float) -> None:
    world, session = lost()
    pass_time(world, after_s)
    with structlog.testing.capture_logs() as events:
        proof(world, session)
    assert counts(world) == FREE and len(world.cache.quarantine) == 0
    assert [(one["event"], one["why"]) for one in events] == (
        [("engine_fence_over", proof.__name__)] if after_s else []
    )
    assert [witness.closed for witness in world.processes.witnesses] == [True]


def test_an_operator_vouches_for_what_cannot_be_seen() -> None:
    world, session = lost(seen=False)
    with pytest.raises(QuarantineUnknown, match="'nobody'"):
        world.cache.release_quarantine("nobody")
    assert world.cache.release_quarantine(session.handle) == 2
    assert counts(world) == FREE
    with pytest.raises(QuarantineUnknown):
        world.cache.release_quarantine(session.handle)


def test_an_operator_does_not_vouch_for_what_is_alive_nor_for_a_live_session() -> None:
    world, session = lost()
    pass_time(world, AGES_S)
    with pytest.raises(EngineAlive, match="its process 5 is alive"):
        world.cache.release_quarantine(session.handle)
    living = world.attached(pid=6)
    world.cache.calls.allocate(living.id, grouped([opening("b", [9], 1)]), [])
    world.cache.expire_sequences(0.0)
    with pytest.raises(QuarantineUnknown):
        world.cache.release_quarantine(living.handle)
    assert counts(world) == (6, 1, 3)


def test_expired_sequences_wait_for_their_session_and_then_by_the_same_law() -> None:
    world = World(10, drain_s=DRAIN_S, default_ttl_s=600.0)
    session = world.attached(pid=5)
    world.cache.calls.allocate(session.id, grouped([opening("a", [1], 2), opening("b", [2], 3)]), [])
    assert world.cache.expire_sequences(0.0) == 2
    pass_time(world, 599)
    assert counts(world) == (5, 0, 5)
    pass_time(world, 1)
    assert len(world.cache.quarantine) == 1
    pass_time(world, AGES_S)
    assert counts(world) == (5, 0, 5)
    world.processes.kill(5)
    world.cache.sweep()
    assert counts(world) == (10, 0, 0)


def test_closing_a_live_session_vouches_for_what_had_expired() -> None:
    world = World(10)
    session = world.attached(pid=5)
    world.cache.calls.allocate(session.id, grouped([opening("a", [1], 2)]), [])
    world.cache.expire_sequences(0.0)
    assert counts(world) == (8, 0, 2)
    assert world.cache.close_session(session.id) == 0
    assert counts(world) == (10, 0, 0)


# --- killing ----------------------------------------------------------------------------------------------------------


def test_what_stays_silent_past_the_drain_is_killed_if_that_is_allowed() -> None:
    world, session = lost(fence=KILL)
    pass_time(world, DRAIN_S - 0.001)
    assert world.processes.killed == []
    with structlog.testing.capture_logs() as events:
        pass_time(world, 0.001)
    assert world.processes.killed == [5] and fence(world) is Fence.KILLED
    assert counts(world) == WAITING, "until it is seen to be gone"
    assert [one["event"] for one in events] == ["engine_fenced", "engine_killed"]
    assert events[1]["pid"] == 5 and events[1]["session"] == session.handle
    world.cache.sweep()
    assert counts(world) == FREE and world.cache.quarantine.killed == 1


def test_one_that_does_not_end_of_it_is_killed_once_and_keeps_its_pages() -> None:
    world, _ = lost(fence=KILL)
    world.processes.lingering.add(5)
    for _ in range(3):
        pass_time(world, DRAIN_S)
    assert (world.processes.killed, counts(world), fence(world)) == ([5], WAITING, Fence.KILLED)


def test_one_that_may_not_be_killed_is_waited_for() -> None:
    world, _ = lost(fence=KILL)
    world.processes.refusing.add(5)
    pass_time(world, DRAIN_S)
    assert (counts(world), fence(world), world.cache.quarantine.killed) == (WAITING, Fence.ALIVE, 0)


def test_by_default_nobody_is_killed() -> None:
    world, _ = lost()
    pass_time(world, AGES_S)
    assert world.processes.killed == []


def test_what_cannot_be_seen_is_not_killed() -> None:
    world, _ = lost(seen=False, fence=KILL)
    pass_time(world, AGES_S)
    assert (world.processes.killed, counts(world)) == ([], WAITING)


def test_a_process_that_has_a_session_is_not_killed_for_an_earlier_one() -> None:
    world, _ = lost(fence=KILL)
    again = world.attached(pid=5, ttl_s=600.0)
    pass_time(world, DRAIN_S)
    assert world.processes.killed == []
    world.cache.close_session(again.id)
    world.cache.sweep()
    assert world.processes.killed == [5]


@pytest.mark.parametrize(("owner", "caller", "killed"), [(7, None, False), (7, 7, True), (OWN_UID, None, True)])
def test_a_process_of_another_user_is_killed_only_if_its_user_was_the_caller(
    owner: int, caller: int | None, killed: bool
) -> None:
    world = World(10, drain_s=DRAIN_S, fence=KILL)
    world.processes.uids[5] = owner
    session = world.attached(pid=5, uid=caller)
    world.cache.calls.allocate(session.id, grouped([opening("a", [1], 1)]), [])
    pass_time(world, 11)
    pass_time(world, DRAIN_S)
    assert bool(world.processes.killed) is killed


@pytest.mark.parametrize("fence_", ["wait", KILL])
def test_a_process_that_is_not_the_callers_is_not_taken_for_its(fence_: str) -> None:
    world = World(10, drain_s=DRAIN_S, fence=fence_)
    session = world.attached(pid=5, uid=OWN_UID + 1)
    world.cache.calls.allocate(session.id, grouped([opening("a", [1], 1)]), [])
    assert session.witness is None and session.pid is None
    world.processes.kill(5)
    assert world.cache.sweep() == [], "of the caller's process nothing is known"
    pass_time(world, 11)
    pass_time(world, AGES_S)
    assert (fence(world), world.processes.killed) == (Fence.UNSEEN, [])
    assert [witness.closed for witness in world.processes.witnesses] == [True]


# --- memory and limits ------------------------------------------------------------------------------------------------


def idle(world: World, **options: object) -> Session:
    """A session without a page, lost."""
    session = world.attached("old", **options)  # type: ignore[arg-type]
    pass_time(world, 11)
    return session


def test_a_mapped_file_without_pages_is_kept_while_its_process_lives() -> None:
    world = World(400, budget_bytes=100_000, drain_s=DRAIN_S)  # an arena of 400 pages is 67584 bytes
    idle(world, pid=5)
    pass_time(world, AGES_S)
    with pytest.raises(ExceedsBudget):
        world.attached("new")
    world.processes.kill(5)
    world.cache.sweep()
    world.attached("new")
    assert [arena.closed for arena in world.arenas] == [True, False]


def test_a_mapped_file_without_pages_of_nobody_known_is_kept_for_the_drain() -> None:
    """Its removal gives none of it to another: the mapping stays what it is."""
    world = World(400, budget_bytes=100_000, drain_s=DRAIN_S)
    session = idle(world)
    pass_time(world, DRAIN_S - 0.001)
    with pytest.raises(ExceedsBudget):
        world.attached("new")
    pass_time(world, 0.001)
    assert world.cache.close_session(session.id) is None
    world.attached("new")


@pytest.mark.parametrize("attached", [True, False])
def test_memory_of_a_gpu_is_kept_for_whoever_may_have_it_mapped(attached: bool) -> None:
    world = World(10, drain_s=DRAIN_S, devices=1)
    if attached:
        session = world.attached("pool", device=0)
    else:
        session = world.cache.open_session("test", "pool", LAYOUT, device=0)
    pass_time(world, 11)
    pass_time(world, AGES_S)
    [pool] = world.cache.pools
    assert world.cache.quarantine.waits_for(pool) and fence(world) is Fence.UNSEEN
    assert world.cache.release_quarantine(session.handle) == 0
    world.cache.drop_pool(pool.id)
    assert world.arenas[0].closed


def test_a_session_that_never_attached_to_a_file_leaves_nothing() -> None:
    world = World(10)
    session = world.cache.open_session("test", "pool", LAYOUT, process=Process(5, 1, "here"))
    pass_time(world, 11)
    assert len(world.cache.quarantine) == 0 and world.cache.close_session(session.id) is None
    assert [witness.closed for witness in world.processes.witnesses] == [True]


def test_lost_sessions_count_as_sessions_and_are_told_apart() -> None:
    world, session = lost(max_sessions=2)
    world.attached(pid=6)
    with pytest.raises(TooManySessions, match="1 sessions are open and 1 lost ones in quarantine"):
        world.attached(pid=7)
    world.cache.close_session(session.id)
    world.attached(pid=7)


def test_closing_the_cache_lets_go_of_all_processes() -> None:
    world, _ = lost()
    world.attached(pid=6)
    world.cache.close()
    assert [witness.closed for witness in world.processes.witnesses] == [True, True]


def test_sequences_that_expire_share_the_record_of_their_session() -> None:
    world = World(64)
    session = world.attached()
    world.cache.calls.allocate(session.id, [opening(f"{at}", [at], 1) for at in range(50)], [])
    assert world.cache.expire_sequences(0.0) == 50
    [pool] = world.cache.pools
    assert pool.table.quarantined_count == 50
    assert len(world.cache.quarantine._records) == 1, "each would be looked after for as long as the session lives"
    world.sound()


# --- what an expired sequence reads -----------------------------------------------------------------------------------


def expired(**limits: Any) -> tuple[World, Session]:
    """A live session whose sequence has one complete page and two others, and was ended without it."""
    world = World(10, drain_s=DRAIN_S, default_ttl_s=600.0, **limits)
    session = world.attached(pid=5)
    world.cache.calls.allocate(session.id, grouped([opening("a", [1, 2, 3, 4, 5, 6], 3)]), [])
    world.cache.calls.append(session.id, in_columns([Step("a", 0, (1, 2, 3, 4, 5, 6))], growing=False))
    assert world.cache.expire_sequences(0.0) == 1
    assert counts(world) == (7, 0, 2)
    return world, session


def evicted(world: World) -> int:
    return world.cache.evict_pages("pool", None, retained=True)[0]


def removed(world: World, session: Session) -> None:
    world.cache.calls.remove(session.id, ["a"])


def outlived(world: World, session: Session) -> None:
    pass_time(world, 600)


def closed(world: World, session: Session) -> None:
    world.cache.close_session(session.id)


@pytest.mark.parametrize("vouch", [removed, closed, gone])
def test_what_a_step_of_an_expired_sequence_reads_stays_until_its_engine_is_past_it(
    vouch: Callable[[World, Session], None],
) -> None:
    world, session = expired(cache_ttl_s=1.0)
    pass_time(world, 599)
    assert evicted(world) == 0 and counts(world) == (7, 0, 2)
    vouch(world, session)
    assert counts(world) == FREE
    assert evicted(world) == 1


def test_of_an_expired_sequence_whose_session_is_lost_only_what_is_written_waits() -> None:
    """An engine that lost its session uses nothing that it read."""
    world, session = expired()
    pass_time(world, 600)
    assert counts(world) == WAITING
    assert world.cache.close_session(session.id) == 0
    assert counts(world) == FREE


def test_others_find_the_prefix_of_an_expired_sequence_and_share_it() -> None:
    world, session = expired()
    other = world.attached(pid=6)
    [[_, grant]] = world.cache.calls.allocate(other.id, grouped([opening("b", [1, 2, 3, 4, 9], 2)]), [])[0]
    assert not isinstance(grant, Exception) and grant.cached_tokens == 4
    removed(world, session)
    assert counts(world) == (8, 0, 0)
    world.cache.close_session(other.id)
    assert counts(world) == FREE


@pytest.mark.parametrize(
    ("end", "waiting"),
    [(lambda world, session: world.cache.calls.remove(session.id, ["c"]), 2), (outlived, 3), (gone, 0)],
)
def test_a_page_that_expired_sequences_share_goes_when_all_are_over(
    end: Callable[[World, Session], object], waiting: int
) -> None:
    world, session = expired()
    world.cache.calls.allocate(session.id, grouped([opening("b", [7, 8], 1)]), [])
    world.cache.calls.append(session.id, in_columns([Step("b", 0, (7, 8))], growing=False))
    world.cache.calls.allocate(session.id, grouped([fork("c", "b", 0)]), [])
    world.now += 1
    world.cache.renew_session(session.id)
    assert counts(world) == (6, 0, 2), "the tail is of both"
    assert world.cache.expire_sequences(0.0) == 2
    world.cache.calls.remove(session.id, ["b"])
    assert counts(world) == (6, 0, 2), "the other may be written"
    end(world, session)
    assert counts(world)[2] == waiting


def test_damage_behind_an_expired_sequence_is_given_back_with_it() -> None:
    world, session = expired()
    [pool] = world.cache.pools
    [page] = pool.index.published()
    pool.published.withdraw(page)
    assert counts(world) == (7, 0, 2), "a step may be reading it"
    removed(world, session)
    assert counts(world) == (10, 0, 0)
