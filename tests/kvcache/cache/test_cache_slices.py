"""Long calls go in slices: each leaves a sound state, and all of them together what the call would have at once."""

from __future__ import annotations

import dataclasses
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from services.common.errors import CapacityExceeded, SequenceRemoved, SessionExpired
from services.kvcache import slices
from services.kvcache.cache.calls import Calls
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.lru import LruQueue
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.index.events import EventRing
from services.kvcache.pool.index.prefix_cache import PrefixCache
from services.kvcache.pool.pages.page_table import PageTable
from services.kvcache.slices import Result, Work
from tests.kvcache.cache.stateful.machine import CacheMachine, Direct, Unanswered, examples, new_world
from tests.kvcache.cache.stateful.transactions import Answer, Operation
from tests.kvcache.fakes import World


class Sliced(Direct):
    """Every call pauses at every page; the state is sound wherever it does, and whatever is owed is paid in the end."""

    def __init__(self, world: World, entries: int = 1) -> None:
        super().__init__(world)
        self.stack = ExitStack()
        self.stack.enter_context(mock.patch.object(slices, "ENTRIES", entries))
        self.stack.enter_context(mock.patch("services.kvcache.cache.cache.finish", self.finish))
        # A call begins with at most one slice of the pages whose retention is over. The model expects all of them.
        used = Calls.use

        def use(calls: Calls, session_id: str, caller: str) -> Session:
            session = used(calls, session_id, caller)
            cached = world.cache.pools.get(session.pool_id).table.cached
            while not cached.pass_time(world.now, entries):
                self.sound()
            return session

        self.stack.enter_context(mock.patch.object(Calls, "use", use))

    def finish(self, work: Work[Result], clock: Callable[[], float]) -> Result:
        try:
            job = next(work)
            while True:
                self.sound()
                if job is not None:
                    job()
                job = work.send(clock())
        except StopIteration as end:
            result: Result = end.value
            return result

    def sound(self) -> None:
        self.world.sound()
        for pool in self.world.cache.pools:
            table = pool.table
            counts = (table.free_count, table.held_count, table.cached_count, table.quarantined_count)
            assert sum(counts) == table.total, counts

    def run(self, operations: Sequence[Operation], *, give_up: bool = False) -> list[Answer | Unanswered]:
        answers: list[Answer | Unanswered] = []
        for operation in operations:
            answers += super().run([operation], give_up=give_up)
            while debts := self.world.cache.debts:
                debts.pay(self.world.now)
                self.sound()
        return answers

    def close(self) -> None:
        self.stack.close()


class SlicedMachine(CacheMachine):
    """What is answered and what is left is what it is of whole transactions."""

    make_driver = staticmethod(lambda: Sliced(new_world()))


SlicedMachine.TestCase.settings = examples(6)
TestSlicedMachine = SlicedMachine.TestCase


# --- how much a slice does ------------------------------------------------------------------------------------------

ENTRIES = 32
LONG = 1500


