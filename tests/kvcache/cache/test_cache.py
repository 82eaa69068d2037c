"""The state object, one law a test."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.common.errors import (
    AttachMismatch,
    CapacityExceeded,
    ExceedsBudget,
    ExceedsPool,
    FieldInvalid,
    InvalidConfiguration,
    LayoutMismatch,
    PositionMismatch,
    SequenceMismatch,
    SequenceRemoved,
    SequenceUnknown,
    ServiceError,
    SessionExpired,
    SessionNotAttached,
    TooManySequences,
    TooManySessions,
)
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.walk import check
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.layout import PageLayout
from tests.kvcache.cache.demands import Demand, Step, grouped, growth, in_columns, opening
from tests.kvcache.fakes import LAYOUT, World


def serve(world: World, session: Session, demand: Demand, removed: list[str] | None = None) -> Grant:
    """What one sequence was granted; nothing for a step without news."""
    told, _ = world.cache.calls.allocate(session.id, grouped([demand]), removed or [])
    world.sound()
    if not told and isinstance(demand, Step):
        return Grant(demand.known_pages, [], session.sequences[demand.sequence_id].cached_tokens, [])
    [(name, result)] = told
    assert name == demand.sequence_id
    if isinstance(result, ServiceError):
        raise result
    return result


def pages(grant: Grant) -> list[int]:
    return [page for page, _ in grant.pages]


def run(world: World, session: Session, name: str, prompt: list[int], count: int) -> list[int]:
    """Open a sequence, run its whole prompt, and return its block table."""
    grant = serve(world, session, opening(name, prompt, count))
    serve(world, session, growth(name, grant.cached_tokens, prompt[grant.cached_tokens :], 0))
    return pages(grant)


def test_pages_are_distinct_and_never_used_ones_come_in_order() -> None:
    world = World(10)
    session = world.attached()
    assert pages(serve(world, session, opening("a", [1], 10))) == list(range(10))
    with pytest.raises(CapacityExceeded) as caught:
        serve(world, session, opening("b", [1], 1))
    assert caught.value.metadata | {"held_pages": "10", "free_pages": "0", "needed_pages": "1"} == caught.value.metadata
    assert caught.value.retry_after_s is not None


def test_a_matched_cached_page_is_not_counted_as_evictable_too() -> None:
    world = World(4)
    session = world.attached()
    run(world, session, "a", list(range(9)), 3)
    world.cache.calls.remove(session.id, ["a"])
    serve(world, session, opening("h", [50], 1))
    # 2 cached pages match and 1 page is free: a second new page could only be one of the two matched.
    with pytest.raises(CapacityExceeded):
        serve(world, session, opening("b", list(range(13)), 4))
    assert serve(world, session, opening("b", list(range(13)), 3)).cached_tokens == 8


def test_an_opening_that_fails_changes_nothing() -> None:
    world = World(5)
    session = world.attached()
    run(world, session, "a", list(range(9)), 3)
    world.cache.calls.remove(session.id, ["a"])
    serve(world, session, opening("h", [50], 2))
    table = next(iter(world.cache.pools)).table
    before = (list(table.cached), table.free_count, table.held_count)
    # Matches 2 cached pages, needs 3 more: 1 is free, and no other page is cached.
    with pytest.raises(CapacityExceeded):
        serve(world, session, opening("b", list(range(9)), 5))
    assert (list(table.cached), table.free_count, table.held_count) == before
    with pytest.raises(SequenceUnknown):
        world.cache.calls.get_sequence(session.id, "b")


def test_the_last_prompt_token_is_never_matched() -> None:
    world = World(10)
    session = world.attached()
    run(world, session, "a", list(range(8)), 2)
    assert serve(world, session, opening("b", list(range(8)), 2)).cached_tokens == 4
    assert serve(world, session, opening("c", list(range(9)), 3)).cached_tokens == 8


def test_salts_do_not_share() -> None:
    world = World(10)
    session = world.attached()
    run(world, session, "a", list(range(9)), 3)
    assert serve(world, session, opening("b", list(range(9)), 3, salt="tenant")).cached_tokens == 0


def test_concurrent_prefills_of_one_prefix_converge() -> None:
    world = World(12)
    one, two = world.attached(), world.attached()
    prompt = list(range(9))
    first = pages(serve(world, one, opening("a", prompt, 3)))
    second = pages(serve(world, two, opening("b", prompt, 3)))
    serve(world, one, growth("a", 0, prompt, 0))
    serve(world, two, growth("b", 0, prompt, 0))
    world.cache.calls.remove(two.id, ["b"])
    world.cache.calls.remove(one.id, ["a"])
    world.sound()
    table = next(iter(world.cache.pools)).table
    assert set(table.cached) == set(first[:2]), "one copy of each complete page stays"
    assert table.free_count == 10
    assert not set(first) & set(second)


def test_a_prefix_used_through_a_copy_outlives_its_continuation() -> None:
    # b computes the same first page as a, and goes on alone. When a's page was let go long before, and b's own copy
    # is dropped in its favour, it must count as just used: or it would be evicted before b's second page.
    world = World(12)
    session = world.attached()
    serve(world, session, opening("a", [1, 2, 3, 4, 5], 2))
    serve(world, session, opening("b", [1, 2, 3, 4, 5, 6, 7, 8, 9], 3))
    serve(world, session, growth("a", 0, [1, 2, 3, 4], 0))
    serve(world, session, growth("b", 0, [1, 2, 3, 4, 5, 6, 7, 8], 0))
    world.cache.calls.remove(session.id, ["a"])
    world.now += 5
    world.cache.calls.remove(session.id, ["b"])
    table = next(iter(world.cache.pools)).table
    assert list(table.cached) == [3, 0], "tail first, then the shared head"
    serve(world, session, opening("fill", [99], 11))
    world.sound()
    assert list(table.cached) == [0]


def test_eviction_takes_tails_before_heads_and_never_a_held_page() -> None:
    world = World(6)
    session = world.attached()
    table = run(world, session, "a", list(range(13)), 4)
    world.cache.calls.remove(session.id, ["a"])
    held = pages(serve(world, session, opening("b", [90], 2)))
    got = pages(serve(world, session, opening("c", [91], 3)))
    assert got[0] not in table[:3] and got[1:] == [table[2], table[1]]
    assert not set(got) & set(held)
    assert serve(world, session, opening("d", list(range(13)), 0)).cached_tokens == 4


def test_a_removed_sequence_never_comes_back() -> None:
    world = World(10)
    session = world.attached()
    run(world, session, "a", [1, 2], 1)
    world.cache.calls.remove(session.id, ["a", "never-opened"])
    for name in ("a", "never-opened"):
        with pytest.raises(SequenceRemoved):
            serve(world, session, opening(name, [1, 2], 1))
        [(_, result)] = world.cache.calls.append(session.id, in_columns([Step(name, 0, (1,))], growing=False))
        assert isinstance(result, SequenceRemoved)
    assert serve(world, world.attached(), opening("a", [1, 2], 1)), "another session's ids are its own"


def test_removal_makes_room_for_the_demands_of_the_same_call() -> None:
    world = World(2)
    session = world.attached()
    serve(world, session, opening("a", [1], 2))
    assert len(pages(serve(world, session, opening("b", [1], 2), removed=["a"]))) == 2


def test_replayed_opening_must_be_the_same() -> None:
    world = World(10)
    session = world.attached()
    first = serve(world, session, opening("a", [1, 2, 3], 2))
    assert serve(world, session, opening("a", [1, 2, 3], 2)) == first
    for other in (opening("a", [1, 2], 2), opening("a", [1, 2, 3], 2, salt="x")):
        with pytest.raises(SequenceMismatch):
            serve(world, session, other)


@pytest.mark.parametrize(
    ("demand", "error", "words"),
    [
        (growth("x", 0, [], 1), SequenceUnknown, "'x'"),
        (opening("n", [], 1), FieldInvalid, "at least one token"),
        (opening("n", [1], 99), ExceedsPool, "99, but the pool has 10"),
        (growth("a", 4, [], 3, known=4), FieldInvalid, "known_pages is 4 and the sequence has 3"),
        (growth("a", 5, [1], 0), PositionMismatch, "gap"),
        (growth("a", 0, [1] * 9, 0), PositionMismatch, "hold 8"),
        (growth("a", 0, [1, 9], 0), PositionMismatch, "differ"),
    ],
)
def test_a_bad_demand_is_told_why_and_changes_nothing(demand: Demand, error: type[ServiceError], words: str) -> None:
    world = World(10)
    session = world.attached()
    serve(world, session, opening("a", [1, 2, 3, 4, 5], 2))
    serve(world, session, growth("a", 0, [1, 2, 3, 4], 0))
    with pytest.raises(error, match=words):
        serve(world, session, demand)
    sequence, _ = world.cache.calls.get_sequence(session.id, "a")
    pool = world.cache.pool_of(session)
    assert (list(sequence.tokens), len(sequence.pages), pool.table.held_count) == ([1, 2, 3, 4], 2, 2)


def test_generation_moves_when_content_is_given_up() -> None:
    world = World(2)
    session = world.attached()
    [(page, before)] = serve(world, session, opening("a", [1], 1)).pages
    world.cache.calls.remove(session.id, ["a"])
    [(again, after)] = serve(world, session, opening("b", [1], 1)).pages
    assert (again, after) == (page, before + 1)


def test_a_killed_engine_is_noticed_before_its_lease_ends() -> None:
    world = World(10)
    session = world.attached(pid=5)
    run(world, session, "a", list(range(6)), 3)
    assert world.cache.sweep() == []
    world.processes.kill(5)
    assert [lost.id for lost in world.cache.sweep()] == [session.id]
    table = next(iter(world.cache.pools)).table
    assert (table.free_count, table.cached_count, table.quarantined_count) == (9, 1, 0)


def test_a_closed_session_gives_pages_back_at_once() -> None:
    world = World(10)
    session = world.attached(pid=5)
    run(world, session, "a", list(range(6)), 3)
    assert world.cache.close_session(session.id) == 1
    assert world.cache.close_session(session.id) is None
    world.sound()
    table = next(iter(world.cache.pools)).table
    assert (table.free_count, table.cached_count, table.quarantined_count) == (9, 1, 0)
    assert serve(world, world.attached(), opening("b", list(range(6)), 2)).cached_tokens == 4, "still warm"


def test_any_call_renews_and_a_late_one_does_not() -> None:
    world = World(10, default_ttl_s=10.0)
    session = world.attached()
    for _ in range(4):
        world.now += 9
        world.cache.calls.sequences_of(session.id, 0, 100)
    assert world.cache.sweep() == []
    world.now += 10
    with pytest.raises(SessionExpired):
        world.cache.calls.allocate(session.id, [], [])


def test_cached_pages_expire_after_their_ttl() -> None:
    world = World(10, cache_ttl_s=60.0)
    session = world.attached(ttl_s=600.0)
    run(world, session, "a", list(range(6)), 2)
    world.cache.calls.remove(session.id, ["a"])
    world.now += 59
    world.cache.sweep()
    pool = next(iter(world.cache.pools))
    assert pool.table.cached_count == 1
    world.now += 1
    world.cache.sweep()
    world.sound()
    assert (pool.table.cached_count, pool.table.free_count, pool.totals.expired_pages) == (0, 10, 1)


def test_nothing_is_granted_before_the_canary_is_answered() -> None:
    world = World(10)
    session = world.cache.open_session("test", "pool", LAYOUT)
    with pytest.raises(SessionNotAttached):
        world.cache.calls.allocate(session.id, [], [])
    with pytest.raises(AttachMismatch, match="other memory"):
        world.cache.attach_session(session.id, bytes(32))
    with pytest.raises(AttachMismatch, match="not shared"):
        world.cache.attach_session(session.id, session.canary)
    with pytest.raises(SessionNotAttached):
        world.cache.calls.append(session.id, in_columns([], growing=False))


def test_canary_slots_are_each_sessions_own_and_reused() -> None:
    world = World(10, max_sessions=3)
    sessions = [world.attached() for _ in range(3)]
    assert [session.canary_slot for session in sessions] == [0, 1, 2]
    with pytest.raises(TooManySessions):
        world.attached()
    world.cache.close_session(sessions[1].id)
    assert world.attached().canary_slot == 1
    world.sound()


def test_sequences_of_a_session_are_limited() -> None:
    world = World(10, max_sequences=2)
    session = world.attached()
    serve(world, session, opening("a", [1], 0))
    serve(world, session, opening("b", [1], 0))
    with pytest.raises(TooManySequences):
        serve(world, session, opening("c", [1], 0))
    serve(world, session, opening("c", [1], 0), removed=["a"])


def test_a_pool_is_of_one_layout() -> None:
    world = World(10)
    world.attached()
    other = PageLayout(page_size=8, layers=1, kv_heads=1, head_dim=4, dtype="f32")
    with pytest.raises(LayoutMismatch, match=r"page_size=4.*page_size=8"):
        world.cache.open_session("test", "pool", other)
    with pytest.raises(LayoutMismatch, match="pool_pages is 11"):
        world.cache.open_session("test", "pool", LAYOUT, pool_pages=11)


def test_an_arena_beyond_the_budget_is_refused_before_it_is_made() -> None:
    world = World(10, budget_bytes=100_000)
    with pytest.raises(ExceedsBudget, match="100000"):
        world.cache.open_session("test", "big", LAYOUT, pool_pages=4_000_000)
    assert world.arenas == []
    with pytest.raises(InvalidConfiguration, match="pool_pages is 0; it must be 1 to"):
        world.cache.open_session("test", "none", LAYOUT, pool_pages=0)


def test_an_idle_pool_gives_way_to_a_new_one_and_a_used_one_does_not() -> None:
    world = World(400, budget_bytes=100_000)  # an arena of 400 pages is 67584 bytes
    session = world.attached("old")
    with pytest.raises(ExceedsBudget, match="memory budget of 100000, 32416 are free or held by idle pools"):
        world.attached("new")
    world.cache.close_session(session.id)
    with pytest.raises(ExceedsBudget, match="memory budget of 100000, 100000 are free or held by idle pools"):
        world.cache.open_session("test", "large", LAYOUT, pool_pages=4_000_000)
    world.attached("new")
    world.sound()
    assert [pool.id for pool in world.cache.pools] == ["new"]
    assert [arena.closed for arena in world.arenas] == [True, False]


def test_a_pool_with_quarantined_pages_keeps_its_memory() -> None:
    world = World(400, budget_bytes=100_000)
    session = world.attached("old", pid=3)
    serve(world, session, opening("a", [1], 1))
    world.now += 11
    world.cache.sweep()
    with pytest.raises(ExceedsBudget):
        world.attached("new")
    assert not world.arenas[0].closed


@pytest.mark.parametrize(("ttl", "good"), [(0.5, False), (1.0, True), (600.0, True), (601.0, False)])
def test_ttl_limits(ttl: float, good: bool) -> None:
    world = World(10)
    if good:
        assert world.attached(ttl_s=ttl).ttl_s == ttl
    else:
        with pytest.raises(FieldInvalid, match="1 to 600"):
            world.attached(ttl_s=ttl)


def test_access_counts() -> None:
    world = World(10)
    session = world.attached()
    serve(world, session, opening("a", [1, 2], 1))
    world.now += 3
    assert world.cache.calls.append(session.id, in_columns([Step("a", 0, (1, 2))], growing=False)) == []
    sequence, _ = world.cache.calls.get_sequence(session.id, "a")
    assert (sequence.access_count, sequence.created_at, sequence.last_access) == (3, 1000.0, 1003.0)


@pytest.mark.parametrize("values", [1, 2, 5])
def test_colliding_hashes_never_serve_other_tokens(values: int) -> None:
    """With a hash of few values nearly every chain collides; a hit must still be exactly the requested prefix."""
    world = World(12, chain_hash=lambda parent, tokens: (parent * 31 + sum(tokens)) % values)
    session = world.attached(ttl_s=600.0)
    random_ = random.Random(values)
    content: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
    live: list[str] = []
    hits = 0
    for number in range(3000):
        name, salt = f"s{number}", random_.choice(["", "t"])
        prompt = [random_.randrange(2) for _ in range(random_.randrange(1, 18))]
        try:
            grant = serve(world, session, opening(name, prompt, (len(prompt) + 3) // 4, salt))
        except CapacityExceeded:
            world.cache.calls.remove(session.id, [live.pop(random_.randrange(len(live)))])
            continue
        table = pages(grant)
        for at in range(grant.cached_tokens):
            assert content[table[at // 4], at % 4] == (salt, tuple(prompt[: at + 1]))
        hits += grant.cached_tokens > 0
        for at in range(grant.cached_tokens, len(prompt)):
            content[table[at // 4], at % 4] = (salt, tuple(prompt[: at + 1]))
        serve(world, session, growth(name, grant.cached_tokens, prompt[grant.cached_tokens :], 0))
        live.append(name)
    assert hits > 20


def test_check_finds_damage() -> None:
    """The checker itself: each kind of damage is reported."""
    for damage in (
        lambda pool: pool.table.take("nobody"),
        lambda pool: pool.sequences.clear(),
        lambda pool: next(iter(pool.sequences)).pages.append(9),
        lambda pool: next(iter(pool.sequences)).tokens.extend([1] * 99),
        lambda pool: pool.index.withdraw(0),
        lambda pool: pool.index._primary.popitem(),
        lambda pool: pool.index._of_key.remove(pool.index.key(1)),
        lambda pool: pool.index._keys.__setitem__(1, 7),
        lambda pool: pool.table.cached.push(9, 0.0),
        lambda pool: pool.table._recycled.append(0),
    ):
        world = World(10)
        session = world.attached()
        run(world, session, "a", list(range(9)), 3)
        world.sound()
        damage(next(iter(world.cache.pools)))
        assert list(check(world.cache))


def rename(index: Any, page: int, tokens: bytes) -> None:
    """Have a lookup find a link's page for other tokens."""
    name = index._names[page]
    index._names[page] = other = name[:8] + tokens
    index._primary[other] = index._primary.pop(name)


