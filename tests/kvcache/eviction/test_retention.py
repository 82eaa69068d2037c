# mypy: disable-error-code="arg-type"
"""Retention: what stays, for how long, in which order it goes, and that a continuation never outlives its prefix."""

from __future__ import annotations

from array import array

import pytest

from services.common.errors import FieldInvalid, InvalidConfiguration, SequenceMismatch, ServiceError
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening
from services.kvcache.config import Config
from services.kvcache.eviction.density import DensityQueue
from services.kvcache.eviction.policy import POLICIES, make_queue
from services.kvcache.eviction.retaining_queue import SLACK, RetainingQueue
from services.kvcache.eviction.retention import MAX_RETENTION_S, Promise, Retention
from tests.kvcache.cache.demands import Step, fork, in_columns, opening
from tests.kvcache.eviction.test_policies import TOTAL, Forest, drain
from tests.kvcache.fakes import World

both = pytest.mark.parametrize("policy", POLICIES)

SIZE = 4


def retaining(policy: str = "lru", most: int = TOTAL, forest: Forest | None = None) -> RetainingQueue:
    links = forest or Forest()
    queue = RetainingQueue(make_queue(policy, TOTAL, links), links, most)
    queue.pass_time(0.0)
    return queue


def cache(queue: RetainingQueue, page: int, priority: int, until: float, now: float = 0.0) -> None:
    queue.promise(page, Promise(priority, until))
    queue.push(page, now)


# --- the queue ---


@both
def test_retained_pages_go_last_by_priority_then_expiry_then_use(policy: str) -> None:
    queue = retaining(policy)
    cache(queue, 0, 50, 10.0)
    cache(queue, 1, 1, 99.0)
    cache(queue, 2, 50, 9.0)
    cache(queue, 3, 100, 1.0)
    cache(queue, 4, 50, 10.0)
    queue.push(5, 0.0)
    queue.push(6, 0.0)
    assert (list(queue), len(queue), queue.retained_count) == ([5, 6, 1, 2, 0, 4, 3], 7, 5)
    assert 5 in queue and 3 in queue and 7 not in queue
    assert (queue.oldest, queue.victim(), queue.victim(retained=False)) == (5, 5, 5)
    assert drain(queue) == [5, 6, 1, 2, 0, 4, 3]
    assert queue.victim() is None


@both
def test_a_retained_page_is_no_victim_for_those_who_spare_it(policy: str) -> None:
    queue = retaining(policy)
    cache(queue, 0, 1, 1.0)
    assert (queue.oldest, queue.victim(retained=False), queue.victim()) == (None, None, 0)


@both
def test_when_its_time_is_over_a_page_is_as_if_just_cached(policy: str) -> None:
    queue = retaining(policy)
    queue.push(9, 0.0)
    cache(queue, 1, 100, 10.0)
    cache(queue, 2, 1, 20.0)
    queue.push(8, 5.0)
    queue.pass_time(9.0)
    assert (list(queue), queue.retained_count) == ([9, 8, 2, 1], 2)
    queue.pass_time(10.0)
    assert (list(queue), queue.since(1)) == ([9, 8, 1, 2], 10.0)
    queue.push(7, 11.0)
    queue.pass_time(1000.0)
    assert (list(queue), queue.since(2), queue.retained_count) == ([9, 8, 1, 7, 2], 1000.0, 0)
    assert drain(queue) == [9, 8, 1, 7, 2]


@both
def test_a_promise_outlives_a_use_and_ends_with_its_time_or_an_eviction(policy: str) -> None:
    queue = retaining(policy)
    for page in range(3):
        cache(queue, page, 5, 10.0)
    for page in range(3):
        queue.discard(page)
    assert queue.retained_count == 0 and queue.promised(0) == Promise(5, 10.0)
    queue.push(0, 1.0)
    assert list(queue.check()) == [] and queue.retained_count == 1
    queue.evict(0)
    assert queue.promised(0) is None
    queue.push(0, 1.0)
    queue.pass_time(10.0)
    assert queue.promised(1) is None
    queue.push(1, 10.0)
    assert (list(queue), queue.retained_count) == ([0, 1], 0)
    queue.promise(2, Promise(1, 11.0))
    queue.push(2, 10.0)
    assert queue.promised(2) == Promise(1, 11.0), "what is over is not joined"


