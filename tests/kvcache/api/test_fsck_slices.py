"""Fsck in slices: transactions run between them, what is wrong is found, and nothing else is."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.kvcache import slices
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.cache.walk import check, walk
from services.kvcache.eviction.retention import Promise, Retention
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.pool import Pool
from tests.kvcache.cache.demands import growth, opening
from tests.kvcache.cache.stateful.machine import CacheMachine, Direct, Unanswered, examples, new_world
from tests.kvcache.cache.stateful.transactions import Answer, Operation
from tests.kvcache.cache.test_cache import run, serve
from tests.kvcache.fakes import World
from tests.processes import kvcache

ROOMS = (
    "eviction.lru.PAUSE",
    "eviction.density.PAUSE",
    "eviction.retaining_queue.PAUSE",
    "pool.pages.page_table.PAUSE",
    "pool.index.prefix_cache._LINKS",
    "cache.pool_walk.PAUSE",
    "pool.index.key_table._PAUSE",
    "cache.walk.PAUSE",
)


def pausing_everywhere() -> ExitStack:
    """Walks pause at every page."""
    stack = ExitStack()
    for room in ROOMS:
        stack.enter_context(mock.patch(f"services.kvcache.{room}", 1))
    return stack


class Walking(Direct):
    """A walk is always in progress, and advances by a few slices between two transactions."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.stack = pausing_everywhere()
        self.walk = walk(world.cache)
        self.ended = 0

    def run(self, operations: Sequence[Operation], *, give_up: bool = False) -> list[Answer | Unanswered]:
        answers: list[Answer | Unanswered] = []
        for operation in operations:
            answers += super().run([operation], give_up=give_up)
            said = list(islice(self.walk, 11 + len(self.entries) % 7))
            assert not any(said), said
            if not said:
                self.ended += 1
                self.walk = walk(self.world.cache)
        return answers

    def close(self) -> None:
        self.stack.close()


class WalkingMachine(CacheMachine):
    make_driver = staticmethod(lambda: Walking(new_world()))


WalkingMachine.TestCase.settings = examples(25)
TestWalkingMachine = WalkingMachine.TestCase


@pytest.mark.parametrize("eviction", ["lru", "density"])
def test_a_busy_pool_is_sound_in_slices(eviction: str) -> None:
    """Sequences of shared prefixes come, fork, and go, and pages are evicted, between any two slices."""
    world = World(24, eviction=eviction)
    session, names, count, walks = world.attached(), list[str](), 0, 0
    with pausing_everywhere():
        walking = walk(world.cache)
        for at in range(1500):
            name = f"s{at}"
            prompt = [at % 5, 1, 2, 3, at % 3, 5, 6, 7, at % 2]
            # Two that compute the same at once: one stands by.
            twins = [Opening(one, Prompt(array("I", prompt), "", None), 3) for one in (name, f"t{at}")]
            told, _ = world.cache.calls.allocate(session.id, twins, [])
            if isinstance(told[0][1], Exception) or isinstance(told[1][1], Exception):
                world.cache.calls.remove(session.id, [name, f"t{at}"])
                world.cache.calls.remove(session.id, names[: 1 + at % 3])
                names = names[1 + at % 3 :]
                continue
            names += [name, f"t{at}"]
            start = session.sequences[name].cached_tokens
            rest = array("I", prompt[start:])
            for one in names[-2:]:
                world.cache.calls.allocate(session.id, [Steps([one], [start], [len(rest)], rest, [3], [3])], [])
            if at % 4 == 0:
                told, _ = world.cache.calls.allocate(session.id, [Opening(f"f{at}", name, 3)], [])
                names += [f"f{at}"] if not isinstance(told[0][1], Exception) else []
            if at % 97 == 96:
                world.cache.close_session(session.id)
                session, names = world.attached(), []
            world.now += at % 2
            said = list(islice(walking, 1 + at % 29))
            assert not any(said), said
            count += len(said)
            if not said:
                walks, walking = walks + 1, walk(world.cache)
    assert walks >= 20 and count / walks > 100


def policy(pool: Pool) -> Any:
    return pool.table.cached._policy


def circle(pool: Pool) -> None:
    """The newest page leads to the oldest again."""
    queue = policy(pool)
    oldest, newest = queue._oldest, queue._newest
    queue._older[oldest], queue._newer[newest] = newest, oldest


