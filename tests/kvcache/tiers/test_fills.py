"""Fills and spills one by one: what the random histories reach rarely."""

from __future__ import annotations

import pytest

from services.common.errors import CapacityExceeded
from services.kvcache.cache.grant import Grant
from services.kvcache.lease.sessions import Session
from services.kvcache.slices import finish
from services.kvcache.tiers.host import host_tier
from tests.kvcache.tiers.fake_mover import GARBAGE
from tests.kvcache.tiers.tier_world import PAGE_BYTES, TierWorld, is_filling

PROMPT = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 7]  # five whole pages and a token


def stored(pages: int = 8, **options: int | bool) -> tuple[TierWorld, Session]:
    """A world whose lower tiers have the pages of the prompt, and whose pool has none of them."""
    settings = {"slots": 8, "admits_all": True, **options}
    world = TierWorld(pages, **settings)  # type: ignore[arg-type]
    session = world.attached()
    world.mover.answer_memories()
    world.mover.set_outer(up=bool(settings.get("outer", True)))
    assert isinstance(world.open(session, PROMPT, name="first"), Grant)
    world.compute("first", len(PROMPT))
    world.end("first")
    world.settle()
    world.cache.evict_pages(world.pool.id, None)
    return world, session


def test_an_allocation_ends_fills_and_takes_what_they_hold() -> None:
    world, session = stored(outer=False)
    assert is_filling(world.open(session, PROMPT, wait_s=1.0))
    for _ in range(3):
        world.mover.finish(0)
    [fill] = world.pool.fills
    held, filling = len(fill.pages), world.pool.table.filling_count
    assert held == 3 and filling == 2
    assert isinstance(world.open(session, [9] * 12), Grant), "six of eight pages: two are being written"
    assert not world.pool.fills
    refused = world.open(session, [8] * 6)
    assert isinstance(refused, CapacityExceeded) and refused.metadata["filling_pages"] == "2"
    world.settle()
    assert world.pool.table.filling_count == 0
    world.lawful()


def test_what_has_changed_is_forgotten_below() -> None:
    world, session = stored()
    assert world.tiers.host is not None and len(world.tiers.host) == 5 and len(world.mover.outer) == 5
    while is_filling(world.open(session, PROMPT, wait_s=9.0, name="again")):
        world.settle()
    [page, *_] = session.sequences["again"].pages
    world.scrub(world.pool)
    world.pool.arena.damage[page] = 1  # type: ignore[attr-defined]
    world.verify(world.pool, [page])
    assert len(world.tiers.host) == 0 and not world.mover.outer, "what is behind it goes with it"


def test_what_has_changed_while_it_was_stored_is_forgotten_after() -> None:
    """The mover has read wrong bytes and stores them: the deletion that is sent at once comes before the value."""
    world = TierWorld(8, slots=0, admits_all=True)
    session = world.attached()
    world.mover.answer_memories()
    world.mover.set_outer(up=True)
    assert isinstance(world.open(session, PROMPT, name="first"), Grant)
    world.compute("first", len(PROMPT))
    page = session.sequences["first"].pages[4]
    world.end("first")
    world.scrub(world.pool)
    world.arena[page] = (GARBAGE, GARBAGE)
    world.run_loop()
    for _ in range(5):
        world.mover.finish(0)
    assert len(world.mover.committed) == 5
    world.pool.arena.damage[page] = 1  # type: ignore[attr-defined]
    world.verify(world.pool, [page])
    world.settle()
    world.run_loop()
    assert len(world.mover.outer) == 4
    world.lawful()


def test_what_was_stored_since_it_was_looked_up_is_found() -> None:
    """The outer tier said a moment ago that it has nothing; no time passes."""
    world = TierWorld(8, slots=0, admits_all=True)
    session = world.attached()
    world.mover.answer_memories()
    world.mover.set_outer(up=True)
    assert is_filling(world.open(session, PROMPT, wait_s=1.0, name="first")), "while it is looked up"
    world.mover.finish(0)
    assert isinstance(world.open(session, PROMPT, wait_s=1.0, name="first"), Grant)
    world.compute("first", len(PROMPT))
    world.end("first")
    now = world.now
    world.settle()
    world.now = now
    world.cache.evict_pages(world.pool.id, None)
    assert is_filling(world.open(session, PROMPT, wait_s=1.0, name="second"))
    assert world.mover.doing, "it is looked up again"


