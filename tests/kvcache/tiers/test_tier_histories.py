"""Random histories of a pool with tiers below it, over a mover that answers late, in any order, wrongly or never.

However it goes: a published page, a slot that is found and a value of the outer tier have exactly the bytes that their
chain names; the mover writes to no page that anybody else has; nothing leaks; no allocation waits for a tier.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random
from typing import Any

import pytest

from services.common.errors import CapacityExceeded
from services.kvcache.cache.grant import Grant
from tests.kvcache.tiers.fake_mover import GARBAGE
from tests.kvcache.tiers.tier_world import SIZE, TierWorld, is_filling

PAGES = 20
TEXTS = [[0] * 14, [0] * 4 + [1] * 10, [0, 0, 1, 1] * 4]

#: Histories, and how much happens in each. TIER_HISTORIES=10000 takes minutes.
HISTORIES, LENGTH = int(os.environ.get("TIER_HISTORIES", "160")), 60


class TierHistory:
    def __init__(self, random: Random) -> None:
        outer = random.random() < 0.7
        self.world = TierWorld(
            PAGES,
            slots=random.choice([0, 1, 3, 3]),
            outer=outer,
            admits_all=random.random() < 0.7,
            zero_pages=random.random() < 0.3,
        )
        self.sessions = [self.world.attached(), self.world.attached()]
        self.refused: dict[str, tuple[int, int, int, str, float]] = {}
        self.world.mover.answer_memories()
        self.world.mover.set_outer(up=outer)

    # --- engines ---

    def open(self, who: int, text: int, length: int, wait: bool) -> None:
        name = f"q{next(self.world.names)}"
        self._open(who % 2, name, text, length, "", 1.0 if wait else None)

    def _open(self, who: int, name: str, text: int, length: int, salt: str, wait_s: float | None) -> None:
        world = self.world
        answer = world.open(self.sessions[who], TEXTS[text][:length], salt, wait_s, name)
        if is_filling(answer):
            assert wait_s is not None, "who does not wait is not refused"
            first = self.refused[name][-1] if name in self.refused else world.now
            assert world.now < first + wait_s, "it is refused for longer than it waits"
            self.refused[name] = (who, text, length, salt, first)
            return
        self.refused.pop(name, None)
        if isinstance(answer, CapacityExceeded):
            table, needed = world.pool.table, int(answer.metadata["needed_pages"])
            assert not world.pool.fills, "what fills hold is given up first"
            assert needed > table.free_count + table.cached_count - len(TEXTS[text]) // SIZE

    def serve(self, who: int, text: int, length: int, salt: str) -> None:
        """A request from its beginning to its end."""
        self.make_way()
        name = f"q{next(self.world.names)}"
        self._open(who % 2, name, text, length, salt, None)
        if name in self.world.known:
            self.world.compute(name, length)
            self.world.end(name)

    def come_back(self, who: int, text: int, length: int, moves: int) -> None:
        """What was stored, and is evicted, is wanted again."""
        self.make_way()
        self.store()
        self.evict(PAGES)
        name = f"q{next(self.world.names)}"
        self._open(who % 2, name, text, length, "", 1.0)
        if name in self.refused:  # what was looked up is there
            self.world.mover.finish(0)
            self._open(who % 2, name, text, length, "", 1.0)
        for _ in range(moves):
            self.world.mover.copy_half(who)

    def make_way(self) -> None:
        while self.world.known and self.world.pool.headroom.pages < 8:
            self.world.end(next(iter(self.world.known)))

    def store(self) -> None:
        """Time enough for all that waits to be stored."""
        mover = self.world.mover
        if not mover.alive or not mover.outer_up:
            mover.kill()
            mover.reap()
            mover.answer_memories()
            mover.set_outer(up=self.world.settings.outer)
        mover.full = False
        self.world.settle()

    def ask_again(self, which: int) -> None:
        if self.refused:
            name = list(self.refused)[which % len(self.refused)]
            who, text, length, salt, _ = self.refused[name]
            self._open(who, name, text, length, salt, 1.0)

    def compute(self, which: int, count: int) -> None:
        if self.world.known:
            self.world.compute(list(self.world.known)[which % len(self.world.known)], count)

    def end(self, which: int) -> None:
        if self.world.known:
            self.world.end(list(self.world.known)[which % len(self.world.known)])

    def evict(self, most: int) -> None:
        self.world.cache.evict_pages(self.world.pool.id, most, retained=True)

    def lose_engine(self, which: int) -> None:
        """An engine is gone, and its successor attaches."""
        world, session = self.world, self.sessions[which % 2]
        world.cache.close_session(session.id)
        self.refused = {name: one for name, one in self.refused.items() if one[0] != which % 2}
        for name in [name for name, one in world.known.items() if one[0] is session]:
            del world.known[name]
        self.sessions[which % 2] = world.attached()

    def damage(self, which: int) -> None:
        """A checksum finds that a page has changed: it is withdrawn, with all that is behind it."""
        world = self.world
        published = list(world.pool.index.published())
        if published:
            page = published[which % len(published)]
            world.scrub(world.pool)
            world.arena[page] = (GARBAGE, world.arena[page][1])
            self.run_loop()  # it may be read before anybody knows
            for at in range(which):
                world.mover.finish(at)
            world.pool.arena.damage[page] = 1  # type: ignore[attr-defined]
            world.verify(world.pool, [page])
            del world.pool.arena.damage[page]  # type: ignore[attr-defined]

    # --- the daemon's loop ---

    def run_loop(self) -> None:
        self.world.run_loop()

    def pay_debts(self) -> None:
        while debts := self.world.cache.debts:
            debts.pay(self.world.now)

    def zero(self) -> None:
        world = self.world
        while pages := world.pool.table.zeroing(8):
            for page, _ in pages:
                assert not world.mover_writes(page), f"page {page} is zeroed while the mover writes it"
            world.pool.table.zeroed(pages)

    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        for session in self.sessions:
            self.world.cache.renew_session(session.id)
        self.world.tiers.tick()

    def make_slabs(self) -> None:
        self.world.make_slabs()

    # --- the mover ---

    def copy_half(self, which: int) -> None:
        self.world.mover.copy_half(which)

    def finish(self, which: int, fail: bool) -> None:
        self.world.mover.finish(which, fail=fail)

    def finish_many(self, most: int) -> None:
        world = self.world
        world.make_slabs()
        for _ in range(most):
            world.run_loop()
            world.mover.answer_memories()
            world.mover.finish(0)

    def answer_memories(self) -> None:
        self.world.mover.answer_memories()

    def health(self, up: bool) -> None:
        self.world.mover.set_outer(up=up and self.world.settings.outer)

    def kill(self) -> None:
        self.world.mover.kill()

    def reap(self) -> None:
        self.world.mover.reap()
        self.world.mover.set_outer(up=self.world.settings.outer)

    def fill_queue(self, full: bool) -> None:
        self.world.mover.full = full

    def corrupt_value(self, which: int) -> None:
        values = list(self.world.mover.outer)
        if values:
            self.world.mover.corrupt.add(values[which % len(values)])

    def corrupt_slot(self, which: int) -> None:
        """Memory of the host tier changes under everybody: no page gets it."""
        host = self.world.tiers.host
        slots = [] if host is None else host.stored()
        if slots:
            slot = slots[which % len(slots)]
            memory = self.world.mover.memories[slot.slab.memory]
            memory[slot.number] = (memory[slot.number][0], GARBAGE)
            self.world.corrupted.add(slot)

    # --- the end ---

    def come_home(self) -> None:
        """Everything comes home."""
        world = self.world
        world.mover.reap()
        world.mover.full = False
        world.mover.answer_memories()
        for name in list(world.known):
            world.end(name)
        world.lower.give_way()
        while debts := world.cache.debts:
            debts.pay(world.now)
        while pages := world.pool.table.zeroing(8):
            world.pool.table.zeroed(pages)
        world.settle()
        world.lawful()
        table = world.pool.table
        assert (table.held_count, table.filling_count) == (0, 0)
        assert len(world.tiers.jobs) == 0 and world.lower.moving == 0
        if world.tiers.host is not None:
            for slab in world.tiers.host.slabs:
                found = sum(slot.slab is slab for slot in world.tiers.host.stored())
                assert slab.pinned == 0 and len(slab.free) + found == slab.slots


#: What may happen, how often, and with what.
HAPPENINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("open", 5, {"who": 8, "text": 3, "length": (1, 14), "wait": 0.5}),
    ("serve", 6, {"who": 8, "text": 3, "length": (5, 14), "salt": ["", "", "s"]}),
    ("come_back", 6, {"who": 8, "text": 3, "length": (5, 14), "moves": 7}),
    ("store", 1, {}),
    ("ask_again", 4, {"which": 8}),
    ("compute", 4, {"which": 8, "count": (1, 8)}),
    ("end", 4, {"which": 8}),
    ("evict", 3, {"most": (1, PAGES)}),
    ("lose_engine", 1, {"which": 8}),
    ("damage", 1, {"which": 8}),
    ("run_loop", 4, {}),
    ("pay_debts", 3, {}),
    ("zero", 2, {}),
    ("pass_time", 1, {"seconds": [0.05, 0.5, 2.0]}),
    ("make_slabs", 2, {}),
    ("copy_half", 8, {"which": 8}),
    ("finish", 8, {"which": 8, "fail": 0.2}),
    ("finish_many", 2, {"most": (1, 20)}),
    ("answer_memories", 3, {}),
    ("health", 1, {"up": 0.7}),
    ("kill", 1, {}),
    ("reap", 2, {}),
    ("fill_queue", 1, {"full": 0.3}),
    ("corrupt_value", 1, {"which": 8}),
    ("corrupt_slot", 3, {"which": 8}),
]


def _drawn(random: Random, kind: Any) -> Any:
    if isinstance(kind, float):
        return random.random() < kind
    if isinstance(kind, tuple):
        return random.randint(*kind)
    return random.choice(kind) if isinstance(kind, list) else random.randrange(kind)


def run(seed: int) -> TierHistory:
    """One history; what it did is in the error of one that fails."""
    random = Random(seed)
    history, done = TierHistory(random), list[str]()
    try:
        for _ in range(LENGTH):
            [(name, _, kinds)] = random.choices(HAPPENINGS, [often for _, often, _ in HAPPENINGS])
            drawn = {key: _drawn(random, kind) for key, kind in kinds.items()}
            done.append(f"{name}({drawn})")
            getattr(history, name)(**drawn)
            history.world.lawful()
        history.come_home()
    except Exception as error:
        raise AssertionError(f"history {seed}: " + "\n".join([*done, repr(error)])) from error
    return history


@pytest.mark.parametrize("part", range(2))
def test_histories(part: int) -> None:
    moved: Counter[str] = Counter()
    for seed in range(part, HISTORIES, 2):
        world = run(seed).world
        counts = world.tiers.counts
        for tier, of in counts.tiers.items():
            moved[f"stored {tier}"] += of.stored_pages
            moved[f"fetched {tier}"] += of.fetched_pages
            moved[f"failed {tier}"] += of.failed_pages
        moved["lost"] += counts.lost_pages
        moved["filled"] += world.pool.totals.filled_pages
    # The histories go where it matters.
    assert all(moved[name] for name in moved), moved


def test_grants_are_grants() -> None:
    """The world itself: a prompt that was computed, ended and evicted comes back from below."""
    world = TierWorld(PAGES, admits_all=True)
    session = world.attached()
    world.mover.answer_memories()
    world.mover.set_outer(up=True)
    assert isinstance(world.open(session, TEXTS[2][:11], name="a"), Grant)
    world.compute("a", 11)
    world.end("a")
    world.settle()
    assert world.tiers.host is not None and len(world.tiers.host) == 3 and len(world.mover.outer) == 5
    world.cache.evict_pages(world.pool.id, None)
    assert is_filling(world.open(session, TEXTS[2][:11], wait_s=1.0, name="b"))
    world.settle()
    assert is_filling(world.open(session, TEXTS[2][:11], wait_s=1.0, name="b"))
    world.settle()
    answer = world.open(session, TEXTS[2][:11], wait_s=1.0, name="b")
    assert isinstance(answer, Grant) and answer.cached_tokens == 10