def swap(pool: Pool) -> None:
    """The two oldest pages stand in each other's place: the chain is whole, and in another order."""
    queue = policy(pool)
    a = queue._oldest
    b = queue._newer[a]
    c = queue._newer[b]
    queue._oldest, queue._older[b], queue._newer[b] = b, -1, a
    queue._older[a], queue._newer[a], queue._older[c] = b, c, a


def lose_entry(pool: Pool) -> None:
    [heap] = pool.table.cached._heaps.values()
    heap.pop()
    pool.table.cached._entries -= 1


def double_entry(pool: Pool) -> None:
    [heap] = pool.table.cached._heaps.values()
    heap.append(heap[-1])
    pool.table.cached._entries += 1


def overdue(pool: Pool) -> None:
    retained = pool.table.cached._retained
    page, entry = next(iter(retained.items()))
    retained[page] = entry._replace(until=1.0)


def second_slot(pool: Pool) -> None:
    """A page has two slots in the table of keys."""
    table = pool.index._of_key
    table._pages[table._pages.index(-1)] = 1


#: By what is wrong then. Page 0 is held, 1 published, 59 was never granted.
DAMAGES: dict[str, Callable[[Any], object]] = {
    "taken by nobody": lambda pool: pool.table.take("nobody"),
    "listed and not held": lambda pool: next(iter(pool.sequences)).pages.append(59),
    "more tokens than room": lambda pool: next(iter(pool.sequences)).tokens.extend([1] * 99),
    "other tokens": lambda pool: next(iter(pool.sequences)).tokens.__setitem__(0, 77),
    "held by nobody": lambda pool: pool.table._first.__setitem__(0, "nobody"),
    "held and free": lambda pool: pool.table._states.__setitem__(0, 0),
    "miscounted holders": lambda pool: pool.table._charged.__setitem__(0, 5),
    "miscounted pages": lambda pool: setattr(pool.table, "_held_count", pool.table._held_count + 1),
    "named and not indexed": lambda pool: pool.index._primary.pop(pool.index._names[0]),
    "indexed and not named": lambda pool: pool.index._primary.__setitem__(b"12345678" + bytes(16), 1),
    "without a key": lambda pool: pool.index._of_key.remove(pool.index.key(1)),
    "another key": lambda pool: pool.index._keys.__setitem__(1, 7),
    "two slots": second_slot,
    "a mark of no link": lambda pool: pool.index._is_primary.__setitem__(59, 1),
    "a key of no link": lambda pool: pool.index._of_key.add(59),
    "an unknown stand-by": lambda pool: pool.index._standby.__setitem__(pool.index.key(1), [59]),
    "condemned": lambda pool: pool.index._condemned.__setitem__(1, 1),
    "a salt of no link": lambda pool: pool.index._salts.__setitem__(59, "salt"),
    "cached and held": lambda pool: pool.table.cached.push(0, 0.0),
    "granted and on the free list": lambda pool: pool.table._recycled.append(0),
    "on the free list twice": lambda pool: pool.table._recycled.append(59),
    "cached in the future": lambda pool: policy(pool)._since.__setitem__(pool.table.cached.oldest, 1e9),
    "a circle": circle,
    "out of order": swap,
    "miscounted queue": lambda pool: setattr(policy(pool), "_length", len(policy(pool)) + 1),
    "no way back": lambda pool: policy(pool)._older.__setitem__(policy(pool)._newer[policy(pool)._oldest], -1),
    "a promise of a free page": lambda pool: pool.table.cached.promise(59, Promise(5, 9e9)),
    "retained in no heap": lose_entry,
    "in a heap twice": double_entry,
    "a heap that is none": lambda pool: next(iter(pool.table.cached._heaps.values())).reverse(),
    "retained for too long": overdue,
    "due too late": lambda pool: setattr(pool.table.cached, "_due", 9e9),
    "entries of ended sequences": lambda pool: setattr(pool.endings, "entries", pool.endings.entries + 1),
    "the account": lambda pool: setattr(pool.memory, "used", pool.memory.used + 1),
}

LEARNING: dict[str, Callable[[Any], object]] = {
    "another parent": lambda pool: policy(pool)._parent.__setitem__(pool.table.cached.oldest, 59),
    "more continuations": lambda pool: policy(pool)._continuations.__setitem__(pool.table.cached.oldest, 9),
    "no place": lambda pool: policy(pool)._place.__setitem__(pool.table.cached.oldest, 0),
    "another level": lambda pool: policy(pool)._returns.__setitem__(pool.table.cached.oldest, 4),
    "a queue that is cut": lambda pool: policy(pool)._after.__setitem__(policy(pool)._ends[0][0], -1),
    "another end": lambda pool: policy(pool)._ends[0].__setitem__(0, policy(pool)._after[policy(pool)._ends[0][0]]),
    "out of order": swap,
}

