"""The account of the daemon's own memory: its prices, its limit, and that it adds up."""

from __future__ import annotations

import contextlib
import gc
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import HostMemoryExceeded, InvalidConfiguration, ServiceError
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.cache.walk import check
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease import sessions
from services.kvcache.lease.sessions import Session
from services.kvcache.pool import host_memory
from services.kvcache.pool.index.events import EventKind, EventRing, Link
from services.kvcache.pool.index.prefix_cache import PrefixCache
from tests.kvcache.fakes import World

COUNT = 3000
PLENTY: dict[str, Any] = {"budget_bytes": 1 << 32, "event_ring": 1, "identity_pools": 1000, "identity_sessions": 1000}


def opening(name: str, tokens: list[int], pages: int = 0, salt: str = "") -> Opening:
    return Opening(name, Prompt(array("I", tokens), salt), pages)


def report(name: str, start: int, tokens: list[int], pages: int, known: int) -> Steps:
    return Steps([name], [start], [len(tokens)], array("I", tokens), [pages], [known])


def serve(world: World, session: Session, *demands: Steps | Opening, removed: tuple[str, ...] = ()) -> list[str]:
    """The reason of each answer, empty for a grant."""
    told, _ = world.cache.calls.allocate(session.id, demands, list(removed))
    return [one.reason if isinstance(one, ServiceError) else "" for _, one in told]