def test_promises_are_joined() -> None:
    queue = retaining()
    assert queue.promise(0, None) is None and not queue.has_promises
    assert queue.promise(0, Promise(5, 10.0)) == Promise(5, 10.0)
    assert queue.promise(0, Promise(9, 3.0)) == Promise(9, 10.0)
    assert queue.promise(0, Promise(1, 1.0)) == queue.promise(0, None) == queue.promised(0) == Promise(9, 10.0)
    queue.push(0, 0.0)
    assert not queue.has_promises and queue.promise(0, None) == Promise(9, 10.0)
    queue.promise(0, Promise(1, 30.0))
    queue.touch(0, 0.0)
    assert queue.promised(0) == Promise(9, 30.0)


@both
def test_beyond_the_limit_the_lowest_is_not_retained(policy: str) -> None:
    queue = retaining(policy, most=2)
    cache(queue, 0, 5, 10.0)
    cache(queue, 1, 5, 20.0)
    cache(queue, 2, 5, 9.0)  # lower than both
    assert list(queue) == [2, 0, 1] and queue.retained_count == 2
    cache(queue, 3, 5, 10.0)  # as high as the lowest, and newer
    assert list(queue) == [2, 0, 3, 1] and queue.retained_count == 2
    cache(queue, 4, 6, 1.0)
    assert list(queue) == [2, 0, 3, 1, 4] and queue.retained_count == 2
    assert queue.promised(3) is None, "it is not retained again when there is room"
    assert list(queue.check()) == []
    nothing = retaining(policy, most=0)
    cache(nothing, 0, 100, 10.0)
    assert (list(nothing), nothing.retained_count) == ([0], 0)


@both
def test_a_page_is_queued_once_and_leaves_once(policy: str) -> None:
    queue = retaining(policy)
    cache(queue, 1, 1, 1.0)
    with pytest.raises(ValueError, match="queued already"):
        queue.push(1, 1.0)
    queue.discard(1)
    for leave in (queue.discard, queue.evict):
        with pytest.raises(ValueError, match="not queued"):
            leave(1)
    assert len(queue) == 0


def test_what_pages_leave_behind_in_the_heaps_is_bounded() -> None:
    queue = retaining()
    for turn in range(100):
        for page in range(8):
            if page in queue:
                queue.discard(page)
            cache(queue, page, 1 + page, 1e6 + turn)
        assert list(queue.check()) == []
    assert queue._entries <= 2 * 8 + SLACK
    assert drain(queue) == list(range(8))


def test_the_learned_policy_goes_on_learning_of_retained_pages() -> None:
    forest = Forest()
    queue = retaining("density", forest=forest)
    forest.content[0] = forest.content[7] = "the same"
    cache(queue, 0, 1, 10.0)
    policy = queue._policy
    assert isinstance(policy, DensityQueue)
    for _ in range(2):
        assert len(policy._model) == 1
        queue.discard(0)
        assert len(policy._model) == 0, "the stay has ended"
        queue.push(0, 0.0)
    assert policy.returns(0) == 2
    queue.pass_time(10.0)
    assert policy.returns(0) == 2, "nobody asked for it"
    queue.discard(0)
    cache(queue, 0, 1, 20.0)
    queue.evict(0)
    queue.push(7, 10.0)
    assert policy.returns(7) == 4, "evicted while it was retained, and known again"
    queue.push(0, 10.0)
    forest.content[0] = "other"
    assert list(queue.check()) == []


def test_check_finds_a_continuation_that_would_stay_longer() -> None:
    forest = Forest()
    forest.parents = {1: 0}
    queue = retaining(forest=forest)
    cache(queue, 1, 5, 10.0)
    assert list(queue.check()) != [], "its parent is held, and promised nothing"
    cache(queue, 0, 5, 9.0)
    assert list(queue.check()) != []
    queue.discard(0)
    cache(queue, 0, 5, 10.0)
    assert list(queue.check()) == []
    queue.touch(1, 0.0)
    assert list(queue.check()) != [], "of equals the one cached first goes first"