@pytest.mark.parametrize("eviction", ["lru", "density"])
def test_check_tells_of_damage_to_the_index(eviction: str) -> None:
    """With pages that are cached, one that stands by for another, and under either policy."""
    for said, damage in (
        ("parent link is not", lambda index: index._of_key.remove(index.key(0))),
        ("not indexed and marked", lambda index: index._primary.pop(index._names[0])),
        ("not found by its key", lambda index: index._keys.__setitem__(0, 7)),
        ("not its", lambda index: index._parents.__setitem__(1, 7)),
        ("parent link is not", lambda index: index._salts.pop(0)),
        ("salt", lambda index: index._salts.__setitem__(0, "t")),
        ("salt", lambda index: index._salts.__setitem__(1, "s")),
        ("salt", lambda index: index._salts.__setitem__(9, "s")),
        ("not the hash", lambda index: rename(index, 1, bytes(16))),
        ("stands by", lambda index: index._names.__setitem__(3, index._names[1])),
        ("stands by", lambda index: index._salts.pop(3)),
    ):
        world = World(10, eviction=eviction)
        session = world.attached()
        for name, prompt in (("a", list(range(9))), ("b", [0, 1, 2, 3])):
            serve(world, session, opening(name, prompt, 3, "s"))
            serve(world, session, growth(name, 0, prompt, 0))
        world.cache.calls.remove(session.id, ["a"])
        world.sound()
        index = next(iter(world.cache.pools)).index
        assert not index.is_primary(3) and index.tokens(3) is not None
        damage(index)
        assert any(said in violation for violation in check(world.cache)), said
