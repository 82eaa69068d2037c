"""Fsck in slices: transactions run between them, what is wrong is found, and nothing else is."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.cache.walk import walk
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
    "pool.index.prefix_cache.PAUSE",
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


def damages() -> Iterator[Callable[[Any], object]]:
    yield lambda pool: pool.table.take("nobody")
    yield lambda pool: next(iter(pool.sequences)).pages.append(9)
    yield lambda pool: next(iter(pool.sequences)).tokens.extend([1] * 99)
    yield lambda pool: pool.table._first.__setitem__(0, "nobody")
    yield lambda pool: pool.table._states.__setitem__(0, 0)
    yield lambda pool: pool.index._primary.pop(pool.index._names[0])
    yield lambda pool: pool.index._primary.__setitem__(b"12345678" + bytes(16), 1)
    yield lambda pool: pool.index._of_key.remove(pool.index.key(1))
    yield lambda pool: pool.index._keys.__setitem__(1, 7)
    yield lambda pool: pool.table.cached.push(9, 0.0)
    yield lambda pool: pool.table._recycled.append(0)
    yield lambda pool: pool.table.cached._policy._since.__setitem__(pool.table.cached.oldest, 1e9)


@pytest.mark.parametrize("damage", list(damages()))
def test_damage_is_found_while_transactions_run_between_slices(damage: Callable[[Any], object]) -> None:
    world = World(40)
    session = world.attached()
    run(world, session, "a", list(range(9)), 3)
    for at in range(3):
        run(world, session, f"old{at}", [50 + at, *range(8)], 3)
        world.cache.calls.remove(session.id, [f"old{at}"])
    world.sound()
    [pool] = world.cache.pools
    damage(pool)
    with pausing_everywhere():
        found = []
        for at, said in enumerate(walk(world.cache)):
            found += [said] if said is not None else []
            name = f"b{at}"  # somebody comes and goes all the while
            world.cache.calls.allocate(session.id, [Opening(name, Prompt(array("I", [at, 1]), "", None), 1)], [])
            world.cache.calls.remove(session.id, [name])
    assert found


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
    spans, began = [], time.thread_time()
    for said in walk(world.cache):
        assert said is None
        now = time.thread_time()
        spans.append(now - began)
        began = now
    assert len(spans) > 5 * pages / 512
    # 50 ms of the 8 s that a million pages take are a 160th.
    assert max(spans) < sum(spans) / 40


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