# --- sequences ---


class Case:
    """One session; each page holds SIZE tokens of one letter."""

    def __init__(self, pages: int, **limits: object) -> None:
        self.world = World(pages, page_size=SIZE, **{"retained_share": 1.0, **limits})
        self.session = self.world.attached(pid=1).id
        self.pool = self.world.cache.pools["pool"]
        self._count = 0

    @staticmethod
    def tokens(text: str) -> list[int]:
        return [ord(letter) for letter in text for _ in range(SIZE)]

    def open(self, text: str, retention: Retention | None = None) -> str:
        """A sequence with all of the text resident; its pages are found or computed."""
        self._count += 1
        name, tokens = f"q{self._count}", self.tokens(text)
        prompt = [*tokens, 0]
        assert isinstance(self.ask(opening(name, prompt, len(text), retention=retention)), Grant)
        self.write(name, text)
        self.world.sound()
        return name

    def ask(self, demand: Opening) -> Grant | ServiceError:
        """What it is granted, or why not."""
        [(_, result)], _ = self.world.cache.calls.allocate(self.session, [demand], [])
        return result

    def open_at_once(self, text: str, retentions: list[Retention | None], *, write: bool = True) -> list[str]:
        """Sequences that compute the same text at the same time, each in pages of its own; the first is found."""
        names, tokens = [], self.tokens(text)
        for retention in retentions:
            self._count += 1
            names.append(f"q{self._count}")
            grant = self.ask(opening(names[-1], [*tokens, 0], len(text), retention=retention))
            assert isinstance(grant, Grant) and not grant.cached_tokens
        for name in names if write else []:
            self.write(name, text)
        return names

    def write(self, name: str, text: str) -> None:
        """Report a text resident, from its start."""
        report = in_columns([Step(name, 0, tuple(self.tokens(text)))], growing=False)
        assert self.world.cache.calls.append(self.session, report) == []

    def end(self, *names: str) -> None:
        for name in names:
            self.world.cache.calls.remove(self.session, [name])
            self.world.sound()

    def run(self, text: str, retention: Retention | None = None) -> None:
        self.end(self.open(text, retention))

    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.cache.sweep()
        self.world.sound()

    def cached(self, text: str) -> int:
        """Pages of the text that are found."""
        return len(self.pool.match(array("I", [*self.tokens(text), 0]), ""))

    @property
    def retained(self) -> int:
        return self.pool.table.cached.retained_count

    def order(self) -> str:
        """The last letters of the cached pages, in the order they go."""
        return "".join(chr(self.pool.index.tokens(page)[0]) for page in self.pool.table.cached)  # type: ignore[index]


MINUTE = Retention(60.0, 50)


@both
def test_a_retained_prefix_survives_a_full_pool_until_its_time_is_over(policy: str) -> None:
    case = Case(8, eviction=policy, default_ttl_s=600.0)
    case.run("ab", MINUTE)
    for at in range(30):
        case.run(chr(1000 + at) + "xyz")
    assert case.cached("ab") == 2 and case.retained == 2
    case.pass_time(60.0)
    assert case.cached("ab") == 2 and case.retained == 0
    for at in range(30):
        case.run(chr(2000 + at) + "xyz")
    assert case.cached("ab") == 0


@both
def test_an_allocation_never_fails_for_what_is_retained(policy: str) -> None:
    case = Case(6, eviction=policy)
    case.run("abc", MINUTE)
    case.run("def", Retention(60.0, 51))
    assert case.retained == 6
    case.open("uvwxyz")
    assert case.retained == 0 and case.cached("abc") == case.cached("def") == 0