def growth(act: Callable[[], object]) -> int:
    """The bytes that are allocated by an act and not freed."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = act()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return after - before


# --- prices ---


def pages(eviction: str, page_size: int, retained: bool) -> tuple[World, Callable[[], object]]:
    world = World(COUNT, page_size=page_size, eviction=eviction, **PLENTY)

    def act() -> None:
        session, count = world.attached(), COUNT * page_size
        retention = Retention(1, 60) if retained else None
        origin = Prompt(array("I", [1]), retention=retention)
        assert serve(world, session, Opening("a", origin, COUNT)) == [""]
        serve(world, session, report("a", 0, list(range(count)), COUNT, COUNT), removed=())
        world.cache.calls.remove(session.id, ["a"])
        world.scrub(world.cache.pool_of(session))
        assert world.cache.pool_of(session).table.cached_count == COUNT

    return world, act


def small_pools() -> tuple[World, Callable[[], object]]:
    world = World(1, **PLENTY, max_sessions=400)
    return world, lambda: [world.attached(f"p{i}") for i in range(300)]


def opened() -> tuple[World, Session]:
    world = World(COUNT + 1, **PLENTY)
    return world, world.attached()


def sequences() -> tuple[World, Callable[[], object]]:
    world, session = opened()
    return world, lambda: [serve(world, session, opening(f"sequence-{i:06d}", [i])) and None for i in range(COUNT)]


def removed_ids() -> tuple[World, Callable[[], object]]:
    world, session = opened()
    return world, lambda: [world.cache.calls.remove(session.id, [f"sequence-{i:06d}"]) and None for i in range(COUNT)]


def entries(page_size: int) -> tuple[World, Callable[[], object]]:
    world = World(COUNT + 1, page_size=page_size, **PLENTY)
    session = world.attached()
    serve(world, session, opening("a", [1]))
    # A broken chain publishes nothing: what is published belongs to the pages.
    session.sequences["a"].chain_broken = True
    tokens = [7] * (COUNT * page_size)

    def act() -> None:
        assert serve(world, session, report("a", 0, [], COUNT, 0)) == [""]
        serve(world, session, report("a", 0, tokens, COUNT, COUNT))
        assert len(session.sequences["a"].tokens) == len(tokens)

    return world, act


def forks(count: int) -> tuple[World, Callable[[], object]]:
    world = World(COUNT + 1, **PLENTY)
    session = world.attached()
    serve(world, session, opening("a", [1], COUNT), report("a", 0, [7] * (4 * COUNT), COUNT, COUNT))

    def act() -> None:
        for i in range(count):
            assert serve(world, session, Opening(f"f{i}", "a")) == [""]

    return world, act


KINDS: dict[str, Callable[[], tuple[World, Callable[[], object]]]] = {
    **{
        f"pages-{eviction}-{size}-{retained}": lambda e=eviction, s=size, r=retained: pages(e, s, r)  # type: ignore[misc]
        for eviction in ("lru", "density")
        for size in (1, 16, 128)
        for retained in (False, True)
    },
    "pools": small_pools,
    "sequences": sequences,
    "removed ids": removed_ids,
    **{f"entries-{size}": lambda s=size: entries(s) for size in (1, 16, 128)},  # type: ignore[misc]
    **{f"forks-{count}": lambda c=count: forks(c) for count in (1, 2, 6, 20)},  # type: ignore[misc]
}


@pytest.mark.parametrize("kind", KINDS)
def test_prices_are_what_things_cost(kind: str) -> None:
    world, act = KINDS[kind]()
    before = world.cache.memory.used
    took = growth(act)
    ratio = took / (world.cache.memory.used - before)
    assert 0.5 <= ratio <= 1.5, ratio


@pytest.mark.parametrize("alternate", [False, True])
def test_the_price_of_an_event(alternate: bool) -> None:
    def act() -> EventRing:
        ring = EventRing(COUNT)
        for i in range(2 * COUNT):
            kind = EventKind.EVICTED if alternate and i % 2 else EventKind.STORED
            ring.add("pool", kind, Link(2**63 + i, 2**62 + i))
        return ring

    assert 0.5 <= growth(act) / (COUNT * host_memory.EVENT) <= 1.5


def test_the_price_of_a_session() -> None:
    world = World(1, **PLENTY, identity_unattached=1000, max_sessions=400)
    world.attached()
    took = growth(lambda: [world.attached(pid=i + 1) for i in range(300)])
    assert 0.5 <= took / (300 * host_memory.SESSION) <= 1.5


def test_the_price_of_a_salt() -> None:
    def publish(salted: bool) -> PrefixCache:
        index = PrefixCache(COUNT)
        for page in range(COUNT):
            index.publish(page, page - 1 if page and not salted else None, bytes([page & 255]) * 64, f"salt {page:06d}")
        return index

    took = growth(lambda: publish(True)) - growth(lambda: publish(False))
    assert 0.5 <= took / publish(True).charged() <= 1.5


# --- the limit ---


def test_a_start_with_too_little() -> None:
    with pytest.raises(InvalidConfiguration, match="--host-memory is 1000 bytes; 65536 events of --event-ring"):
        World(1, host_memory=1000)


def test_a_pool_beyond_the_budget_is_refused_before_anything_is_made() -> None:
    world = World(1000, budget_bytes=1 << 30, host_memory=40_000_000)
    session = world.attached("small")
    used = world.cache.memory.used
    with pytest.raises(HostMemoryExceeded) as caught:
        world.attached("large", pool_pages=100_000)
    assert len(world.arenas) == 1 and world.cache.memory.used == used
    error = caught.value
    assert "--host-memory" in error.message and "of 40000000" in error.message
    assert (error.field, error.metadata["limit"], error.metadata["used_bytes"]) == ("pool_pages", "40000000", str(used))
    # One that is not used makes room, as in the arenas' budget.
    world.cache.close_session(session.id)
    most = (40_000_000 - world.cache.memory.floor - host_memory.POOL) // (host_memory.PAGE + 4 * host_memory.TOKEN)
    world.attached("other", pool_pages=most)
    assert world.arenas[0].closed
    world.sound()


def test_a_pool_of_no_stated_size_leaves_half_of_the_memory_to_its_sequences() -> None:
    world = World(1, pool_pages=None, budget_bytes=1 << 30, host_memory=40_000_000)
    world.attached()
    memory = world.cache.memory
    assert memory.used - memory.floor <= (memory.limit - memory.floor) // 2 + host_memory.POOL
    assert memory.used - memory.floor >= (memory.limit - memory.floor) // 2 - 1000


def limited(room: int, pages: int = 64, **limits: Any) -> tuple[World, Session]:
    """A world with a session, and so many bytes left."""
    world = World(pages, **limits)
    session = world.attached()
    world.cache.memory.limit = world.cache.memory.used + room
    return world, session


def state(world: World, session: Session) -> object:
    table = world.cache.pool_of(session).table
    listed = [(s.id, list(s.pages), list(s.tokens), s.published) for s in session.sequences.values()]
    return listed, list(session.removed), table.free_count, table.cached_count, world.cache.memory.used


def test_one_item_of_a_batch_is_refused_alone_and_changes_nothing() -> None:
    world, session = limited(3000)
    first = [opening("a", [1], 2), opening("b", [1], 64 - 2), opening("c", [1], 1)]
    assert serve(world, session, *first) == ["", "HOST_MEMORY_EXCEEDED", ""]
    before = state(world, session)
    assert serve(world, session, opening("d", [1], 60), Opening("e", "a", 60), report("a", 0, [], 50, 2)) == (
        ["HOST_MEMORY_EXCEEDED"] * 3
    )
    assert state(world, session) == before
    assert world.cache.memory.refused == 4
    world.sound()


def test_a_fork_is_refused_for_the_holders_of_its_pages() -> None:
    world, session = limited(8000, page_size=1)
    assert serve(world, session, opening("a", [1], 16), report("a", 0, list(range(16)), 16, 16)) == [""]
    for name in "bcd":
        before = state(world, session)
        if serve(world, session, Opening(name, "a")) == ["HOST_MEMORY_EXCEEDED"]:
            assert state(world, session) == before
            break
    else:
        pytest.fail("all forks were made")
    world.sound()


def test_a_first_page_is_not_published_when_its_salt_does_not_fit() -> None:
    world, session = limited(2000)
    assert serve(world, session, opening("a", [1], 1, salt="s" * 100)) == [""]
    world.cache.memory.limit = world.cache.memory.used + 100
    before = state(world, session)
    assert serve(world, session, report("a", 0, [1, 2, 3, 4], 1, 1)) == ["HOST_MEMORY_EXCEEDED"]
    assert state(world, session) == before
    world.cache.memory.limit += 1000
    assert serve(world, session, report("a", 0, [1, 2, 3, 4], 1, 1)) == []
    world.sound()


def test_live_sequences_can_be_removed_and_strange_ids_not_remembered() -> None:
    world, session = limited(10_000)
    assert serve(world, session, opening("a", [1], 1)) == [""]
    world.cache.memory.limit = world.cache.memory.used
    before = state(world, session)
    with pytest.raises(HostMemoryExceeded, match="1 removed ids"):
        world.cache.calls.remove(session.id, ["a", "strange"])
    assert state(world, session) == before
    assert world.cache.calls.remove(session.id, ["a"])[0] == [True]
    assert world.cache.calls.remove(session.id, ["a"])[0] == [False]
    world.sound()


# --- what goes is given back ---


def test_nothing_is_left_charged() -> None:
    world = World(64)
    memory = world.cache.memory
    for end in ("closed", "lost"):
        session = world.attached(pid=1)
        pool = world.cache.pool_of(session)
        serve(world, session, opening("a", [1], 16, salt="s"), report("a", 0, list(range(64)), 16, 16))
        serve(world, session, Opening("b", "a", 20), Opening("c", "a"), opening("d", list(range(64)), 16, salt="s"))
        world.cache.calls.remove(session.id, ["a", "strange"])
        assert memory.used > memory.floor + pool.bytes + 5000
        assert world.cache.expire_sequences(0.0) == 3
        world.sound()
        assert memory.used > memory.floor + pool.bytes + pool.table.charged() + 3 * host_memory.SEQUENCE
        if end == "closed":
            world.cache.close_session(session.id)
        else:
            world.processes.kill(1)
            world.cache.sweep()
        world.sound()
        pool.published.evict(64)
        assert memory.used == memory.floor + pool.bytes
        world.cache.drop_pool(pool.id)
        assert memory.used == memory.floor


def test_ids_that_a_session_no_longer_remembers_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED_REMOVALS", 3)
    world = World(8)
    session = world.attached()
    world.cache.calls.remove(session.id, ["a", "b", "c"])
    full = world.cache.memory.used
    world.cache.calls.remove(session.id, ["d", "e", "f", "g"])
    assert world.cache.memory.used == full
    world.sound()


def test_a_pool_that_could_not_be_made_is_not_charged() -> None:
    world = World(64)

    def fail(*_: object) -> None:
        raise OSError("no memory")

    world.cache.pools._make_arena = fail  # type: ignore[assignment]
    with pytest.raises(OSError, match="no memory"):
        world.attached()
    assert world.cache.memory.used == world.cache.memory.floor


@pytest.mark.parametrize("kind", ["sequences", "holders"])
def test_room_that_python_keeps_for_what_is_gone_is_given_back(kind: str) -> None:
    world, session = opened()
    serve(world, session, opening("a", [1], 1), report("a", 0, [1, 2, 3], 1, 1))
    for i in range(COUNT):
        serve(world, session, Opening(f"f{i}", "a"))
    world.cache.calls.remove(session.id, [f"f{i}" for i in range(1, COUNT)])
    table = world.cache.pool_of(session).table
    kept = session.sequences if kind == "sequences" else table._others[0]
    assert len(kept) <= 2 and sys.getsizeof(kept) < 2000
    world.sound()


# --- histories ---

NAMES = st.sampled_from("abcdef")
ACTS = st.one_of(
    st.tuples(st.just("open"), NAMES, st.integers(1, 24), st.sampled_from(["", "salt", "sält" * 8])),
    st.tuples(st.just("fork"), NAMES, NAMES, st.integers(0, 12)),
    st.tuples(st.just("step"), NAMES, st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("forget"), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("expire"), st.integers(0, 2)),
    st.tuples(st.just("reopen"), st.booleans()),
    st.tuples(st.just("drop")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTS, max_size=40), st.integers(1500, 20_000))
def test_histories_near_the_limit(acts: list[tuple[object, ...]], room: int) -> None:
    """Whatever happens, the account is what there is, never beyond its limit, and in the end at its floor."""
    world = World(16, page_size=2)
    session = world.attached(pid=1)
    memory = world.cache.memory
    memory.limit = memory.used + room
    for act, *arguments in acts:
        world.now += 0.5
        name = str(arguments[0]) if arguments else ""
        sequence = session.sequences.get(name)
        if act == "open":
            _, length, salt = arguments
            serve(world, session, opening(name, list(range(int(str(length)))), 4, str(salt)))
        elif act == "fork":
            serve(world, session, Opening(name, str(arguments[1]), int(str(arguments[2]))))
        elif act == "step" and sequence is not None:
            count, more = int(str(arguments[1])), int(str(arguments[2]))
            start, held = len(sequence.tokens), len(sequence.pages)
            count = min(count, 2 * held - start)
            serve(world, session, report(name, start, list(range(start, start + count)), held + more, held))
        elif act == "remove":
            try:
                world.cache.calls.remove(session.id, [name])
            except HostMemoryExceeded:
                assert name not in session.sequences
        elif act == "forget":
            with contextlib.suppress(HostMemoryExceeded):
                world.cache.calls.remove(session.id, [f"strange{arguments[0]}"])
        elif act == "evict":
            world.cache.evict_pages("pool", int(name))
        elif act == "expire":
            world.cache.expire_sequences(float(name))
        elif act == "reopen":
            if arguments[0]:
                world.cache.close_session(session.id)
            else:
                world.processes.kill(1)
                world.cache.sweep()
            world.sound()
            session = world.attached(pid=1)
        world.sound()
    world.cache.close_session(session.id)
    world.cache.drop_pool("pool")
    assert memory.used == memory.floor


@pytest.mark.parametrize("wrong", [1, -1])
def test_check_finds_an_account_that_is_off(wrong: int) -> None:
    world = World(8)
    session = world.attached()
    serve(world, session, opening("a", [1], 1))
    world.cache.memory.used += wrong
    assert any("bytes of host memory are charged, what there is" in line for line in check(world.cache))
    world.cache.memory.used -= wrong
    session.ids_bytes += wrong
    assert any("bytes for ids" in line for line in check(world.cache))
