"""A corrupted page is removed with its continuations, by generation, whatever else happens between two slices."""

from __future__ import annotations

import random
from array import array

import pytest

from services.kvcache.lease.sessions import Session
from services.kvcache.pool.pool import Pool
from services.kvcache.scrub.purge import purge
from tests.kvcache.cache.demands import growth, opening
from tests.kvcache.cache.test_cache import run, serve
from tests.kvcache.fakes import World

SIZE = 4


def chains(pool: Pool, first: int) -> list[int]:
    """The published pages that are, or continue, a first page of these tokens."""
    found = []
    for page in pool.index.published():
        at = page
        while (parent := pool.index.parent(at)) is not None:
            at = parent
        if (pool.index.tokens(at) or b"")[:4] == first.to_bytes(4, "little"):
            found.append(page)
    return found


def world_of_two_prefixes(pages: int) -> tuple[World, Session, Pool]:
    """Live sequences that continue pages of ones and of twos, alternating; each has room for two more pages."""
    world = World(pages)
    session = world.attached()
    for at in range(8):
        prompt = [1 + at % 2] * SIZE + [10 + at] * SIZE
        run(world, session, f"{at}", prompt, 4)
    return world, session, world.cache.pool_of(session)


@pytest.mark.parametrize("seed", range(20))
def test_pages_published_between_slices_go_as_well(seed: int) -> None:
    """Sequences that hold what is being removed continue, end and begin at any time."""
    world, session, pool = world_of_two_prefixes(64)
    chosen = random.Random(seed)
    resident = {f"{at}": 2 * SIZE for at in range(8)}
    [root] = [page for page in chains(pool, 1) if pool.index.parent(page) is None and pool.index.is_primary(page)]
    pool.index.condemn(root)
    slices = purge(pool, slice_pages=chosen.choice([1, 3, 8]))
    for number, _ in enumerate(slices):
        world.sound()
        if not pool.index.condemned_count:
            break  # from now on it may be computed anew
        assert not pool.match(text(1), ""), "nobody is given any of it"
        name = chosen.choice(sorted(resident))
        match chosen.randrange(4):
            case 0 if resident[name] < 4 * SIZE:
                serve(world, session, growth(name, resident[name], [5] * SIZE, 4, known=4))
                resident[name] += SIZE
            case 1 if int(name) % 2 == 0 and len(resident) > 5:
                world.cache.calls.remove(session.id, [name])
                del resident[name]
            case 2:
                late = f"late {number}"
                serve(world, session, opening(late, text(1), 4))
                serve(world, session, growth(late, 0, text(1)[: 3 * SIZE], 4, known=4))
                world.cache.calls.remove(session.id, [late])
            case _:
                world.cache.evict_pages("pool", 1)
        world.sound()
    assert chains(pool, 1) == [] and pool.index.condemned_count == 0
    assert chains(pool, 2), "others are left alone"
    run(world, session, "again", text(1).tolist(), 4)
    assert len(pool.match(text(1), "")) == 3, "computed anew, it is cached as ever"
    world.sound()


def text(first: int) -> array[int]:
    """Three whole pages and a token."""
    return array("I", [first] * SIZE + [10] * SIZE + [5] * SIZE + [0])


def test_one_slice_is_short_however_long_a_chain_is() -> None:
    world = World(2000)
    session = world.attached()
    run(world, session, "a", [1] * (1900 * SIZE), 1900)
    pool = world.cache.pool_of(session)
    [root] = [page for page in chains(pool, 1) if pool.index.parent(page) is None]
    pool.index.condemn(root)
    slices, left = 0, len(pool.index)
    for _ in purge(pool, slice_pages=256):
        assert left - len(pool.index) <= 64
        slices, left = slices + 1, len(pool.index)
    assert slices > 30 and len(pool.index) == 0


def test_checksums_of_a_page_s_earlier_life_are_worth_nothing() -> None:
    world = World(4)
    session = world.attached()
    run(world, session, "a", [1] * SIZE, 1)
    pool = world.cache.pool_of(session)
    known = pool.checksums
    assert known is not None
    due = known.due(8)
    known.learn(due, [7])
    world.cache.calls.remove(session.id, ["a"])
    world.cache.evict_pages("pool", None)
    run(world, session, "b", [1] * SIZE, 1)
    assert known.verify(due, [8]) == [] and known.verified_pages == 0
    known.learn(due, [7])
    assert known.verifiable(range(4)) == [], "its own is still to be taken"
    assert [page for page, _ in known.due(8)] == [page for page, _ in due]


def test_a_page_that_the_walk_has_passed_is_published_behind_one_that_it_has_not_reached() -> None:
    world = World(4)
    session = world.attached()
    run(world, session, "x", [9], 1)
    run(world, session, "a", [1] * 2 * SIZE, 2)
    world.cache.calls.remove(session.id, ["x"])
    serve(world, session, growth("a", 2 * SIZE, [], 3, known=2))
    pool = world.cache.pool_of(session)
    assert world.cache.calls.get_sequence(session.id, "a")[0].pages == [1, 2, 0]
    pool.index.condemn(1)
    slices = purge(pool, slice_pages=1)
    next(slices)
    serve(world, session, growth("a", 2 * SIZE, [1] * SIZE, 3, known=3))
    assert pool.index.is_published(0)
    for _ in slices:
        world.sound()
    assert len(pool.index) == 0
    world.sound()
