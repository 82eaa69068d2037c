"""Sessions of several identities in one cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from services.common.errors import ServiceError, SessionExpired, TooManySessions
from services.kvcache.cache.admission import ATTACH_S
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.steps import Steps
from services.kvcache.lease.sessions import Session
from tests.kvcache.fakes import World

MINE, YOURS = "uid:1", "uid:2"


def opened(world: World, owner: str, pool_id: str = "pool", **options: object) -> Session:
    return world.cache.open_session("test", pool_id, world.layout, caller=owner, **options)


def attached(world: World, owner: str) -> Session:
    session = opened(world, owner)
    arena = world.cache.pool_of(session).arena
    arena.answers[session.canary_slot] = bytes(b ^ 0xFF for b in session.canary)  # type: ignore[attr-defined]
    return world.cache.attach_session(session.id, session.canary, owner)


CALLS: dict[str, Callable[[KvCache, str, str], object]] = {
    "attach": lambda cache, session, caller: cache.attach_session(session, bytes(32), caller),
    "renew": lambda cache, session, caller: cache.renew_session(session, caller),
    "allocate": lambda cache, session, caller: cache.calls.allocate(session, [], ["a"], caller),
    "append": lambda cache, session, caller: cache.calls.append(session, _steps(), caller),
    "remove": lambda cache, session, caller: cache.calls.remove(session, ["a"], caller),
    "get": lambda cache, session, caller: cache.calls.get_sequence(session, "a", caller),
    "list": lambda cache, session, caller: cache.calls.sequences_of(session, 0, 10, caller),
}


def _steps() -> Steps:
    return Steps(["a"], [0], [1], array("I", [1]), [], [])


@pytest.mark.parametrize("name", CALLS)
def test_to_others_a_session_is_one_that_has_ended(name: str) -> None:
    world = World(4)
    session = attached(world, MINE)
    deadline = session.deadline
    world.now += 1
    told = []
    for session_id, caller in ((session.id, YOURS), ("never", YOURS), (session.id, "")):
        with pytest.raises(SessionExpired) as error:
            CALLS[name](world.cache, session_id, caller)
        told.append((error.value.message, error.value.metadata, error.value.field))
    assert told[0] == told[1] == told[2]
    assert session.deadline == deadline, "and it was not renewed"
    world.sound()


def test_others_cannot_close_a_session() -> None:
    world = World(4)
    session = attached(world, MINE)
    assert world.cache.close_session(session.id, YOURS) is None
    assert world.cache.close_session(session.id, MINE) == 0


def test_a_handle_names_a_session_and_is_not_its_id() -> None:
    world = World(4)
    session, other = attached(world, MINE), attached(world, YOURS)
    assert session.handle != other.handle and session.handle not in session.id
    with pytest.raises(SessionExpired):
        world.cache.renew_session(session.handle, MINE)
    before = session.deadline
    world.now += 1
    assert world.cache.calls.list_sequences(session.handle, 0, 10) == ([], False)
    assert session.deadline == before, "looking does not renew"
    with pytest.raises(SessionExpired, match="no session has the handle"):
        world.cache.calls.list_sequences(session.id, 0, 10)


@pytest.mark.parametrize("ttl", [1.0, 600.0])
def test_what_does_not_attach_ends_soon(ttl: float) -> None:
    world = World(4)
    session = opened(world, MINE, ttl_s=ttl)
    for _ in range(int(2 * ATTACH_S)):
        world.now += 0.5
        try:
            world.cache.renew_session(session.id, MINE)
        except SessionExpired:
            break
    assert world.now <= 1000.0 + ATTACH_S
    assert world.cache.sweep() == [session]


def test_an_attached_session_lives_by_its_ttl() -> None:
    world = World(4)
    session = attached(world, MINE)
    world.now += session.ttl_s - 0.5
    world.cache.renew_session(session.id, MINE)
    world.now += session.ttl_s - 0.5
    assert world.now > session.attach_by
    assert world.cache.renew_session(session.id, MINE) is session


@pytest.mark.parametrize("limit", ["identity_sessions", "identity_unattached"])
def test_sessions_are_limited_by_identity(limit: str) -> None:
    limits: dict[str, object] = {limit: 2}
    world = World(4, **limits)  # type: ignore[arg-type]
    for _ in range(2):
        opened(world, MINE)
    with pytest.raises(TooManySessions, match="uid:1 has 2 sessions") as error:
        opened(world, MINE)
    assert error.value.metadata == {"identity": MINE, "limit": "2"}
    opened(world, YOURS)
    world.now += ATTACH_S
    world.cache.sweep()
    opened(world, MINE)


def refused(world: World, owner: str, pool_id: str, pages: int) -> str:
    try:
        opened(world, owner, pool_id, pool_pages=pages)
    except ServiceError as error:
        return error.reason
    return ""


def test_an_identitys_idle_pools_make_way_for_its_own_before_others() -> None:
    page = World(1).layout.page_bytes
    world = World(1, budget_bytes=100 * page + 6 * 256 * 64, identity_share=0.5, identity_pools=2)
    yours = opened(world, YOURS, "yours", pool_pages=10)
    world.cache.close_session(yours.id, YOURS)
    world.now += 1
    for name in ("first", "second"):
        session = opened(world, MINE, name, pool_pages=10)
        world.cache.close_session(session.id, MINE)
        world.now += 1
    assert refused(world, MINE, "third", 10) == ""
    assert {pool.id for pool in world.cache.pools} == {"yours", "second", "third"}
    assert refused(world, MINE, "fourth", 10) == ""
    assert refused(world, MINE, "fifth", 10) == "TOO_MANY_POOLS"
    assert {pool.id for pool in world.cache.pools} == {"yours", "third", "fourth"}
    world.sound()


def test_a_share_is_of_what_is_in_use() -> None:
    page = World(1).layout.page_bytes
    budget = 100 * page + 6 * 256 * 64
    world = World(1, budget_bytes=budget, identity_share=0.5)
    half = budget // 2 - 256 * 64
    assert refused(world, MINE, "all", half // page + 1) == "EXCEEDS_SHARE"
    assert refused(world, MINE, "half", half // page) == ""
    assert refused(world, MINE, "more", 1) == "EXCEEDS_SHARE"
    assert refused(world, YOURS, "half too", half // page) == ""


def test_a_private_pool_is_named_after_its_owner_and_no_name_can_pretend_to_be() -> None:
    world = World(4)
    names = {
        opened(world, owner, pool_id, private=True).pool_id
        for owner, pool_id in (("cn:y", "m"), ("cn:y", "m/cn:x"), ("cn:x/cn:y", "m"), ("cn:x%2Fcn:y", "m"))
    }
    assert len(names) == 4 and "m/cn:y" in names


def test_who_opens_a_session_is_let_into_the_arena() -> None:
    world = World(4)
    opened(world, MINE)
    opened(world, YOURS)
    assert world.arenas[0].admitted == [MINE, YOURS]