def test_a_full_queue_drops_and_says_so() -> None:
    world = TierWorld(40, slots=40, admits_all=True)
    session = world.attached()
    world.mover.answer_memories()
    assert isinstance(world.open(session, list(range(60)), name="long"), Grant)
    world.compute("long", 60)
    world.end("long")
    assert (world.tiers.spills.queued, world.tiers.counts.dropped_pages) == (8, 22)


def test_only_what_has_come_back_is_stored() -> None:
    world = TierWorld(12, slots=12, outer=False)
    session = world.attached()
    world.mover.answer_memories()
    for name in ("first", "second"):
        assert world.tiers.host is not None and len(world.tiers.host) == 0
        assert isinstance(world.open(session, PROMPT, name=name), Grant)
        world.compute(name, len(PROMPT))
        world.end(name)
        world.settle()
    assert world.tiers.host is not None and len(world.tiers.host) == 5


def test_what_is_left_goes_to_the_outer_tier_in_the_end() -> None:
    """Also what found the queue full; what came back alone, and what is there already not again."""
    world = TierWorld(40, slots=0)
    session = world.attached()
    world.mover.answer_memories()
    world.mover.set_outer(up=True)
    for name in ("first", "second"):
        assert isinstance(world.open(session, list(range(60)), name=name), Grant)
        world.compute(name, 60)
        world.end(name)
    assert world.tiers.counts.dropped_pages == 21  # the last page was computed again
    world.settle()
    assert len(world.mover.outer) == 8
    world.tiers.drain()
    while not world.tiers.spills.is_idle:
        world.run_loop()
        world.mover.finish(0)
    assert len(world.mover.outer) == 29
    assert world.tiers.counts.tiers["outer"].stored_pages == 29


def test_a_fill_that_nobody_waits_for_any_more_ends() -> None:
    world, session = stored()
    assert is_filling(world.open(session, PROMPT, wait_s=0.5))
    world.cache.close_session(session.id)
    world.now += 0.51
    world.tiers.tick()
    assert not world.pool.fills
    world.settle()
    table = world.pool.table
    assert (table.held_count, table.filling_count) == (0, 0)


def test_a_pool_goes_when_the_mover_has_let_go_of_it() -> None:
    world, session = stored(outer=False)
    assert is_filling(world.open(session, PROMPT, wait_s=1.0))
    world.cache.close_session(session.id)
    [arena] = world.arenas
    work = world.cache.dropping("pool")
    for _ in range(5):
        next(work)
        assert not arena.closed, "the mover writes to it"
    while world.mover.doing:
        world.mover.finish(0)
    for _ in range(5):
        next(work)
        assert not arena.closed, "the mover maps it"
    world.mover.answer_memories()
    finish(work, lambda: world.now)
    assert arena.closed and not list(world.cache.pools)
    world.sound()


def test_an_opening_without_a_wait_is_opened_at_once_and_fills_for_others() -> None:
    world, session = stored(pages=30, outer=False)
    answer = world.open(session, PROMPT)
    assert isinstance(answer, Grant) and answer.cached_tokens == 0
    assert len(world.pool.fills) == 1
    world.settle()
    later = world.open(session, PROMPT)
    assert isinstance(later, Grant) and later.cached_tokens == 10
    world.lawful()


def test_a_page_that_is_being_zeroed_is_not_filled() -> None:
    world, session = stored(zero_pages=True, outer=False)
    handed = {page for page, _ in world.pool.table.zeroing(8)}
    assert len(handed) == 5, "the scrubber's thread has them"
    assert is_filling(world.open(session, PROMPT, wait_s=1.0))
    for _ in range(5):
        assert not any(map(world.mover_writes, handed))
        world.mover.finish(0)
        world.tiers.tick()
    [fill] = world.pool.fills
    assert len(fill.pages) == 3, "there were three clean pages"
    world.lawful()


def test_nothing_is_evicted_while_the_host_tier_can_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab has room for two pages, the tier for eight."""
    monkeypatch.setattr(host_tier, "_SLAB_BYTES", 2 * PAGE_BYTES)
    world, _ = stored(outer=False)
    assert world.tiers.host is not None
    assert (len(world.tiers.host), len(world.tiers.host.slabs), world.tiers.host.evicted) == (5, 3, 0)
    world.lawful()
