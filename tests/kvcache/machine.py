"""Random histories of a cache, each transaction held against the model.

One set of rules drives whatever has a `Driver`: the state object itself, or a server with several clients. What is
asked is built from what the engines know; what is answered is explained by the model, transaction by transaction in
the order in which the cache ran them. So calls may be in flight together, be cancelled, arrive late or twice: the model
does not care who asked, only that every transaction and every reply is right.

Nothing that is drawn depends on the state, since the state depends on which call won a race: what finds nothing that it
could be done to opens something instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.kvcache.demand import Demand
from tests.kvcache.fakes import World
from tests.kvcache.model import CACHE_TTL_S, DRAIN_S, PAGES, SIZE, TTL_S, Key, Model, ModelSequence
from tests.kvcache.transactions import (
    Allocate,
    Answer,
    Append,
    Close,
    Entry,
    Evict,
    Expire,
    Fork,
    Get,
    Grant,
    Granted,
    Kill,
    Open,
    Operation,
    PassTime,
    Remove,
    Renew,
    Sweep,
    can_be_seen,
    perform,
)

MAX_SESSIONS = 4

#: Prompts are prefixes of these, so that sequences meet, part, and compute the same prefix at the same time.
TEXTS = [[0] * 40, [0] * 4 + [1] * 36, [0, 0, 1, 1] * 10]


def examples(few: int) -> settings:
    """So many random histories, or as many as MACHINE_EXAMPLES says.

    For thousands, pytest has to be told to wait: ``--timeout 0 -o faulthandler_timeout=0``.
    """
    count = int(os.environ.get("MACHINE_EXAMPLES", few))
    return settings(max_examples=count, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


class Unanswered:
    """What a caller has of a call it gave up."""


UNANSWERED = Unanswered()


class Driver(Protocol):
    """Puts operations to the cache of a world; ``entries`` are the transactions that ran, in order."""

    world: World
    entries: list[Entry]

    def run(self, operations: Sequence[Operation], *, give_up: bool = False) -> list[Answer | Unanswered]:
        """All of them at the same time, as far as the driver can; whoever gives up may still have been served."""

    def violations(self) -> list[str]:
        """Of the whole state."""

    def stats(self) -> dict[str, int]:
        """As the model names them."""

    def cached(self) -> list[int]:
        """Cached pages, oldest first."""

    def close(self) -> None:
        """Free what it has."""


class Direct:
    """The state object itself, one operation after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries: list[Entry] = []

    def run(self, operations: Sequence[Operation], *, give_up: bool = False) -> list[Answer | Unanswered]:
        ran = [perform(self.world, operation) for operation in operations]
        self.entries += ran
        return [UNANSWERED if give_up else entry.answer for entry in ran]

    def violations(self) -> list[str]:
        return list(self.world.cache.check())

    def stats(self) -> dict[str, int]:
        cache = self.world.cache
        [pool] = cache.pools
        table, totals = pool.table, pool.totals
        return {
            "total_pages": table.total,
            "free_pages": table.free_count,
            "held_pages": table.held_count,
            "cached_pages": table.cached_count,
            "quarantined_pages": table.quarantined_count,
            "never_used_pages": table.never_used_count,
            "recycled_pages": table.recycled_count,
            "sessions": cache.session_count(pool),
            "active_sequences": len(pool.sequences),
            "total_tokens": sum(len(sequence.tokens) for sequence in pool.sequences),
            "lookup_tokens": totals.lookup_tokens,
            "hit_tokens": totals.hit_tokens,
            "granted_pages": totals.granted_pages,
            "published_pages": totals.published_pages,
            "evicted_pages": totals.evicted_pages,
            "expired_pages": totals.expired_pages,
            "refused_demands": totals.refused_demands,
            "expired_sessions": cache.expired_sessions,
            "expired_sequences": cache.expired_sequences,
        }

    def cached(self) -> list[int]:
        [pool] = self.world.cache.pools
        return list(pool.table.cached)

    def close(self) -> None:
        """Nothing to free."""


def new_world() -> World:
    return World(PAGES, page_size=SIZE, drain_s=DRAIN_S, cache_ttl_s=CACHE_TTL_S, default_ttl_s=TTL_S)


# --- what an engine or an operator may want to do --------------------------------------------------------------------


class Intent(Protocol):
    """Drawn before it is known what there is; becomes an operation when its turn comes."""

    def operation(self, machine: CacheMachine) -> Operation | None:
        """Built from what the engines know; None when there is nothing to do it to."""


@dataclass(frozen=True)
class OpenSequence:
    at: int
    salt: str
    text: int
    length: int
    pages: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        session = machine.session(self.at)
        return None if session is None else Allocate(session, (self.demand(machine, session),))

    def demand(self, machine: CacheMachine, session: str) -> Demand:
        key, text = machine.new_key(session), TEXTS[self.text]
        machine.model.texts[key] = text
        return Demand(key[1], text[: self.length], self.salt, 0, [], self.pages, 0)


@dataclass(frozen=True)
class Part:
    """What one sequence does in a step."""

    which: int
    count: int  # tokens that it ran
    more: int  # pages
    overlap: int  # tokens told again
    in_columns: bool

    def demand(self, sequence: ModelSequence, model: Model) -> Demand:
        held, resident = len(sequence.pages), len(sequence.tokens)
        # No engine writes into a tail that it knows to be shared.
        room = 0 if model.shares_tail(sequence) else held * SIZE - resident
        start = max(0, resident - self.overlap)
        tokens = sequence.tokens[start:] + sequence.ahead(min(self.count, room))
        return Demand(sequence.key[1], None, "", start, tokens, held + self.more, held)


@dataclass(frozen=True)
class Step:
    """Of several sequences of one session in one call, which may remove and open others."""

    at: int
    parts: list[Part]
    remove: int
    opening: OpenSequence | None = None

    def operation(self, machine: CacheMachine) -> Operation | None:
        first = machine.sequence(self.at)
        if first is None:
            return None
        session, mine = first.key[0], machine.model.of_session(first.key[0])
        removed = tuple(sequence.key[1] for sequence in mine[self.remove : self.remove + 1])
        demands, steps = dict[str, Demand](), dict[str, Demand]()
        for part in self.parts:
            sequence = mine[part.which % len(mine)]
            if sequence.key[1] not in demands | steps:
                to = steps if part.in_columns else demands
                to[sequence.key[1]] = part.demand(sequence, machine.model)
        opened = () if self.opening is None else (self.opening.demand(machine, session),)
        return Allocate(session, (*demands.values(), *opened), removed, tuple(steps.values()))


@dataclass(frozen=True)
class Report:
    at: int
    count: int
    in_columns: bool

    def operation(self, machine: CacheMachine) -> Operation | None:
        sequence = machine.sequence(self.at)
        if sequence is None:
            return None
        room = len(sequence.pages) * SIZE - len(sequence.tokens)
        tokens = tuple(sequence.ahead(min(self.count, room)))
        return report(sequence.key, len(sequence.tokens), tokens, self.in_columns)


@dataclass(frozen=True)
class Misreport:
    """Tokens that leave a gap, overrun the pages or contradict the record."""

    at: int
    flip: int
    in_columns: bool

    def operation(self, machine: CacheMachine) -> Operation | None:
        sequence = machine.sequence(self.at)
        if sequence is None:
            return None
        start, tokens = self.flip - 1, (1,)
        if self.flip == 0:
            start = len(sequence.tokens) + 1
        elif self.flip > len(sequence.tokens):
            start, tokens = 0, (9,) * (len(sequence.pages) * SIZE + 1)
        else:
            tokens = (sequence.tokens[start] ^ 1,)
        return report(sequence.key, start, tokens, self.in_columns)


def report(key: Key, start: int, tokens: tuple[int, ...], in_columns: bool) -> Append:
    """One sequence's, either way."""
    told = ((key[1], start, tokens),)
    return Append(key[0], steps=told) if in_columns else Append(key[0], told)


@dataclass(frozen=True)
class ForkSequence:
    """Of one with a partly filled page, if there is one: that page will have to be copied."""

    at: int
    turn: bool

    def operation(self, machine: CacheMachine) -> Operation | None:
        parent = machine.sequence(self.at, lambda sequence: len(sequence.tokens) % SIZE > 0) or machine.sequence(
            self.at
        )
        if parent is None:
            return None
        child = machine.new_key(parent.key[0])
        machine.model.turns[child] = self.turn
        return Fork(*parent.key, child[1])


@dataclass(frozen=True)
class RemoveSequence:
    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        sequence = machine.sequence(self.at)
        return None if sequence is None else Remove(sequence.key[0], (sequence.key[1],))


@dataclass(frozen=True)
class LookAt:
    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        sequence = machine.sequence(self.at)
        return None if sequence is None else Get(*sequence.key)


@dataclass(frozen=True)
class UseRemoved:
    """A call that was on its way when its sequence was removed, or an id that never was."""

    at: int
    how: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        gone = [key for key in machine.model.removed if machine.lives(key[0])]
        session = machine.session(self.at)
        if session is None:
            return None
        session, name = gone[self.at % len(gone)] if gone and self.how < 5 else (session, "never")
        return [
            Allocate(session, (Demand(name, [1, 2, 3], "", 0, [], 1, 0),)),
            Allocate(session, steps=(Demand(name, None, "", 0, [1], 1, 0),)),
            report((session, name), 0, (1,), self.at % 2 == 0),
            Fork(session, name, "never-too"),
            Get(session, name),
            Allocate(session, (Demand(name, None, "", 0, [], 1, 0),)),
            report((session, name), 0, (), self.at % 2 == 0),
            Get(session, name),
        ][self.how]


@dataclass(frozen=True)
class RenewLease:
    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        session = machine.session(self.at)
        return None if session is None else Renew(session)


@dataclass(frozen=True)
class CloseSession:
    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        session = machine.session(self.at)
        return None if session is None else Close(session)


@dataclass(frozen=True)
class KillProcess:
    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        seen = [pid for lease in machine.model.sessions.values() if (pid := lease.pid) is not None and can_be_seen(pid)]
        return Kill(seen[self.at % len(seen)]) if seen else None


@dataclass(frozen=True)
class Do:
    """Of an operator, or of time itself."""

    what: Operation

    def operation(self, machine: CacheMachine) -> Operation | None:
        return self.what


which = st.integers(0, 11)
opens = st.builds(
    OpenSequence, which, st.sampled_from(["", "s"]), st.integers(0, 2), st.integers(1, 13), st.integers(0, 5)
)
parts = st.builds(Part, which, st.integers(0, 9), st.integers(0, 2), st.integers(0, 3), st.booleans())
steps = st.builds(Step, which, st.lists(parts, min_size=1, max_size=4), st.integers(0, 20), st.none() | opens)
reports = st.builds(Report, which, st.integers(1, 5), st.booleans())
misreports = st.builds(Misreport, which, st.integers(0, 8), st.booleans())
forks = st.builds(ForkSequence, which, st.booleans())
removals = st.builds(RemoveSequence, which)
looks = st.builds(LookAt, which)
late_uses = st.builds(UseRemoved, which, st.integers(0, 7))
renewals = st.builds(RenewLease, which)
endings = st.one_of(
    st.builds(CloseSession, which),
    st.builds(KillProcess, which),
    st.builds(Do, st.builds(Evict, st.integers(0, 3))),
    st.builds(Do, st.builds(Expire, st.sampled_from([0.0, 1.0, 2.0, 10.0, 100.0]))),
)
#: They add up to the ttl of a lease, to a drain and to the ttl of a cached page exactly.
times = st.builds(Do, st.builds(PassTime, st.sampled_from([1.0, 1.0, 10.0, 10.0, 20.0, 60.0])))
sweeps = st.builds(Do, st.just(Sweep()))

anything = st.one_of(
    *(opens, steps, steps, steps, reports, misreports, forks, removals, looks, late_uses, renewals),
    *(endings, times, sweeps),
)


class CacheMachine(RuleBasedStateMachine):
    """Subclasses say what drives it."""

    make_driver: ClassVar[Callable[[], Driver]]

    def __init__(self) -> None:
        super().__init__()
        self.driver = type(self).make_driver()
        self.model = Model()
        self.explained = 0
        self.given_up: list[Operation] = []
        self.asked: list[Operation] = []
        self.names = 0
        self.pids = 0

    def teardown(self) -> None:
        self.driver.close()

    # --- what there is ---

    def lives(self, session: str) -> bool:
        lease = self.model.sessions.get(session)
        return lease is not None and lease.deadline > self.driver.world.now

    def session(self, at: int) -> str | None:
        live = [session for session in self.model.sessions if self.lives(session)]
        return live[at % len(live)] if live else None

    def sequence(self, at: int, like: Callable[[ModelSequence], bool] = lambda sequence: True) -> ModelSequence | None:
        live = [one for key, one in self.model.sequences.items() if self.lives(key[0]) and like(one)]
        return live[at % len(live)] if live else None

    def made_of(self, intent: Intent) -> Operation:
        """Its operation, or one that makes something to do it to."""
        operation = intent.operation(self)
        if operation is not None:
            return operation
        opening = OpenSequence(self.names, "", self.names % len(TEXTS), 5, 3).operation(self)
        return opening if opening is not None else self.opening_of_a_session(None)

    def opening_of_a_session(self, max_pages: int | None) -> Open:
        self.pids += 1
        return Open(self.pids, max_pages)

    def new_key(self, session: str) -> Key:
        self.names += 1
        return session, f"q{self.names}"

    # --- asking ---

    def ask(self, *operations: Operation, give_up: bool = False) -> list[Answer | Unanswered]:
        """Have them run; every transaction is explained and every reply is one transaction's answer."""
        self.asked.extend(operations)
        replies = self.driver.run(operations, give_up=give_up)
        ran = self.catch_up()
        for operation, reply in zip(operations, replies, strict=True):
            if reply is UNANSWERED:
                self.given_up.append(operation)
                continue
            found = [entry for entry in ran if entry.operation == operation and entry.answer == reply]
            assert found, f"{operation} was answered {reply}, and the cache did {ran}"
            ran.remove(found[0])
        for entry in ran:
            assert entry.operation in self.given_up, f"nobody asked for {entry}"
            self.given_up.remove(entry.operation)
        return replies

    def catch_up(self) -> list[Entry]:
        """Explain what ran since."""
        ran = self.driver.entries[self.explained :]
        self.explained += len(ran)
        for entry in ran:
            self.model.explain(entry)
        return ran

    def ask_twice(self, intent: Intent) -> None:
        """Every request is sent again, as after a lost reply: what it was granted it is granted again."""
        operation = self.made_of(intent)
        [first] = self.ask(operation)
        before = self.explained
        if isinstance(operation, Open | PassTime):
            return
        [again] = self.ask(operation)
        alone = self.explained == before + 1
        if alone and isinstance(first, Granted):
            assert isinstance(again, Granted)
            pairs = zip(first.items, again.items, strict=True)
            assert all(one == other for one, other in pairs if isinstance(one, Grant))
            told = [one for one in first.told if isinstance(one[1], Grant)]
            assert [one for one in again.told if one in told] == told
        elif alone and isinstance(operation, Append | Fork | Renew):
            assert again == first

    # --- rules ---

    @initialize(sessions=st.integers(1, MAX_SESSIONS))
    def begin(self, sessions: int) -> None:
        for _ in range(sessions):
            self.open_session(None)

    @rule(max_pages=st.none() | st.integers(3, PAGES))
    def open_session(self, max_pages: int | None) -> None:
        if len(self.model.sessions) < MAX_SESSIONS:
            self.ask(self.opening_of_a_session(max_pages))

    @rule(intent=opens)
    def open_sequence(self, intent: Intent) -> None:
        self.ask_twice(intent)

    @rule(intents=st.lists(steps, min_size=1, max_size=4))
    def step(self, intents: list[Intent]) -> None:
        for intent in intents:
            self.ask_twice(intent)

    @rule(intents=st.lists(steps | reports | forks, min_size=1, max_size=4))
    def step_and_fork(self, intents: list[Intent]) -> None:
        for intent in intents:
            self.ask_twice(intent)

    @rule(intent=misreports | late_uses | looks | renewals)
    def look(self, intent: Intent) -> None:
        self.ask_twice(intent)

    @rule(intent=removals)
    def remove(self, intent: Intent) -> None:
        self.ask_twice(intent)

    @rule(intent=endings)
    def end_something(self, intent: Intent) -> None:
        self.ask_twice(intent)

    @rule(intent=times)
    def pass_time(self, intent: Do) -> None:
        """A session is not revived after its deadline, before the sweep or after it."""
        self.ask(intent.what)
        late = [Renew(session) for session in self.model.sessions if not self.lives(session)]
        if late:
            self.ask(*late)
        self.ask(Sweep())

    @rule(intents=st.lists(anything, min_size=2, max_size=6))
    def together(self, intents: list[Intent]) -> None:
        """Calls in flight at the same time, several of them of one sequence perhaps."""
        operations = [self.made_of(intent) for intent in intents]
        for operation in operations:
            if isinstance(operation, Open):
                self.ask(operation)
                return
        self.ask(*operations)

    @rule(intent=anything)
    def give_up(self, intent: Intent) -> None:
        """A call is cancelled at once: it has run, runs later, or never does."""
        operation = self.made_of(intent)
        if not isinstance(operation, Open | PassTime | Sweep | Kill):
            self.ask(operation, give_up=True)

    @rule(at=st.integers(0, 30))
    def ask_again(self, at: int) -> None:
        """A call whose reply was lost is sent again, when much has happened since."""
        if at < len(self.asked):
            operation = self.asked[-1 - at]
            if not isinstance(operation, Open | PassTime):
                self.ask(operation)

    # --- always ---

    @invariant()
    def all_agrees(self) -> None:
        if not self.model.sessions and not self.model.sequences and not self.explained:
            return  # no pool yet
        while True:
            # A call that was given up may run just now: then look again.
            ran = self.catch_up()
            for entry in ran:
                assert entry.operation in self.given_up, f"nobody asked for {entry}"
                self.given_up.remove(entry.operation)
            violations, stats, cached = self.driver.violations(), self.driver.stats(), self.driver.cached()
            if len(self.driver.entries) == self.explained:
                break
        assert violations == []
        assert stats == self.model.stats()
        assert cached == self.model.cached
        pages = ("free_pages", "held_pages", "cached_pages", "quarantined_pages")
        assert sum(stats[name] for name in pages) == stats["total_pages"] == PAGES