UNCLEAN: dict[str, Callable[[Any], object]] = {
    "on the free list": lambda pool: pool.table._recycled.append(next(iter(pool.table.unclean._waiting))),
    "being zeroed": lambda pool: pool.table.unclean._in_work.update(pool.table.unclean._waiting),
    "held": lambda pool: pool.table.unclean._waiting.__setitem__(0, None),
}


def record(cache: KvCache) -> Any:
    [one] = cache.quarantine.lost()
    return one


ELSEWHERE: dict[str, Callable[[KvCache], object]] = {
    "waited for twice": lambda cache: record(cache).left["more"].append(record(cache).left[""][0]),
    "waited for and not quarantined": lambda cache: record(cache).left[""].__setitem__(0, 59),
    "quarantined and not waited for": lambda cache: record(cache).left[""].pop(),
    "miscounted quarantine": lambda cache: setattr(record(cache), "kept", 99),
    "miscounted pages": lambda cache: setattr(cache.live_sessions()[0], "held_pages", 99),
    "miscounted ids": lambda cache: setattr(cache.live_sessions()[0], "ids_bytes", 9),
    "another name": lambda cache: cache.live_sessions()[0].sequences.update(b=cache.live_sessions()[0].sequences["a"]),
    "removed and live": lambda cache: cache.live_sessions()[0].removed.update(a=None),
}


def played(**limits: Any) -> tuple[World, Session]:
    """Pages in every state, and a session whose sequences come and go."""
    world = World(60, **limits)
    session = world.attached()
    run(world, session, "a", list(range(9)), 3)
    for at in range(8):
        retention = Retention(1000 + at, 7) if at % 2 else None
        prompt = array("I", [50 + at, *range(8)])
        world.cache.calls.allocate(session.id, [Opening(f"old{at}", Prompt(prompt, "", retention), 3)], [])
        world.cache.calls.append(session.id, Steps([f"old{at}"], [0], [9], prompt, [], []))
        world.cache.calls.remove(session.id, [f"old{at}"])
    lost = world.attached(pid=77, ttl_s=2.0)
    run(world, lost, "lost", [1], 9)
    world.now += 3
    world.cache.sweep()
    record(world.cache).left["more"] = [record(world.cache).left[""].pop()]
    world.sound()
    return world, session


def found_meanwhile(world: World, session: Session) -> list[str]:
    """What a walk finds that pauses everywhere, while sequences come and go."""
    found = []
    with pausing_everywhere():
        for at, said in enumerate(walk(world.cache)):
            found += [said] if said is not None else []
            names = [f"b{at}"]
            world.cache.calls.allocate(session.id, [Opening(names[0], Prompt(array("I", [at, 1]), "", None), 1)], [])
            world.cache.calls.remove(session.id, names)
    return found


@pytest.mark.parametrize("limits", [{}, {"eviction": "density"}, {"zero_pages": True}])
def test_nothing_is_found_in_a_sound_pool(limits: dict[str, Any]) -> None:
    world, session = played(**limits)
    assert not found_meanwhile(world, session)
    world.sound()


@pytest.mark.parametrize(
    ("limits", "damage"),
    [
        *(pytest.param({}, damage, id=name) for name, damage in DAMAGES.items()),
        *(pytest.param({"eviction": "density"}, damage, id=f"learning: {name}") for name, damage in LEARNING.items()),
        *(pytest.param({"zero_pages": True}, damage, id=f"unclean: {name}") for name, damage in UNCLEAN.items()),
    ],
)
def test_damage_is_found_while_transactions_run_between_slices(
    limits: dict[str, Any], damage: Callable[[Any], object]
) -> None:
    world, session = played(**limits)
    [pool] = world.cache.pools
    damage(pool)
    assert list(check(world.cache)), "found at once, when nothing runs between the slices"
    assert found_meanwhile(world, session)


@pytest.mark.parametrize("damage", ELSEWHERE.values(), ids=ELSEWHERE)
def test_damage_of_sessions_and_quarantine_is_found_too(damage: Callable[[KvCache], object]) -> None:
    world, session = played()
    damage(world.cache)
    assert list(check(world.cache))
    assert found_meanwhile(world, session)