class Meter:
    """Counts what is done to pages between two pauses. No processor is assumed: an entry is some microseconds."""

    def __init__(self) -> None:
        self.stack, self.most, self.total, self._now = ExitStack(), 0, 0, 0
        ones = [(PageTable, name) for name in ("take", "hold", "drop", "free", "cache", "quarantine")]
        more = [(PrefixCache, "publish"), (PrefixCache, "withdraw"), (LruQueue, "enter"), (EventRing, "add")]
        for owner, name in [*ones, *more]:
            self._count(owner, name, lambda *args: 1)
        for name in ("hold_all", "give_back", "generations", "cached_among"):
            self._count(PageTable, name, lambda table, pages, *rest: len(pages))

    def _count(self, owner: type, name: str, units: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            self._now += units(*args, **options)
            return real(*args, **options)

        self.stack.enter_context(mock.patch.object(owner, name, counted))

    def pause(self) -> None:
        self.most, self.total, self._now = max(self.most, self._now), self.total + self._now, 0

    def run(self, work: Work[Result]) -> Result:
        """All of a work; the most and the total that its slices did."""
        self.most = self.total = self._now = 0
        try:
            next(work)
            while True:
                self.pause()
                work.send(1000.0)
        except StopIteration as end:
            self.pause()
            result: Result = end.value
            return result


@pytest.fixture
def meter() -> Iterator[Meter]:
    with mock.patch.object(slices, "ENTRIES", ENTRIES):
        one = Meter()
        with one.stack:
            yield one


def full() -> tuple[World, Any]:
    """A long sequence, published, and room for another."""
    world = World(4 * LONG, page_size=1, budget_bytes=1 << 30)
    session = world.attached()
    world.cache.calls.allocate(session.id, [Opening("long", Prompt(prompt()), LONG + 8)], [])
    world.cache.calls.append(session.id, Steps(["long"], [0], [LONG], prompt()[:LONG], [], []))
    return world, session


def prompt() -> array[int]:
    return array("I", range(LONG + 1))


Long = tuple[str, Callable[[World, Any], Work[Any]], int]

CALLS: list[Long] = [
    ("open", lambda w, s: w.cache.calls.allocating(s.id, [Opening("b", Prompt(array("I", [9])), LONG)], []), LONG),
    ("hit", lambda w, s: w.cache.calls.allocating(s.id, [Opening("b", Prompt(prompt()), LONG + 1)], []), LONG),
    (
        "many",
        lambda w, s: w.cache.calls.allocating(
            s.id, [Opening(f"b{n}", Prompt(array("I", [n])), 5) for n in range(200)], []
        ),
        1000,
    ),
    (
        "forks",
        lambda w, s: w.cache.calls.allocating(s.id, [Opening(f"b{n}", "long", 0) for n in range(4)], []),
        4 * LONG,
    ),
    ("remove", lambda w, s: w.cache.calls.removing(s.id, ["long"]), LONG),
    (
        "grow",
        lambda w, s: w.cache.calls.allocating(
            s.id, [Steps(["long"], [LONG], [0], array("I"), [2 * LONG], [LONG + 8])], []
        ),
        LONG - 8,
    ),
    ("report", lambda w, s: w.cache.calls.appending(s.id, _report(w, s)), LONG),
    ("expire", lambda w, s: w.cache.expiring(0.0), 8),
    ("evict", lambda w, s: _evict(w, s), LONG),
    ("verify", lambda w, s: _verify(w, s), 0),
    ("close", lambda w, s: _owed(w, lambda: w.cache.close_session(s.id)), LONG),
    ("lose", lambda w, s: _owed(w, lambda: _late(w)), LONG),
    ("sweep", lambda w, s: _cached_for_long(w, s), LONG),
    ("retention", lambda w, s: _retained(w, s), LONG // 2),
    ("drop", lambda w, s: _dropped(w, s), LONG),
]


def _report(world: World, session: Any) -> Steps:
    world.cache.calls.allocate(session.id, [Opening("b", Prompt(array("I", [7])), LONG)], [])
    return Steps(["b"], [0], [LONG], array("I", range(7, LONG + 7)), [], [])


def _evict(world: World, session: Any) -> Work[Any]:
    world.cache.calls.remove(session.id, ["long"])
    return world.cache.evicting("pool", None)


def _verify(world: World, session: Any) -> Work[Any]:
    world.cache.limits = dataclasses.replace(world.cache.limits, verify_share=1.0)
    return world.cache.hits_to_verify(session.id, [Opening("b", Prompt(prompt()), 0)])


def _owed(world: World, end: Callable[[], object]) -> Work[Any]:
    end()
    assert len(world.cache.debts) == 1
    return world.cache.debts.paying()


def _late(world: World) -> None:
    world.now += 100
    assert len(world.cache.sweep()) == 1


def _cached_for_long(world: World, session: Any) -> Work[Any]:
    world.cache.limits = dataclasses.replace(world.cache.limits, cache_ttl_s=5.0)
    world.cache.calls.remove(session.id, ["long"])
    world.now += 6
    world.cache.renew_session(session.id)
    return world.cache.sweeping()


def _retained(world: World, session: Any) -> Work[Any]:
    kept = Opening("kept", Prompt(prompt(), "", Retention(5.0, 1)), 0)
    world.cache.calls.allocate(session.id, [kept], [])
    world.cache.calls.remove(session.id, ["long", "kept"])
    [pool] = world.cache.pools
    assert pool.table.cached.retained_count > LONG // 2
    world.now += 6
    return world.cache.sweeping()


def _dropped(world: World, session: Any) -> Work[Any]:
    world.cache.close_session(session.id)
    while world.cache.debts:
        world.cache.debts.pay(world.now)
    return world.cache.dropping("pool")


@pytest.mark.parametrize(("call", "least"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_no_slice_does_much(meter: Meter, call: Callable[[World, Any], Work[Any]], least: int) -> None:
    """Of a call that does as much as it may, each slice does a fixed amount."""
    world, session = full()
    work = call(world, session)
    meter.run(work)
    # What is answered is looked up several slices at a time, at a tenth of the cost.
    assert meter.most <= 10 * ENTRIES, meter.most
    assert meter.total >= least
    while world.cache.debts:
        world.cache.debts.pay(world.now)
    world.sound()


# --- others, between two slices -------------------------------------------------------------------------------------


def waited(world: World) -> int:
    """Pay all debts, checking the state after each slice; return how many there were."""
    count = 0
    while world.cache.debts:
        world.cache.debts.pay(world.now)
        world.sound()
        count += 1
    return count


@pytest.fixture
def tiny() -> Iterator[None]:
    with mock.patch.object(slices, "ENTRIES", 4):
        yield


def opened(world: World, session: Any, name: str, pages: int) -> Any:
    [(_, answer)], _ = world.cache.calls.allocate(
        session.id, [Opening(name, Prompt(array("I", [ord(name[0])])), pages)], []
    )
    return answer


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("ending", ["close", "remove", "lose with proof"])
def test_what_is_owed_is_granted_and_nothing_is_refused_for_it(ending: str) -> None:
    """A session that held everything has ended a moment ago: its pages count as free."""
    world = World(40)
    one, other = world.attached(pid=2), world.attached()
    assert isinstance(opened(world, one, "a", 40), Grant)
    if ending == "close":
        assert world.cache.close_session(one.id) == 1
    elif ending == "remove":
        next(world.cache.calls.removing(one.id, ["a"]))
    else:
        world.processes.kill(2)
        assert world.cache.sweep() == [one]
    assert world.cache.debts and next(iter(world.cache.pools)).table.held_count == 40
    world.sound()
    assert isinstance(opened(world, other, "b", 40), Grant)
    world.sound()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("end", ["close", "lose", "remove"])
def test_expired_sequences_end_in_slices(end: str) -> None:
    """However many there are, those without a page of their own too."""
    world = World(90, max_sequences=1000)
    session = world.attached(pid=2)
    for at in range(60):
        opened(world, session, f"{at}", at % 2)
    assert world.cache.expire_sequences(0.0) == 60
    world.sound()
    [pool] = world.cache.pools
    assert pool.table.quarantined_count == 30
    if end == "close":
        world.cache.close_session(session.id)
    elif end == "lose":
        world.processes.kill(2)
        world.cache.sweep()
    else:
        next(world.cache.calls.removing(session.id, [f"{at}" for at in range(60)]))
    assert waited(world) >= 60 // 4
    world.cache.sweep()
    waited(world)
    assert (pool.table.free_count, len(pool.endings.expired), len(pool.endings.ending)) == (90, 0, 0)
    world.sound()


@pytest.mark.usefixtures("tiny")
def test_an_ended_session_is_refused_at_once() -> None:
    world = World(40)
    session = world.attached()
    opened(world, session, "a", 40)
    world.cache.close_session(session.id)
    assert world.cache.debts
    with pytest.raises(SessionExpired):
        world.cache.renew_session(session.id)
    assert world.cache.close_session(session.id) is None
    assert waited(world) > 5


@pytest.mark.usefixtures("tiny")
def test_an_engine_that_vouches_while_its_pages_go_into_quarantine_frees_them_all() -> None:
    world = World(40)
    session = world.attached(pid=2)
    opened(world, session, "a", 40)
    world.now += 100
    world.cache.sweep()
    [pool] = world.cache.pools
    for _ in range(4):
        world.cache.debts.pay(world.now)
        world.sound()
    assert 0 < pool.table.quarantined_count < 40
    assert world.cache.close_session(session.id) == 0
    waited(world)
    assert pool.table.free_count == 40


@pytest.mark.usefixtures("tiny")
def test_no_page_of_a_lost_session_is_granted_while_it_goes_into_quarantine() -> None:
    world = World(40)
    session, other = world.attached(pid=2), world.attached(ttl_s=300.0)
    opened(world, session, "a", 40)
    world.now += 100
    world.cache.sweep()
    assert isinstance(opened(world, other, "b", 1), CapacityExceeded)
    waited(world)
    [pool] = world.cache.pools
    assert pool.table.quarantined_count == 40


@pytest.mark.usefixtures("tiny")
def test_what_a_call_was_promised_no_other_is_granted() -> None:
    world = World(40)
    one, other = world.attached(), world.attached()
    work = world.cache.calls.allocating(one.id, [Opening("a", Prompt(array("I", [1])), 30)], [])
    next(work)
    assert isinstance(opened(world, other, "b", 11), CapacityExceeded)
    assert isinstance(opened(world, other, "c", 10), Grant)
    world.sound()
    [(_, grant)], _ = slices.finish(work, lambda: world.now)
    assert isinstance(grant, Grant) and len(grant.pages) == 30
    world.sound()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("origin", ["prompt", "fork", "hit"])
@pytest.mark.parametrize("end", ["given up", "closed", "lost"])
@pytest.mark.parametrize("behind", range(6))
def test_a_call_that_ends_between_two_slices_leaves_nothing(origin: str, end: str, behind: int) -> None:
    world = World(80)
    session = world.attached(pid=2)
    tokens = array("I", range(101))
    opened(world, session, "long", 30)
    world.cache.calls.append(session.id, Steps(["long"], [0], [100], tokens[:100], [], []))
    if origin == "hit":
        world.cache.calls.allocate(session.id, [Opening("same", Prompt(tokens), 25)], [])
        world.cache.calls.append(session.id, Steps(["same"], [0], [100], tokens[:100], [], []))
        waited(world)
    asked = "long" if origin == "fork" else Prompt(tokens if origin == "hit" else array("I", [9]))
    before = set(session.sequences)
    work = world.cache.calls.allocating(session.id, [Opening("b", asked, 27)], [])
    next(work)
    for _ in range(behind):
        work.send(world.now)
        world.sound()
    [pool] = world.cache.pools
    if end == "given up":
        work.close()
        assert set(session.sequences) == before
        waited(world)
        [(_, again)], _ = world.cache.calls.allocate(session.id, [Opening("b", asked, 27)], [])
        assert isinstance(again, Grant) and len(again.pages) == 27
    else:
        if end == "closed":
            world.cache.close_session(session.id)
        else:
            world.processes.kill(2)
            assert world.cache.sweep() == [session]
        with pytest.raises(SessionExpired):
            work.send(world.now)
        waited(world)
        world.cache.sweep()
        waited(world)
        assert (pool.table.held_count, pool.table.quarantined_count, len(pool.sequences)) == (0, 0, 0)
    assert (pool.headroom.promised_pages, pool.headroom.promised_bytes) == (0, 0)
    world.sound()


@pytest.mark.usefixtures("tiny")
def test_a_sequence_that_expires_between_two_slices_is_told_so() -> None:
    world = World(80)
    session = world.attached()
    work = world.cache.calls.allocating(session.id, [Opening("a", Prompt(array("I", [1])), 60)], [])
    next(work)
    work.send(world.now)
    assert world.cache.expire_sequences(0.0) == 1
    [(_, answer)], _ = slices.finish(work, lambda: world.now)
    assert isinstance(answer, SequenceRemoved)
    world.sound()
    world.cache.calls.remove(session.id, ["a"])
    waited(world)
    [pool] = world.cache.pools
    assert pool.table.free_count == 80


@pytest.mark.usefixtures("tiny")
def test_a_lease_does_not_run_out_in_the_middle_of_a_call() -> None:
    world = World(80)
    session = world.attached()
    work = world.cache.calls.allocating(session.id, [Opening("a", Prompt(array("I", [1])), 60)], [])
    next(work)
    world.now += 1000
    assert world.cache.sweep() == []
    [(_, grant)], _ = slices.finish(work, lambda: world.now)
    assert isinstance(grant, Grant)
    world.now += 1000
    assert world.cache.sweep() == [session]


def test_what_a_dropped_pool_was_made_of_is_freed_in_slices() -> None:
    """All of it at once would hold the loop as long as a large slice."""
    world = World(40)
    world.cache.close_session(world.attached().id)
    pool = next(iter(world.cache.pools))
    columns = [weakref.ref(column) for column in (pool.table._generations, pool.index._keys, pool.index._parents)]
    del pool
    world.cache.drop_pool("pool")
    left = [sum(column() is not None for column in columns)]
    while world.cache.debts:
        world.cache.debts.pay(world.now)
        left.append(sum(column() is not None for column in columns))
    assert sorted(set(left)) == [0, 1, 2, 3], "one after the other"
