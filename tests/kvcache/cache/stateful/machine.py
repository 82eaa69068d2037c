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
from typing import Any, ClassVar, Protocol

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.kvcache.cache.opening import Opening
from services.kvcache.cache.walk import check
from tests.kvcache.cache.stateful.intents import (
    TEXTS,
    Do,
    Intent,
    OpenSequence,
    anything,
    damages,
    endings,
    forks,
    late_uses,
    looks,
    misreports,
    opens,
    removals,
    renewals,
    reports,
    steps,
    times,
)
from tests.kvcache.cache.stateful.model import (
    CACHE_TTL_S,
    DRAIN_S,
    MOST_RETAINED,
    PAGES,
    SIZE,
    TTL_S,
    Key,
    Model,
    ModelSequence,
)
from tests.kvcache.cache.stateful.transactions import (
    Allocate,
    Answer,
    Append,
    Damage,
    Entry,
    Grant,
    Granted,
    Kill,
    Open,
    Operation,
    PassTime,
    Renew,
    Sweep,
    perform,
)
from tests.kvcache.fakes import World

MAX_SESSIONS = 4


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
        """All of them at the same time, as far as the driver can; a caller that gives up may still have been served."""

    def violations(self) -> list[str]:
        """Of the whole state."""

    def stats(self) -> dict[str, int]:
        """As the model names them."""

    def cached(self) -> list[int]:
        """Cached pages, as they are to go."""

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
        return list(check(self.world.cache))

    def stats(self) -> dict[str, int]:
        cache = self.world.cache
        [pool] = cache.pools
        table, totals = pool.table, pool.totals
        return {
            "total_pages": table.total,
            "free_pages": table.free_count,
            "held_pages": table.held_count,
            "cached_pages": table.cached_count,
            "retained_pages": table.cached.retained_count,
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
            "verified_pages": pool.checksums.verified_pages if pool.checksums else -1,
            "corrupted_pages": pool.checksums.corrupted_pages if pool.checksums else -1,
            "withdrawn_pages": totals.withdrawn_pages,
            "expired_sessions": cache.expired_sessions,
            "expired_sequences": cache.expired_sequences,
        }

    def cached(self) -> list[int]:
        [pool] = self.world.cache.pools
        return list(pool.table.cached)

    def close(self) -> None:
        """Nothing to free."""


def new_world(**options: Any) -> World:
    return World(
        PAGES,
        page_size=SIZE,
        drain_s=DRAIN_S,
        cache_ttl_s=CACHE_TTL_S,
        default_ttl_s=TTL_S,
        retained_share=MOST_RETAINED / PAGES,
        verify_share=0.0,
        **options,
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
            assert isinstance(again, Granted) and isinstance(operation, Allocate)
            # What asked for room in front of a fork of it finds its tail shared the second time.
            forked = [demand.origin for demand in operation.demands if isinstance(demand, Opening)]
            told = [one for one in first.told if isinstance(one[1], Grant) and one[0] not in forked]
            assert [one for one in again.told if one in told] == told
        elif alone and isinstance(operation, Append | Renew):
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

    @rule(intent=damages)
    def damage(self, intent: Intent) -> None:
        """What is read of a page is what its tokens say, or it is not read."""
        operation = intent.operation(self)
        if operation is not None:
            self.ask(operation)

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
        if not isinstance(operation, Open | PassTime | Sweep | Kill | Damage):
            self.ask(operation, give_up=True)

    @rule(at=st.integers(0, 30))
    def ask_again(self, at: int) -> None:
        """A call whose reply was lost is sent again, when much has happened since."""
        if at < len(self.asked):
            operation = self.asked[-1 - at]
            if not isinstance(operation, Open | PassTime | Damage):
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
        assert stats == self.model.stats(), sorted(set(stats.items()) ^ set(self.model.stats().items()))
        assert cached == self.model.evictable()
        pages = ("free_pages", "held_pages", "cached_pages", "quarantined_pages")
        assert sum(stats[name] for name in pages) == stats["total_pages"] == PAGES