def test_a_pool_that_is_dropped_meanwhile_is_no_damage() -> None:
    for ahead in range(0, 300, 13):
        world = World(40)
        session = world.attached()
        run(world, session, "a", list(range(40)), 11)
        world.cache.close_session(session.id)
        with pausing_everywhere(), mock.patch.object(slices, "ENTRIES", 1):
            walking, dropping = walk(world.cache), world.cache.dropping("pool")
            assert not any(islice(walking, ahead))
            for job in dropping:
                if job is not None:
                    job()
                assert not any(islice(walking, 1))
            assert not any(walking)


def test_a_session_of_many_sequences_that_ends_meanwhile_is_no_damage() -> None:
    for ahead in range(0, 200, 17):
        world = World(40)
        session = world.attached()
        for at in range(9):
            run(world, session, f"s{at}", [at, *range(7)], 3)
        with pausing_everywhere(), mock.patch.object(slices, "ENTRIES", 4):
            walking = walk(world.cache)
            assert not any(islice(walking, ahead))
            world.cache.close_session(session.id)
            [pool] = world.cache.pools
            assert not pool.sequences and pool.endings.sessions
            while world.cache.debts:
                world.sound()
                assert not any(islice(walking, 3))
                world.cache.debts.pay(world.now)
            assert not any(walking)
            assert not pool.endings.sessions and not pool.endings.entries and not pool.table.held_count
            world.sound()


def test_no_slice_is_long() -> None:
    """What takes a whole look is a small part of a walk, and the walk pauses often: the ratio is that of any size."""
    pages = 100_000
    world = World(pages, budget_bytes=1 << 40, max_sequences=1 << 20)
    session = world.attached()
    serve_fast = world.cache.calls.allocate
    for at in range(200):
        prompt = array("I", [at, *range(4 * 150)])
        serve_fast(session.id, [Opening(f"s{at}", Prompt(prompt, "", None), 500)], [])
        serve_fast(session.id, [Steps([f"s{at}"], [0], [len(prompt)], prompt, [500], [500])], [])
    world.cache.calls.remove(session.id, [f"s{at}" for at in range(100)])

    def spans() -> list[float]:
        """The processor's time of each slice."""
        found, began = [], time.thread_time()
        for said in walk(world.cache):
            assert said is None
            now = time.thread_time()
            found.append(now - began)
            began = now
        return found

    gc.collect()
    gc.disable()  # else the garbage of all tests before this one may be a slice's
    try:
        # What a busy machine adds to a slice, it does not add to the same one each time.
        least = [min(times) for times in zip(*(spans() for _ in range(3)), strict=True)]
    finally:
        gc.enable()
    assert len(least) > 5 * pages / 512
    # 50 ms of the 8 s that a million pages take are a 160th.
    assert max(least) < sum(least) / 40


def test_a_sequence_is_checked_while_it_grows() -> None:
    world = World(40)
    session = world.attached()
    serve(world, session, opening("a", [1], 1))
    with pausing_everywhere():
        walking = walk(world.cache)
        for pages in range(2, 40):
            assert not any(islice(walking, 9))
            world.cache.calls.allocate(session.id, [Steps(["a"], [0], [0], array("I"), [pages], [pages - 1])], [])
        assert not any(walking)
    serve(world, session, growth("a", 0, [1], 39, 39))


def test_health_answers_while_somebody_has_a_large_pool_checked_again_and_again(tmp_path: Path) -> None:
    """Held by a check, the loop would answer Health at its end: in each, some call would take nearly as long as it."""
    tiny = pb.PageLayout(page_size=1, layers=1, kv_heads=1, head_dim=1, data_type=pb.DATA_TYPE_F16)
    with kvcache(tmp_path, "--memory", "64MiB") as daemon:
        stub, health = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel), health_pb2_grpc.HealthStub(daemon.channel)
        stub.OpenSession(pb.OpenSessionRequest(client_name="t", pool_id="large", layout=tiny, pool_pages=400_000))
        shares = []
        for _ in range(5):
            began = time.monotonic()
            check, longest = stub.Fsck.future(pb.FsckRequest()), 0.0
            while not check.done():
                asked = time.monotonic()
                health.Check(health_pb2.HealthCheckRequest())
                longest = max(longest, time.monotonic() - asked)
            assert check.result().checked_pages == 400_000 and not check.result().violations
            shares.append(longest / (time.monotonic() - began))
        assert min(shares) < 1 / 3, shares
