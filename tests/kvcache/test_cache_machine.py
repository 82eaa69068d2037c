"""Random histories of the whole state object against a slow, obvious model.

The model knows, for every page, what the engine wrote in it (the whole prefix up to each slot), who holds it and how
recently it was cached. It predicts which pages an opening shares, which page an allocation takes and which one it
evicts. A page handed to two writers, a hit on other tokens, a lost page or a wrong eviction shows at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.errors import (
    CapacityExceeded,
    ExceedsPool,
    PositionMismatch,
    SequenceRemoved,
    SequenceUnknown,
    ServiceError,
    SessionExpired,
)
from services.kvcache.cache import Demand, Grant
from services.kvcache.sequence import Sequence
from tests.kvcache.fakes import World

PAGES = 7
SIZE = 2
DRAIN_S = 30.0
TTL_S = 20.0

#: Prompts are prefixes of these, so that sequences meet, part, and compute the same prefix at the same time.
TEXTS = [[0] * 40, [0] * 4 + [1] * 36, [0, 0, 1, 1] * 10]

CACHE_TTL_S = 100.0

Link = tuple[str, tuple[int, ...]]  # salt, and every token from the start to the end of the page


@dataclass
class ModelPage:
    holders: set[tuple[str, str]] = field(default_factory=set)
    link: Link | None = None
    cached_at: float = 0.0
    quarantine: tuple[int, float] | None = None  # pid, until
    left_by: str = ""  # the session that lived on when the page went into quarantine
    content: dict[int, Link] = field(default_factory=dict)


@dataclass
class ModelSequence:
    key: tuple[str, str]
    salt: str
    text: list[int]
    tokens: list[int]
    pages: list[int]
    last_access: float = 0.0
    copy: int | None = None  # the page its tail was copied from, held until a token behind is reported

    def ahead(self, count: int) -> list[int]:
        """The next tokens it will run."""
        return self.text[len(self.tokens) : len(self.tokens) + count]


class Model:
    """Lists and scans; nothing clever."""

    def __init__(self) -> None:
        self.pages = {page: ModelPage() for page in range(PAGES)}
        self.links: dict[Link, list[int]] = {}  # first is the one that lookups find
        self.cached: list[int] = []  # oldest first
        self.sequences: dict[tuple[str, str], ModelSequence] = {}
        self.removed: set[tuple[str, str]] = set()

    def free(self) -> set[int]:
        return {p for p, m in self.pages.items() if not m.holders and p not in self.cached and m.quarantine is None}

    def match(self, salt: str, prompt: list[int]) -> list[int]:
        found: list[int] = []
        for end in range(SIZE, len(prompt), SIZE):
            pages = self.links.get((salt, tuple(prompt[:end])))
            if not pages:
                break
            found.append(pages[0])
        return found

    def unlink(self, page: int) -> None:
        link = self.pages[page].link
        if link is not None:
            self.links[link].remove(page)
            if not self.links[link]:
                del self.links[link]
            self.pages[page].link = None

    def take(self, page: int, key: tuple[str, str]) -> None:
        """The implementation granted this new page: was it its to give?"""
        free = self.free()
        if free:
            assert page in free, f"page {page} granted while {free} were free"
        else:
            assert page == self.cached[0], f"evicted {page}, oldest is {self.cached[0]}"
            self.cached.pop(0)
            self.unlink(page)
        self.pages[page] = ModelPage(holders={key})

    def touch(self, sequence: ModelSequence, now: float) -> None:
        """``sequences`` is in order of the last access."""
        sequence.last_access = now
        self.sequences[sequence.key] = self.sequences.pop(sequence.key, sequence)

    def of_session(self, session: str) -> list[ModelSequence]:
        """In the order they were opened."""
        mine = [sequence for key, sequence in self.sequences.items() if key[0] == session]
        return sorted(mine, key=lambda sequence: int(sequence.key[1][1:]))

    def session_ended(self, session: str, until: float) -> None:
        """What it left in quarantine while it lived waits no longer than until then."""
        for model in self.pages.values():
            if model.quarantine is not None and model.left_by == session:
                model.quarantine, model.left_by = (model.quarantine[0], until), ""

    def shares_tail(self, sequence: ModelSequence) -> bool:
        at = len(sequence.tokens)
        return at % SIZE > 0 and len(self.pages[sequence.pages[at // SIZE]].holders) > 1

    def let_go_of_copy(self, sequence: ModelSequence) -> None:
        if sequence.copy is not None:
            self.pages[sequence.copy].holders.remove(sequence.key)
            sequence.copy = None

    def write(self, sequence: ModelSequence, tokens: list[int]) -> None:
        """The engine ran these tokens, then told the daemon."""
        if tokens:
            self.let_go_of_copy(sequence)
        for token in tokens:
            at = len(sequence.tokens)
            sequence.tokens.append(token)
            page = sequence.pages[at // SIZE]
            assert self.pages[page].holders == {sequence.key}, "an engine wrote into a page that others share"
            self.pages[page].content[at % SIZE] = (sequence.salt, tuple(sequence.tokens))
            if (at + 1) % SIZE == 0:
                link = (sequence.salt, tuple(sequence.tokens))
                self.pages[page].link = link
                self.links.setdefault(link, []).append(page)

    def release(self, sequence: ModelSequence, now: float, lost: tuple[int, float] | None) -> None:
        del self.sequences[sequence.key]
        source = sequence.copy
        self.let_go_of_copy(sequence)
        if source is not None and not self.pages[source].holders:
            self.pages[source].quarantine = lost
        for at in reversed(range(len(sequence.pages))):
            page = sequence.pages[at]
            model = self.pages[page]
            model.holders.remove(sequence.key)
            complete = (at + 1) * SIZE <= len(sequence.tokens)
            if complete and model.link is not None and self.links[model.link][0] != page:
                primary = self.links[model.link][0]
                if primary in self.cached:
                    self.cached.remove(primary)
                    self.cached.append(primary)
                    self.pages[primary].cached_at = now
                if not model.holders:
                    self.unlink(page)
            elif complete and not model.holders:
                self.cached.append(page)
                model.cached_at = now
            elif not complete and not model.holders and lost is not None:
                model.quarantine = lost

    def check_content(self, sequence: ModelSequence) -> None:
        """What the sequence would read is what its own prefix is."""
        for at in range(len(sequence.tokens)):
            want = (sequence.salt, tuple(sequence.tokens[: at + 1]))
            assert self.pages[sequence.pages[at // SIZE]].content[at % SIZE] == want


def has_session(machine: CacheMachine) -> bool:
    return any(machine.live(session) for session in machine.deadlines)


def has_sequence(machine: CacheMachine) -> bool:
    return any(machine.live(session) for session, _ in machine.model.sequences)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(PAGES, page_size=SIZE, drain_s=DRAIN_S, cache_ttl_s=CACHE_TTL_S, default_ttl_s=TTL_S)
        self.model = Model()
        self.pids: dict[str, int] = {}
        self.deadlines: dict[str, float] = {}
        self.next_id = 0

    # --- helpers ---

    def live(self, session: str) -> bool:
        return self.deadlines.get(session, 0.0) > self.world.now

    def a_session(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from([session for session in self.deadlines if self.live(session)])))

    def a_sequence(self, data: st.DataObject) -> ModelSequence:
        live = [sequence for key, sequence in self.model.sequences.items() if self.live(key[0])]
        return live[data.draw(st.integers(0, len(live) - 1))]

    def renewed(self, session: str) -> None:
        self.deadlines[session] = self.world.now + TTL_S

    def ask(self, session: str, demand: Demand, removed: list[str]) -> Grant | ServiceError:
        """Every request is sent twice, as after a lost reply: the answers must be the same."""
        results, _ = self.world.cache.allocate(session, [demand], removed)
        again, _ = self.world.cache.allocate(session, [demand], removed)
        assert type(again[0]) is type(results[0])
        assert again[0] == results[0] or isinstance(again[0], ServiceError)
        self.renewed(session)
        return results[0]

    # --- rules ---

    @precondition(lambda self: len(self.deadlines) < 3)
    @rule(seen=st.booleans())
    def open_session(self, seen: bool) -> None:
        pid = len(self.pids) + 1
        session = self.world.attached(pid=pid).id
        if not seen:
            del self.world.processes.seen[pid]
        self.pids[session] = pid
        self.renewed(session)

    @precondition(has_session)
    @rule(
        data=st.data(),
        salt=st.sampled_from(["", "s"]),
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 13),
        extra=st.integers(0, 6),
    )
    def open(self, data: st.DataObject, salt: str, text: list[int], length: int, extra: int) -> None:
        session = self.a_session(data)
        prompt = text[:length]
        self.next_id += 1
        key = (session, f"q{self.next_id}")
        matched = self.model.match(salt, prompt)
        demand = Demand(key[1], prompt, salt, 0, [], extra, 0)
        available = len(self.model.free()) + len([p for p in self.model.cached if p not in matched])
        result = self.ask(session, demand, [])
        if max(extra, len(matched)) - len(matched) > available:
            assert isinstance(result, CapacityExceeded)
            return
        assert isinstance(result, Grant), result
        granted = [page for page, _ in result.pages]
        assert granted[: len(matched)] == matched
        assert result.cached_tokens == len(matched) * SIZE
        sequence = ModelSequence(key, salt, text, prompt[: result.cached_tokens], granted)
        for page in matched:
            if page in self.model.cached:
                self.model.cached.remove(page)
            self.model.pages[page].holders.add(key)
        for page in granted[len(matched) :]:
            self.model.take(page, key)
        self.model.touch(sequence, self.world.now)
        self.model.check_content(sequence)

    @precondition(has_sequence)
    @rule(data=st.data(), count=st.integers(0, 9), more=st.integers(0, 2), overlap=st.integers(0, 3))
    def step(self, data: st.DataObject, count: int, more: int, overlap: int) -> None:
        sequence = self.a_sequence(data)
        session, name = key = sequence.key
        unshares = self.model.shares_tail(sequence)
        room = 0 if unshares else len(sequence.pages) * SIZE - len(sequence.tokens)
        tokens = sequence.ahead(min(count, room))
        start = max(0, len(sequence.tokens) - overlap)
        known, total = len(sequence.pages), len(sequence.pages) + more
        available = len(self.model.free()) + len(self.model.cached)
        demand = Demand(name, None, "", start, sequence.tokens[start:] + tokens, total, known)
        result = self.ask(session, demand, [])
        if total > PAGES:
            assert isinstance(result, ExceedsPool)
        elif more + unshares > available:
            assert isinstance(result, CapacityExceeded)
        else:
            assert isinstance(result, Grant), result
            self.model.touch(sequence, self.world.now)
            self.copy_tail(sequence, result, unshares)
            self.model.write(sequence, tokens)
            for page, _ in result.pages:
                self.model.take(page, key)
                sequence.pages.append(page)
            self.model.check_content(sequence)

    def copy_tail(self, sequence: ModelSequence, grant: Grant, unshares: bool) -> None:
        """Do what the grant says: copy the shared tail's content into the fresh page."""
        if unshares:
            [copy] = grant.copies
            source, target = copy.source[0], copy.target[0]
            assert sequence.pages[copy.index] == source and copy.index == len(sequence.tokens) // SIZE
            self.model.take(target, sequence.key)
            self.model.pages[target].content = dict(self.model.pages[source].content)
            sequence.pages[copy.index], sequence.copy = target, source
        for copy in grant.copies:  # told again until the first token behind it is reported
            assert (copy.source[0], copy.target[0]) == (sequence.copy, sequence.pages[copy.index])
        assert bool(grant.copies) == (sequence.copy is not None) or not unshares

    @precondition(has_sequence)
    @rule(data=st.data(), turn=st.booleans())
    def fork(self, data: st.DataObject, turn: bool) -> None:
        parent = self.a_sequence(data)
        session, name = parent.key
        self.next_id += 1
        child = (session, f"q{self.next_id}")
        for _ in range(2):
            grant, _ = self.world.cache.fork(session, name, child[1])
        self.renewed(session)
        pages = parent.pages[: -(-len(parent.tokens) // SIZE)]
        if parent.copy is not None:
            pages[len(parent.tokens) // SIZE] = parent.copy
        assert [page for page, _ in grant.pages] == pages
        rest = parent.text[len(parent.tokens) :]
        text = parent.tokens + [token ^ turn for token in rest]
        for page in pages:
            self.model.pages[page].holders.add(child)
        self.model.touch(parent, self.world.now)
        self.model.touch(ModelSequence(child, parent.salt, text, list(parent.tokens), pages), self.world.now)
        self.model.check_content(self.model.sequences[child])

    @precondition(has_sequence)
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence = self.a_sequence(data)
        key = sequence.key
        tokens = sequence.ahead(min(count, len(sequence.pages) * SIZE - len(sequence.tokens)))
        start = len(sequence.tokens)
        if tokens and self.model.shares_tail(sequence):
            [refused] = self.world.cache.append(key[0], [(key[1], start, tokens)])
            assert isinstance(refused, PositionMismatch)
            tokens = []
        for _ in range(2):
            [result] = self.world.cache.append(key[0], [(key[1], start, tokens)])
            assert isinstance(result, Sequence)
            assert len(result.tokens) == start + len(tokens)
        self.renewed(sequence.key[0])
        self.model.touch(sequence, self.world.now)
        self.model.write(sequence, tokens)

    @precondition(has_sequence)
    @rule(data=st.data(), flip=st.integers(0, 8))
    def append_other_tokens(self, data: st.DataObject, flip: int) -> None:
        """Tokens that contradict the record, leave a gap or overrun the pages change nothing."""
        sequence = self.a_sequence(data)
        key = sequence.key
        bad = [(len(sequence.tokens) + 1, [1]), (0, [9] * (len(sequence.pages) * SIZE + 1))]
        if flip < len(sequence.tokens):
            bad.append((flip, [1 - sequence.tokens[flip]]))
        for start, tokens in bad:
            [result] = self.world.cache.append(key[0], [(key[1], start, tokens)])
            assert isinstance(result, ServiceError)
        self.renewed(sequence.key[0])

    @precondition(has_sequence)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = self.a_sequence(data)
        session, name = sequence.key
        assert self.world.cache.remove(session, [name])[0] == [True]
        assert self.world.cache.remove(session, [name])[0] == [False]
        self.renewed(session)
        self.model.release(sequence, self.world.now, None)
        for late in (Demand(name, [1, 2, 3], "", 0, [], 1, 0), Demand(name, None, "", 0, [1], 1, 0)):
            assert isinstance(self.ask(session, late, []), SequenceRemoved)

    @precondition(has_session)
    @rule(data=st.data())
    def unknown_sequence(self, data: st.DataObject) -> None:
        assert isinstance(self.ask(self.a_session(data), Demand("never", None, "", 0, [], 1, 0), []), SequenceUnknown)

    @precondition(has_session)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        session = self.a_session(data)
        mine = self.model.of_session(session)
        assert self.world.cache.close_session(session) == len(mine)
        for sequence in mine:
            self.model.release(sequence, self.world.now, None)
        self.model.session_ended(session, self.world.now)
        del self.deadlines[session]
        assert self.world.cache.close_session(session) is None

    @precondition(has_session)
    @rule(data=st.data())
    def kill_process(self, data: st.DataObject) -> None:
        pid = self.pids[self.a_session(data)]
        if pid in self.world.processes.seen:
            self.world.processes.kill(pid)

    @precondition(has_sequence)
    @rule(age=st.sampled_from([0.0, 2.0, 100.0]))
    def expire_sequences(self, age: float) -> None:
        now = self.world.now
        old = [sequence for sequence in self.model.sequences.values() if sequence.last_access <= now - age]
        assert self.world.cache.expire_sequences(age) == len(old)
        for sequence in old:
            before = {page for page, model in self.model.pages.items() if model.quarantine is not None}
            self.model.release(sequence, now, (self.pids[sequence.key[0]], math.inf))
            for page, model in self.model.pages.items():
                if model.quarantine is not None and page not in before:
                    model.left_by = sequence.key[0]

    @rule(most=st.integers(0, 3))
    def evict(self, most: int) -> None:
        if self.pids:  # the pool is there
            count = min(most, len(self.model.cached))
            assert self.world.cache.evict_pages("pool", most) == count
            for page in self.model.cached[:count]:
                self.model.unlink(page)
            del self.model.cached[:count]

    @rule(seconds=st.sampled_from([1.0, 1.0, 8.0, 8.0, 25.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        now = self.world.now
        for session in list(self.deadlines):
            if not self.live(session):
                try:
                    self.world.cache.renew_session(session)
                    raise AssertionError("a session was revived after its deadline")
                except SessionExpired:
                    pass
        lost = {session.id for session in self.world.cache.sweep()}
        expected = {
            session
            for session, deadline in self.deadlines.items()
            if deadline <= now or self.world.processes.seen.get(self.pids[session]) is False
        }
        assert lost == expected
        for session in [s for s in self.deadlines if s in lost]:
            for sequence in self.model.of_session(session):
                self.model.release(sequence, now, (self.pids[session], now + DRAIN_S))
            self.model.session_ended(session, now + DRAIN_S)
            del self.deadlines[session]
        for model in self.model.pages.values():
            if model.quarantine is not None:
                pid, until = model.quarantine
                if until <= now or self.world.processes.seen.get(pid) is False:
                    model.quarantine = None
        while self.model.cached and self.model.pages[self.model.cached[0]].cached_at <= now - CACHE_TTL_S:
            self.model.unlink(self.model.cached.pop(0))

    # --- always ---

    @invariant()
    def ledger_balances(self) -> None:
        self.world.sound()
        for pool in self.world.cache.pools:
            table = pool.table
            quarantined = sum(model.quarantine is not None for model in self.model.pages.values())
            assert table.free_count == len(self.model.free())
            assert list(table.cached) == self.model.cached
            assert table.held_count == sum(bool(model.holders) for model in self.model.pages.values())
            assert table.quarantined_count == quarantined
            assert table.free_count + table.held_count + table.cached_count + table.quarantined_count == PAGES
            assert table.never_used_count + table.recycled_count == table.free_count
            assert len(pool.sequences) == len(self.model.sequences)


CacheMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase
