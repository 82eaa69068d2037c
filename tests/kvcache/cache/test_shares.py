"""What one identity may hold of a shared pool while another waits, against a slow model of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.errors import ServiceError, TooManySessions
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.shares import WAITS_S
from services.kvcache.cache.steps import Steps
from services.kvcache.lease.sessions import Session
from tests.kvcache.fakes import World

PAGES, SHARE = 12, 0.5
OWNERS = ("uid:1", "uid:2", "cn:three")
NAMES = "abcd"


def joined(world: World, owner: str, **options: object) -> Session:
    """A session of an identity on the pool that all share, of a process that the daemon cannot see."""
    session = world.cache.open_session("test", "pool", world.layout, caller=owner, **options)
    arena = world.cache.pool_of(session).arena
    arena.answers[session.canary_slot] = bytes(b ^ 0xFF for b in session.canary)  # type: ignore[attr-defined]
    return world.cache.attach_session(session.id, session.canary, owner)


def ask(world: World, session: Session, name: str, pages: int) -> str:
    """Open or grow a sequence; the reason why not, or nothing. No page is ever complete, so none is ever cached."""
    known = len(session.sequences[name].pages) if name in session.sequences else None
    if known is None:
        demand: Opening | Steps = Opening(name, Prompt(array("I", [1])), pages)
    else:
        demand = Steps([name], [0], [0], array("I"), [pages], [known])
    told, _ = world.cache.calls.allocate(session.id, [demand], [], session.owner)
    return next((one.reason for _, one in told if isinstance(one, ServiceError)), "")


@dataclass
class Held:
    """What the model knows of an identity: its sequences' pages, and those that it left without a word."""

    live: dict[str, int] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)  # by session
    waits_until: float = 0.0

    @property
    def pages(self) -> int:
        return sum(self.live.values()) + sum(self.expired.values()) + sum(self.lost.values())


class SharesMachine(RuleBasedStateMachine):
    """Every answer is the one that the rule gives, by sums over all there is."""

    @initialize()
    def begin(self) -> None:
        self.world = World(PAGES, identity_share=SHARE)
        self.sessions = {owner: joined(self.world, owner, ttl_s=600.0) for owner in OWNERS}
        self.held = {owner: Held() for owner in OWNERS}
        self.number = 0

    def expected(self, owner: str, more: int) -> str:
        now, allowed = self.world.now, PAGES * SHARE
        waits = any(one.waits_until > now and one.pages < allowed for other, one in self.held.items() if other != owner)
        if waits and self.held[owner].pages + more > allowed:
            return "QUOTA_EXCEEDED"
        return "NO_PAGES" if more > PAGES - sum(one.pages for one in self.held.values()) else ""

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES), more=st.integers(1, 7))
    def ask(self, owner: str, name: str, more: int) -> None:
        held, session = self.held[owner], self.sessions[owner]
        if name in held.expired:
            return
        has = held.live.get(name, 0)
        if has + more > PAGES:
            return
        expected = self.expected(owner, more)
        assert ask(self.world, session, f"{name}{self.number}" if not has else self.names[owner, name], has + more) == (
            expected
        )
        if not expected:
            held.live[name] = has + more
            if not has:
                self.names[owner, name] = f"{name}{self.number}"
        elif expected == "NO_PAGES":
            held.waits_until = self.world.now + WAITS_S
        self.number += 1

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def remove(self, owner: str, name: str) -> None:
        held = self.held[owner]
        if name in held.live or name in held.expired:
            self.world.cache.calls.remove(self.sessions[owner].id, [self.names[owner, name]], owner)
            held.live.pop(name, None)
            held.expired.pop(name, None)

    @rule()
    def expire(self) -> None:
        self.world.cache.expire_sequences(0.0)
        for held in self.held.values():
            held.expired |= held.live
            held.live = {}

    @rule(owner=st.sampled_from(OWNERS))
    def lose(self, owner: str) -> None:
        """Its lease runs out; those of the others do not."""
        session, held, cache = self.sessions[owner], self.held[owner], self.world.cache
        session.deadline = self.world.now
        assert cache.sweep() == [session]
        held.lost[session.id] = sum(held.live.values()) + sum(held.expired.values())
        held.live, held.expired = {}, {}
        self.sessions[owner] = joined(self.world, owner, ttl_s=600.0)

    @rule(owner=st.sampled_from(OWNERS))
    def vouch(self, owner: str) -> None:
        held = self.held[owner]
        if held.lost:
            session = next(iter(held.lost))
            self.world.cache.close_session(session, owner)
            del held.lost[session]

    @rule(seconds=st.sampled_from([0.5, WAITS_S / 2, WAITS_S]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        for owner, session in self.sessions.items():
            self.world.cache.renew_session(session.id, owner)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "world"):
            self.world.sound()

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[tuple[str, str], str] = {}


TestShares = SharesMachine.TestCase
TestShares.settings = settings(max_examples=60, stateful_step_count=40)


def test_what_a_full_pool_gives_back_goes_to_who_waits() -> None:
    """Alone, an identity has it all; it is not stopped in what it has, and it has it all again when nobody waits."""
    world = World(PAGES, identity_share=SHARE)
    mine, yours = joined(world, "uid:1"), joined(world, "uid:2")
    for name in "abc":
        assert ask(world, mine, name, 4) == ""
    assert ask(world, yours, "x", 4) == "NO_PAGES"
    world.cache.calls.remove(mine.id, ["a"], mine.owner)
    assert ask(world, mine, "d", 4) == "QUOTA_EXCEEDED"
    assert ask(world, yours, "x", 4) == ""
    world.cache.calls.remove(mine.id, ["b"], mine.owner)
    assert ask(world, mine, "e", 2) == "", "up to its share"
    assert ask(world, mine, "f", 1) == "QUOTA_EXCEEDED"
    world.now += WAITS_S
    assert ask(world, mine, "f", 2) == ""


def test_without_a_share_who_comes_first_has_it_all() -> None:
    world = World(PAGES)
    mine, yours = joined(world, "uid:1"), joined(world, "uid:2")
    assert ask(world, mine, "a", 8) == ""
    assert ask(world, yours, "x", 6) == "NO_PAGES"
    assert ask(world, mine, "b", 4) == ""


def test_lost_sessions_count_as_sessions_of_their_identity() -> None:
    """It could have all that there may be otherwise, one after the other, and nobody else would get any."""
    world = World(PAGES, identity_sessions=3)
    for _ in range(3):
        session = joined(world, "uid:1")
        ask(world, session, "a", 1)
        world.now += session.ttl_s
        assert world.cache.sweep() == [session]
    with pytest.raises(TooManySessions, match="uid:1 has 0 sessions and 3 lost ones in quarantine"):
        joined(world, "uid:1")
    joined(world, "uid:2")
    world.cache.close_session(session.id, "uid:1")
    joined(world, "uid:1")


def test_expired_sequences_count_until_their_engine_has_removed_them() -> None:
    world = World(PAGES, max_sequences=3)
    session = joined(world, "uid:1")
    for name in "abc":
        assert ask(world, session, name, 1) == ""
    assert world.cache.expire_sequences(0.0) == 3
    assert ask(world, session, "d", 1) == "TOO_MANY_SEQUENCES"
    world.cache.calls.remove(session.id, ["b"], session.owner)
    assert ask(world, session, "d", 1) == ""
    assert ask(world, session, "e", 1) == "TOO_MANY_SEQUENCES"
