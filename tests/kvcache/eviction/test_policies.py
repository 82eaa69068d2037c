# mypy: disable-error-code="assignment"
"""The eviction policies one by one: what both promise, and what the learned one makes of what it sees."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidConfiguration
from services.kvcache.config import Config
from services.kvcache.eviction import density
from services.kvcache.eviction.density import DensityQueue
from services.kvcache.eviction.lru import LruQueue
from services.kvcache.eviction.policy import POLICIES, make_queue
from services.kvcache.eviction.retaining_queue import RetainingQueue
from services.kvcache.eviction.reuse import FOLLOWED, HORIZON, LEVELS, ReuseModel

TOTAL = 64

both = pytest.mark.parametrize("policy", POLICIES)


def link_of(content: object) -> int:
    """A link's hash, evenly spread as the real ones are."""
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=8).digest(), "little")


class Forest:
    """Pages whose content and parents the test says; the page's own number when it does not."""

    def __init__(self) -> None:
        self.content: dict[int, object] = {}
        self.parents: dict[int, int] = {}

    def key(self, page: int) -> int:
        return link_of(self.content.get(page, page))

    def parent(self, page: int) -> int | None:
        return self.parents.get(page)

    def has_standby(self, page: int) -> bool:
        return False


def sound(queue: LruQueue | RetainingQueue) -> None:
    assert list(queue.check()) == []


def drain(queue: LruQueue | RetainingQueue) -> list[int]:
    """Evict everything; the order it went in."""
    order = []
    while (page := queue.victim()) is not None:
        queue.evict(page)
        sound(queue)
        order.append(page)
    return order


# --- both ---


@both
def test_what_was_pushed_is_in_the_queue_in_the_order_of_time(policy: str) -> None:
    queue = make_queue(policy, TOTAL, Forest())
    assert (queue.oldest, queue.victim(), len(queue)) == (None, None, 0)
    for page in (5, 3, 9):
        queue.push(page, now=float(page))
    assert (list(queue), queue.oldest, queue.since(9), 9 in queue, 4 in queue) == ([5, 3, 9], 5, 9.0, True, False)


@both
def test_a_page_is_queued_once_and_leaves_once(policy: str) -> None:
    queue = make_queue(policy, TOTAL, Forest())
    queue.push(1, 0.0)
    with pytest.raises(ValueError, match="queued already"):
        queue.push(1, 1.0)
    queue.discard(1)
    for leave in (queue.discard, queue.evict):
        with pytest.raises(ValueError, match="not queued"):
            leave(1)
    assert len(queue) == 0
    sound(queue)


@both
def test_a_victim_stays_queued_until_it_is_evicted(policy: str) -> None:
    queue = make_queue(policy, TOTAL, Forest())
    queue.push(1, 0.0)
    queue.push(2, 0.0)
    assert [queue.victim(), queue.victim(), len(queue)] == [1, 1, 2]
    queue.discard(1)  # asked for just in time
    assert queue.victim() == 2
    queue.push(1, 0.0)
    sound(queue)
    assert drain(queue) == [2, 1]


@both
def test_a_touched_page_is_the_newest(policy: str) -> None:
    queue = make_queue(policy, TOTAL, Forest())
    for page in range(4):
        queue.push(page, 0.0)
    queue.touch(0, 1.0)
    assert (list(queue), queue.since(0)) == ([1, 2, 3, 0], 1.0)
    sound(queue)


@both
def test_with_nothing_learned_the_oldest_goes_first(policy: str) -> None:
    queue = make_queue(policy, TOTAL, Forest())
    for page in range(TOTAL):
        queue.push(page, 0.0)
    assert drain(queue) == list(range(TOTAL))


class Whims(ReuseModel):
    """Values without rhyme or reason."""

    def value(self, level: int, age: int) -> float:
        return link_of((level, age)) / 2**64


