"""Random histories of the whole state object against a slow, obvious model.

The model knows, for every page, what the engine wrote in it (the whole prefix up to each slot), who holds it and how
recently it was cached. It predicts which pages an opening shares, which page an allocation takes and which one it
evicts. A page handed to two writers, a hit on other tokens, a lost page or a wrong eviction shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

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
    content: dict[int, Link] = field(default_factory=dict)


@dataclass
class ModelSequence:
    key: tuple[str, str]
    salt: str
    text: list[int]
    tokens: list[int]
    pages: list[int]
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
        self.let_go_of_copy(sequence)
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


class CacheMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    opened = Bundle("opened")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(PAGES, page_size=SIZE, drain_s=DRAIN_S, cache_ttl_s=CACHE_TTL_S, default_ttl_s=20.0)
        self.model = Model()
        self.pids: dict[str, int] = {}
        self.deadlines: dict[str, float] = {}
        self.next_id = 0

    # --- helpers ---

    def live(self, session: str) -> bool:
        return self.deadlines.get(session, 0.0) > self.world.now

    def ask(self, session: str, demand: Demand, removed: list[str]) -> Grant | ServiceError:
        """Every request is sent twice, as after a lost reply: the answers must be the same."""
        results, _ = self.world.cache.allocate(session, [demand], removed)
        again, _ = self.world.cache.allocate(session, [demand], removed)
        assert type(again[0]) is type(results[0])
        assert again[0] == results[0] or isinstance(again[0], ServiceError)
        self.deadlines[session] = self.world.now + 20.0
        return results[0]

    # --- rules ---

    @rule(target=sessions, seen=st.booleans())
    def open_session(self, seen: bool) -> object:
        assume(len(self.deadlines) < 4)
        pid = len(self.pids) + 1
        session = self.world.attached(pid=pid).id
        if not seen:
            del self.world.processes.seen[pid]
        self.pids[session] = pid
        self.deadlines[session] = self.world.now + 20.0
        return session

    @rule(
        target=opened,
        session=sessions,
        salt=st.sampled_from(["", "s"]),
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 13),
        extra=st.integers(0, 6),
    )
    def open(self, session: str, salt: str, text: list[int], length: int, extra: int) -> object:
        assume(self.live(session))
        prompt = text[:length]
        self.next_id += 1
        key = (session, f"q{self.next_id}")
        matched = self.model.match(salt, prompt)
        demand = Demand(key[1], prompt, salt, 0, [], extra, 0)
        available = len(self.model.free()) + len([p for p in self.model.cached if p not in matched])
        result = self.ask(session, demand, [])
        if max(extra, len(matched)) - len(matched) > available:
            assert isinstance(result, CapacityExceeded)
            return multiple()
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
        self.model.sequences[key] = sequence
        self.model.check_content(sequence)
        return key

    @rule(key=opened, count=st.integers(0, 9), more=st.integers(0, 2), overlap=st.integers(0, 3))
    def step(self, key: tuple[str, str], count: int, more: int, overlap: int) -> None:
        session, name = key
        assume(self.live(session))
        sequence = self.model.sequences.get(key)
        if sequence is None:
            result = self.ask(session, Demand(name, None, "", 0, [], 1, 0), [])
            assert isinstance(result, SequenceRemoved)
            return
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

    @rule(target=opened, key=opened, turn=st.booleans())
    def fork(self, key: tuple[str, str], turn: bool) -> object:
        session, name = key
        parent = self.model.sequences.get(key)
        assume(parent is not None and self.live(session))
        assert parent is not None
        self.next_id += 1
        child = (session, f"q{self.next_id}")
        for _ in range(2):
            grant, _ = self.world.cache.fork(session, name, child[1])
        self.deadlines[session] = self.world.now + 20.0
        pages = parent.pages[: -(-len(parent.tokens) // SIZE)]
        if parent.copy is not None:
            pages[len(parent.tokens) // SIZE] = parent.copy
        assert [page for page, _ in grant.pages] == pages
        rest = parent.text[len(parent.tokens) :]
        text = parent.tokens + [token ^ turn for token in rest]
        for page in pages:
            self.model.pages[page].holders.add(child)
        self.model.sequences[child] = ModelSequence(child, parent.salt, text, list(parent.tokens), pages)
        self.model.check_content(self.model.sequences[child])
        return child

    @rule(key=opened, count=st.integers(1, 5))
    def append(self, key: tuple[str, str], count: int) -> None:
        sequence = self.model.sequences.get(key)
        assume(sequence is not None and self.live(key[0]))
        assert sequence is not None
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
        self.deadlines[key[0]] = self.world.now + 20.0
        self.model.write(sequence, tokens)

    @rule(key=opened, flip=st.integers(0, 8))
    def append_other_tokens(self, key: tuple[str, str], flip: int) -> None:
        """Tokens that contradict the record, leave a gap or overrun the pages change nothing."""
        sequence = self.model.sequences.get(key)
        assume(sequence is not None and self.live(key[0]))
        assert sequence is not None
        bad = [(len(sequence.tokens) + 1, [1]), (0, [9] * (len(sequence.pages) * SIZE + 1))]
        if flip < len(sequence.tokens):
            bad.append((flip, [1 - sequence.tokens[flip]]))
        for start, tokens in bad:
            [result] = self.world.cache.append(key[0], [(key[1], start, tokens)])
            assert isinstance(result, ServiceError)
        self.deadlines[key[0]] = self.world.now + 20.0

    @rule(key=consumes(opened))
    def remove(self, key: tuple[str, str]) -> None:
        assume(self.live(key[0]))
        sequence = self.model.sequences.get(key)
        removed, _ = self.world.cache.remove(key[0], [key[1]])
        assert removed == [sequence is not None]
        assert self.world.cache.remove(key[0], [key[1]])[0] == [False]
        self.deadlines[key[0]] = self.world.now + 20.0
        if sequence is not None:
            self.model.release(sequence, self.world.now, None)
        late = Demand(key[1], [1, 2, 3], "", 0, [], 1, 0)
        assert isinstance(self.ask(key[0], late, []), SequenceRemoved)

    @rule(session=sessions)
    def unknown_sequence(self, session: str) -> None:
        assume(self.live(session))
        assert isinstance(self.ask(session, Demand("never", None, "", 0, [], 1, 0), []), SequenceUnknown)

    @rule(session=consumes(sessions))
    def close_session(self, session: str) -> None:
        live = self.live(session)
        count = self.world.cache.close_session(session)
        mine = [s for k, s in self.model.sequences.items() if k[0] == session]
        if session not in self.deadlines:
            assert count is None
            return
        assert count == len(mine) or not live
        for sequence in mine:
            self.model.release(sequence, self.world.now, None)
        del self.deadlines[session]
        assert self.world.cache.close_session(session) is None

    @rule(session=sessions)
    def kill_process(self, session: str) -> None:
        assume(session in self.deadlines and self.pids[session] in self.world.processes.seen)
        self.world.processes.kill(self.pids[session])

    @rule(seconds=st.sampled_from([1.0, 15.0, 25.0, 90.0]))
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
            for sequence in [s for k, s in self.model.sequences.items() if k[0] == session]:
                self.model.release(sequence, now, (self.pids[session], now + DRAIN_S))
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