def test_the_tail_goes_before_the_head_and_the_lower_priority_before_the_higher() -> None:
    case = Case(9)
    case.run("abc", Retention(60.0, 90))
    case.run("de", Retention(600.0, 10))
    case.run("fg")
    assert case.order() == "gfedcba"
    case.run("vwxyz")  # two were free, three go: g, f, e
    assert case.order() == "zyxwv" + "dcba"


def test_a_parent_is_promised_what_each_continuation_is() -> None:
    case = Case(9, default_ttl_s=600.0)
    case.run("ab", Retention(10.0, 90))
    case.run("ac", Retention(300.0, 10))
    case.run("ad")
    assert case.order() == "dcba" and case.retained == 3
    case.pass_time(10.0)
    assert case.order() == "dbca" and case.retained == 2
    case.pass_time(290.0)
    assert case.order() == "dbca" and case.retained == 0


def test_a_promise_for_a_page_that_others_hold_waits_for_them() -> None:
    case = Case(8, default_ttl_s=600.0)
    holder = case.open("a")
    case.run("ab", MINUTE)
    assert case.order() == "b" and case.retained == 1
    case.end(holder)
    assert case.order() == "ba" and case.retained == 2
    holder = case.open("a")
    case.pass_time(59.0)
    case.end(holder)
    assert case.retained == 2, "a use does not end it"
    holder = case.open("a")
    case.pass_time(1.0)
    case.end(holder)
    assert case.order() == "ba" and case.retained == 0


def test_a_promise_of_a_second_copy_is_kept_by_the_first() -> None:
    case = Case(8)
    first, second = case.open_at_once("ab", [None, MINUTE])
    case.end(first)
    assert case.order() == "ba" and case.retained == 0
    case.end(second)
    assert case.order() == "ba" and case.retained == 2
    first, second = case.open_at_once("cd", [None, MINUTE])
    case.end(second)
    assert case.retained == 2
    case.end(first)
    assert case.order() == "badc" and case.retained == 4


def test_a_promise_passes_to_the_copy_that_is_found_next() -> None:
    case = Case(5)
    first, second = case.open_at_once("ab", [MINUTE, None])
    case.end(first)
    assert case.order() == "ba" and case.retained == 2
    case.open("xyz")  # takes both: what was promised is kept with the other sequence's pages
    assert case.order() == "" and case.cached("ab") == 2
    case.end(second)
    assert case.order() == "ba" and case.retained == 2


def test_a_held_continuation_keeps_its_promise_and_so_its_prefix_gets_one_again() -> None:
    case = Case(8, retained_share=0.25)
    first, second = case.open_at_once("ab", [MINUTE, None], write=False)
    case.write(first, "a")
    case.write(second, "ab")  # its copy of "a" is the second, its "b" the first
    case.write(first, "ab")
    case.end(first)
    assert case.order() == "a" and case.retained == 1
    case.run("xy", Retention(5.0, 99))
    assert case.order() == "ayx" and case.retained == 2, "the limit is two"
    case.pass_time(5.0)
    assert case.order() == "ayx" and case.retained == 0
    case.end(second)
    assert case.order() == "yxba" and case.retained == 2


@both
def test_no_more_than_the_share_is_retained_and_heads_are(policy: str) -> None:
    case = Case(10, eviction=policy, retained_share=0.3)
    case.run("abcde", MINUTE)
    assert case.order() == "edcba" and case.retained == 3
    case.run("xy", Retention(60.0, 49))
    assert case.order() == "edyxcba" and case.retained == 3
    case.run("z", Retention(60.0, 51))
    assert case.order() == "edyxcbaz" and case.retained == 3


def test_the_share_is_of_the_pool() -> None:
    for pages, share, most in ((100, 0.29, 29), (7, 0.5, 3), (7, 1.0, 7), (7, 0.0, 0)):
        assert Case(pages, retained_share=share).pool.table.cached.most == most


def test_the_cache_ttl_counts_from_the_end_of_a_retention() -> None:
    case = Case(8, cache_ttl_s=30.0, default_ttl_s=600.0)
    case.run("ab", MINUTE)
    case.run("xy")
    case.pass_time(30.0)
    assert case.order() == "ba"
    case.pass_time(30.0)
    assert case.order() == "ba" and case.retained == 0
    case.pass_time(29.0)
    assert case.order() == "ba"
    case.pass_time(1.0)
    assert case.order() == ""