@pytest.mark.parametrize("kind", ["lru", "density", "whims"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_victim_never_has_a_queued_continuation(kind: str, data: st.DataObject) -> None:
    """Sequences over a tree: each holds a path from the root, and lets go of it from its end."""
    forest, total = Forest(), 15
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(density, "ReuseModel", Whims if kind == "whims" else ReuseModel)
        queue = make_queue("lru" if kind == "lru" else "density", total, forest)
    forest.parents = {page: (page - 1) // 2 for page in range(1, total)}
    for step in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()):
            path, page = [], data.draw(st.integers(0, total - 1))
            while True:
                path.append(page)
                if page not in forest.parents:
                    break
                page = forest.parents[page]
            for page in reversed(path):  # the pages before it that are not cached are computed again
                if page in queue:
                    queue.discard(page)
            for page in path:
                queue.push(page, float(step))
        else:
            for _ in range(data.draw(st.integers(1, 6))):
                page = queue.oldest if data.draw(st.integers(0, 4)) == 0 else queue.victim()
                if page is not None:
                    assert not [child for child in queue if forest.parents.get(child) == page]
                    queue.evict(page)
        sound(queue)
    assert len(drain(queue)) <= total


# --- the learned one ---


def test_content_that_came_back_is_kept_from_a_scan() -> None:
    forest = Forest()
    queue = DensityQueue(TOTAL, forest)
    free, where = list(range(TOTAL)), dict[object, int]()

    def use(content: object) -> bool:
        """Cache one block of content; whether it was there."""
        page = where.get(content)
        if page is not None:
            queue.discard(page)
            queue.push(page, 0.0)
            return True
        if not free:
            victim = queue.victim()
            assert victim is not None
            queue.evict(victim)
            del where[forest.content[victim]]
            free.append(victim)
        page = where[content] = free.pop()
        forest.content[page] = content
        queue.push(page, 0.0)
        return False

    hits = 0
    for turn in range(200):
        hits += sum([use(("hot", at)) for at in range(10)])
        for at in range(90):  # more than the pool holds, so that LRU has forgotten the rest by then
            use(("scan", turn, at))
    sound(queue)
    assert hits > 0.9 * 200 * 10


def test_evicted_content_that_comes_back_is_known_again() -> None:
    forest = Forest()
    queue = DensityQueue(TOTAL, forest)
    forest.content[0] = forest.content[7] = "the same"
    queue.push(0, 0.0)
    queue.discard(0)
    queue.push(0, 0.0)
    assert queue.returns(0) == 1
    queue.evict(0)
    queue.push(7, 0.0)
    queue.push(1, 0.0)
    assert (queue.returns(7), queue.returns(1)) == (2, 0)
    for _ in range(9):
        queue.touch(7, 0.0)
    assert queue.returns(7) == 4  # that is what it counts to


def test_a_condemned_page_that_is_asked_for_is_as_good_as_new() -> None:
    forest = Forest()
    forest.parents = {1: 0}
    queue = DensityQueue(1000, forest)  # large enough to condemn several at a time
    for page in (5, 1, 0, 6):
        queue.push(page, 0.0)
    assert queue.victim() == 5  # 1 and 0 are condemned with it, 0 for the time when 1 is gone
    sound(queue)
    for page in (0, 1):
        queue.discard(page)
    sound(queue)
    for page in (1, 0):
        queue.push(page, 0.0)
    assert drain(queue) == [5, 6, 1, 0]


# --- what it learns ---


def test_the_value_falls_with_age_and_is_the_same_at_every_level_at_first() -> None:
    model = ReuseModel(1000)
    ages = [0, 62, 100, 500, 1000, 3000, 15000]
    values = [model.value(0, age) for age in ages]
    assert values == sorted(values, reverse=True) and len(set(values)) > 4
    assert all([model.value(level, age) for age in ages] == values for level in range(LEVELS))
    assert model.value(0, HORIZON * 1000) == 0.0


def test_what_comes_back_is_worth_more_than_what_does_not() -> None:
    model = ReuseModel(1000)
    for now in range(40000):
        model.began(link_of(now), now % 2, now)
        if now % 2 and now > 600:
            model.returned(link_of(now - 600), now)  # every second one, 600 later
    assert model.value(1, 0) > 20 * model.value(0, 0)
    assert model.value(1, 500) > 2 * model.value(1, 0)  # it is due soon
    assert model.value(1, 500) > 20 * model.value(1, 2000)  # it has missed its time
    for now in range(40000, 240000):  # then nothing comes back any more
        model.began(link_of(now), now % 2, now)
    assert model.value(1, 500) < 3 * model.value(0, 500)


@pytest.mark.parametrize("total", [1, 7, 1000, 100000])
def test_it_follows_a_bounded_number_of_stays(total: int) -> None:
    model = ReuseModel(total)
    for now in range(20000):
        model.began(link_of(now) & ~0xFFFFFFFF, 0, now)  # links that are all in the sample
        assert len(model) <= FOLLOWED
    assert len(model) == min(FOLLOWED, HORIZON * total + 1)


# --- the flag ---


def test_the_policy_is_a_flag_and_least_recently_used_is_the_default() -> None:
    assert Config.read([], {}).limits.eviction == "lru"
    assert Config.read(["--eviction", "density"], {}).limits.eviction == "density"
    with pytest.raises(InvalidConfiguration, match="--eviction fifo: expected one of lru, density"):
        Config.read(["--eviction", "fifo"], {})
    with pytest.raises(ValueError, match="expected one of"):
        make_queue("fifo", 1, Forest())