def test_a_step_does_not_wait_for_the_sweeper() -> None:
    case = Case(4)
    case.run("a", Retention(5.0, 100))
    case.run("b", Retention(8.0, 1))
    case.world.now += 5.0
    case.open("xyz")
    assert case.order() == "b" and case.retained == 1


def test_sequences_that_end_with_their_session_do_not_wait_for_the_sweeper_either() -> None:
    case = Case(8, default_ttl_s=600.0)
    case.run("ab", MINUTE)
    case.open("ab", Retention(5.0, 1))
    case.world.now += 60.0
    case.world.cache.close_session(case.session)
    case.world.sound()
    assert case.pool.table.cached.promised(case.pool.match(array("I", case.tokens("ab")), "")[0]) == (1, 1065.0)


def test_operators_spare_what_is_retained_unless_they_say_so() -> None:
    case = Case(8)
    case.run("ab", MINUTE)
    case.run("xy")
    assert case.world.cache.evict_pages("pool", 1) == (1, 2)
    assert case.world.cache.evict_pages("pool", None) == (1, 2)
    assert case.world.cache.evict_pages("pool", None) == (0, 2)
    assert case.world.cache.evict_pages("pool", 1, retained=True) == (1, 1)
    assert case.order() == "a"
    case.world.now += 60.0
    assert case.world.cache.evict_pages("pool", None) == (1, 0)


def test_a_lost_session_and_a_fork_keep_what_was_asked_for() -> None:
    case = Case(8)
    parent = case.open("ab", MINUTE)
    assert isinstance(case.ask(fork("child", parent)), Grant)
    child, _ = case.world.cache.calls.get_sequence(case.session, "child")
    assert child.retention == MINUTE
    case.end(parent)
    assert case.retained == 0
    case.world.processes.kill(1)
    case.world.cache.sweep()
    case.world.sound()
    assert case.order() == "ba" and case.retained == 2


def test_an_opening_sent_again_asks_for_the_same() -> None:
    case = Case(8)
    first, again = (case.ask(opening("q", [1, 2], 1, retention=MINUTE)) for _ in range(2))
    assert first == again and isinstance(first, Grant)
    for other in (None, Retention(60.0, 51), Retention(61.0, 50)):
        refused = case.ask(opening("q", [1, 2], 1, retention=other))
        assert isinstance(refused, SequenceMismatch) and "retention" in refused.message


@pytest.mark.parametrize(
    ("retention", "field"),
    [
        (Retention(0.0, 1), "prompt.retention.ttl"),
        (Retention(-1.0, 1), "prompt.retention.ttl"),
        (Retention(MAX_RETENTION_S + 1, 1), "prompt.retention.ttl"),
        (Retention(float("nan"), 1), "prompt.retention.ttl"),
        (Retention(1.0, 0), "prompt.retention.priority"),
        (Retention(1.0, 101), "prompt.retention.priority"),
    ],
)
def test_what_cannot_be_asked_for(retention: Retention, field: str) -> None:
    case = Case(8)
    refused = case.ask(opening("q", [1], 1, retention=retention))
    assert isinstance(refused, FieldInvalid) and refused.field == field and field in refused.message
    assert not case.pool.sequences
    case.world.sound()
    Retention(MAX_RETENTION_S, 100).check()
    Retention(0.001, 1).check()


def test_the_share_is_a_flag() -> None:
    assert Config.read([], {}).limits.retained_share == 0.5
    assert Config.read(["--retained-share", "0"], {}).limits.retained_share == 0.0
    assert Config.read([], {"ROCMFORGE_KVCACHE_RETAINED_SHARE": "1"}).limits.retained_share == 1.0
    for text in ("1.1", "-0.1", "half", "nan"):
        with pytest.raises(InvalidConfiguration, match=f"--retained-share {text}: expected a number from 0 to 1"):
            Config.read([f"--retained-share={text}"], {})
