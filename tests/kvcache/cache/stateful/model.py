# mypy: disable-error-code="arg-type, assignment, has-type, misc, str-unpack, union-attr"
"""A slow, obvious model of the whole cache: lists and scans, nothing clever.

It knows, for every page, what the engine wrote in it (the whole prefix up to each slot), who holds it and how recently
it was cached. It is told every transaction and its answer, in order, and fails when it would have answered otherwise:
on a page handed to two writers, a hit on other tokens, a lost page, a wrong eviction, a wrong refusal. It chooses
nothing where the cache may choose: which free page is granted, and which of several reasons a refusal names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.kvcache.cache.opening import Opening
from services.kvcache.eviction.retention import Retention
from tests.kvcache.cache.demands import Step
from tests.kvcache.cache.stateful.transactions import (
    Allocate,
    Answer,
    Append,
    Close,
    Damage,
    Entry,
    Evict,
    Evicted,
    Expire,
    Get,
    Grant,
    Granted,
    Kill,
    Open,
    PassTime,
    Recorded,
    Refused,
    Release,
    Remove,
    Removed,
    Renew,
    Sweep,
    Table,
    can_be_seen,
)

PAGES = 9
SIZE = 2
DRAIN_S = 30.0
TTL_S = 20.0
CACHE_TTL_S = 100.0
MOST_RETAINED = 4

Key = tuple[str, str]  # session, sequence
Link = tuple[str, tuple[int, ...]]  # salt, and every token from the start to the end of the page


@dataclass
class ModelPage:
    generation: int = 0
    used: bool = False
    holders: set[Key] = field(default_factory=set)
    link: Link | None = None
    cached_at: float = 0.0
    quarantine: Key | None = None  # who may still write it: a session, and its sequence that was expired, or ""
    content: dict[int, Link] = field(default_factory=dict)


@dataclass
class ModelSession:
    pid: int | None
    max_pages: int | None
    deadline: float


@dataclass
class ModelSequence:
    key: Key
    number: int  # of those opened so far
    origin: object  # what a replay of its opening has to repeat
    salt: str
    text: list[int]  # the tokens it has and will have
    tokens: list[int]
    pages: list[int]
    cached_tokens: int
    retention: Retention | None
    last_access: float = 0.0
    access_count: int = 0
    copy: int | None = None  # the page its tail was copied from, held until a token behind is reported
    broken: int | None = None  # from this page on it has nothing published

    def publishes(self, at: int) -> bool:
        """Whether its page at that index is published once it is complete."""
        return self.broken is None or at < self.broken

    def published(self) -> int:
        complete = len(self.tokens) // SIZE
        return complete if self.broken is None else min(complete, self.broken)

    def ahead(self, count: int) -> list[int]:
        """The next tokens it will run."""
        return self.text[len(self.tokens) : len(self.tokens) + count]


class Model:
    """``texts`` and ``turns`` are the engines' plans: what an opened sequence goes on with, and whether a fork goes
    another way than its parent.
    """

    def __init__(self) -> None:
        self.pages = {page: ModelPage() for page in range(PAGES)}
        self.links: dict[Link, list[int]] = {}  # first is the one that lookups find
        self.cached: list[int] = []  # those that are not retained, oldest first
        self.retained: list[int] = []  # oldest first
        self.promises: dict[Link, tuple[int, float]] = {}  # priority and until when, of links that are found
        self.sessions: dict[str, ModelSession] = {}  # in the order they were opened
        self.lost: dict[str, tuple[int | None, float]] = {}  # pid and since when, of those nothing is known of since
        self.sequences: dict[Key, ModelSequence] = {}  # in the order of their last access
        self.expired: dict[Key, ModelSequence] = {}  # ended without their engine, which may read their pages
        self.opened = 0
        self.removed: list[Key] = []
        self.killed: set[int] = set()
        self.texts: dict[Key, list[int]] = {}
        self.turns: dict[Key, bool] = {}
        self.totals: Counter[str] = Counter()

    # --- what can be seen from outside ---

    def stats(self) -> dict[str, int]:
        """As PoolStats and GetStatsResponse name them."""
        free = self.free()
        used = sum(page.used for page in self.pages.values())
        return {
            "total_pages": PAGES,
            "free_pages": len(free),
            "held_pages": sum(bool(page.holders) for page in self.pages.values()),
            "cached_pages": len(self.evictable()),
            "retained_pages": len(self.retained),
            "quarantined_pages": sum(page.quarantine is not None for page in self.pages.values()),
            "never_used_pages": PAGES - used,
            "recycled_pages": len(free) - (PAGES - used),
            "sessions": len(self.sessions),
            "active_sequences": len(self.sequences),
            "total_tokens": sum(len(sequence.tokens) for sequence in self.sequences.values()),
            **{
                name: self.totals[name]
                for name in (
                    *("lookup_tokens", "hit_tokens", "granted_pages", "published_pages", "evicted_pages"),
                    *("expired_pages", "refused_demands", "expired_sessions", "expired_sequences"),
                    *("verified_pages", "corrupted_pages", "withdrawn_pages"),
                )
            },
        }

    def of_session(self, session: str) -> list[ModelSequence]:
        """In the order they were opened."""
        mine = [sequence for sequence in self.sequences.values() if sequence.key[0] == session]
        return sorted(mine, key=lambda sequence: sequence.number)

    def shares_tail(self, sequence: ModelSequence) -> bool:
        at = len(sequence.tokens)
        return at % SIZE > 0 and len(self.pages[sequence.pages[at // SIZE]].holders) > 1

    # --- transactions ---

    def explain(self, entry: Entry) -> None:
        """One transaction and its answer. Fails when they are not what they had to be."""
        operation, answer, now = entry.operation, entry.answer, entry.now
        match operation:
            case Open(pid, max_pages):
                assert isinstance(answer, str) and answer not in self.sessions, answer
                self.sessions[answer] = ModelSession(pid, max_pages, now + TTL_S)
                self._pass_time(now)
            case PassTime():
                pass
            case Kill(pid):
                self.killed.add(pid)
            case Damage(page):
                self._damage(page, answer)
            case Sweep():
                self._sweep(answer, now)
            case Evict(most, retained):
                self._pass_time(now)
                count = min(most, len(self.evictable() if retained else self.cached))
                for _ in range(count):
                    self._evict()
                assert answer == Evicted(count, len(self.retained))
            case Expire(age):
                self._expire(age, answer, now)
            case Close(session):
                self._close(session, answer, now)
            case Release(session):
                self._release_lost(session, answer)
            case Allocate(session) | Append(session) | Remove(session) | Get(session) | Renew(session):
                lease = self.sessions.get(session)
                if lease is None or lease.deadline <= now:
                    refused(answer, {"SESSION_EXPIRED"})
                    return
                lease.deadline = now + TTL_S
                self._serve(operation, answer, now)

    def _serve(self, operation: Allocate | Append | Remove | Get | Renew, answer: Answer, now: float) -> None:
        self._pass_time(now)
        match operation:
            case Renew():
                assert answer == TTL_S
            case Allocate(session, demands, names):
                assert isinstance(answer, Granted), answer
                for name in names:
                    self._vouched((session, name), now)
                for name in names:
                    self._remove((session, name), now)
                told = [*answer.told]
                for demand in demands:
                    key = (session, demand.sequence_id)
                    if isinstance(demand, Opening):
                        assert told and told[0][0] == key[1], f"{demand} was to be answered, and not {told}"
                        self._opening(key, demand, told.pop(0)[1], now)
                    else:
                        self._in_columns(key, demand, told, now)
                assert not told, f"{told} is told and was not asked for"
                assert answer.available_pages == len(self.free()) + len(self.evictable())
            case Append(session, steps):
                assert isinstance(answer, Recorded), answer
                failed = [*answer.failed]
                for step in steps:
                    self._append((session, step.sequence_id), step, failed, now)
                assert not failed, f"{failed} are told and did not fail"
            case Remove(session, names):
                for name in names:
                    self._vouched((session, name), now)
                absent = tuple(name for name in names if not self._remove((session, name), now))
                assert answer == Removed(len(names) - len(absent), absent, len(self.free()) + len(self.evictable()))
            case Get(session, name):
                self._get((session, name), answer, now)

    def _in_columns(self, key: Key, step: Step, told: list[tuple[str, Grant | Refused]], now: float) -> None:
        """Only a step with a page, a copy or an error is answered."""
        sequence = self.sequences.get(key)
        if sequence is not None and not self._why_not_step(sequence, step):
            runs = step.start + len(step.tokens) > len(sequence.tokens)
            copies = self._unshares(sequence, step) or (sequence.copy is not None and not runs)
            if max(len(sequence.pages), step.total_pages) == step.known_pages and not copies:
                self._step(sequence, step, Grant(step.known_pages, (), sequence.cached_tokens, ()), now)
                return
        assert told and told[0][0] == key[1], f"{step} was to be told of, and not {told}"
        item = told.pop(0)[1]
        sequence = self._live(key, item)
        if sequence is not None:
            self._step(sequence, step, item, now)

    def _opening(self, key: Key, opening: Opening, item: Grant | Refused, now: float) -> None:
        sequence, origin = self.sequences.get(key), opening.origin
        if key in self.removed:
            refused(item, {"SEQUENCE_REMOVED"})
        elif sequence is not None and sequence.origin != _plain(opening):
            refused(item, {"SEQUENCE_MISMATCH"})
        elif sequence is not None:
            self._step(sequence, Step(key[1], total_pages=opening.total_pages), item, now)
        elif isinstance(origin, str):
            self._fork(key, origin, opening, item, now)
        elif not self._refused(item, self._why_not_begin(key, opening)):
            self._granted(self._begin(key, opening, item), 0, item, now)

    def _refused(self, item: Grant | Refused, reasons: set[str]) -> bool:
        """Whether there is a reason to refuse, and the answer gave one of them."""
        if reasons:
            refused(item, reasons)
            assert isinstance(item, Refused)
            self.totals["refused_demands"] += item.reason in ("NO_PAGES", "QUOTA_EXCEEDED")
        return bool(reasons)

    def _granted(self, sequence: ModelSequence, known: int, item: Grant | Refused, now: float) -> None:
        self._touch(sequence, now)
        assert item == self._grant(sequence, known)
        self.check_content(sequence)

    def _why_not_begin(self, key: Key, opening: Opening) -> set[str]:
        tokens, salt, *_ = opening.origin
        matched = self.match(salt, tokens.tolist())
        total = max(len(matched), opening.total_pages)
        available = len(self.free()) + len([page for page in self.evictable() if page not in matched])
        reasons = self._why_not_grow(key[0], total, total, total - len(matched), available)
        return reasons if tokens else reasons | {"FIELD_INVALID"}

    def _begin(self, key: Key, opening: Opening, item: Grant | Refused) -> ModelSequence:
        assert isinstance(item, Grant), item
        tokens, salt, retention, _ = opening.origin
        prompt = tokens.tolist()
        matched = self.match(salt, prompt)
        granted = [page for page, _ in item.pages]
        assert granted[: len(matched)] == matched
        assert len(granted) == max(len(matched), opening.total_pages)
        cached = len(matched) * SIZE
        resident, text = prompt[:cached], self.texts.get(key, prompt)
        self.opened += 1
        sequence = ModelSequence(key, self.opened, _plain(opening), salt, text, resident, granted, cached, retention)
        for page in matched:
            if page in self.evictable():
                self._take_out(page)
            self.pages[page].holders.add(key)
        for page in granted[len(matched) :]:
            self._take(page, key)
        self.totals["lookup_tokens"] += len(prompt)
        self.totals["hit_tokens"] += cached
        return sequence

    def _why_not_step(self, sequence: ModelSequence, step: Step) -> set[str]:
        reasons = self._why_not_tokens(sequence, step)
        held = len(sequence.pages)
        total = max(held, step.total_pages)
        if step.known_pages > total:
            reasons.add("FIELD_INVALID")
        lets_go = sequence.copy is not None and step.start + len(step.tokens) > len(sequence.tokens)
        frees = lets_go and self.pages[self._source(sequence)].holders == {sequence.key}
        more = total - held + self._unshares(sequence, step)
        available = len(self.free()) + len(self.evictable()) + frees
        return reasons | self._why_not_grow(sequence.key[0], total, more - lets_go, more, available)

    def _step(self, sequence: ModelSequence, step: Step, item: Grant | Refused, now: float) -> None:
        if self._refused(item, self._why_not_step(sequence, step)):
            return
        assert isinstance(item, Grant), item
        unshares = self._unshares(sequence, step)
        self._write(sequence, list(step.tokens[len(sequence.tokens) - step.start :]))
        if unshares:
            self._unshare(sequence, item)
        for page, _ in item.pages[len(sequence.pages) - step.known_pages :]:
            self._take(page, sequence.key)
            sequence.pages.append(page)
        self._granted(sequence, step.known_pages, item, now)

    def _unshare(self, sequence: ModelSequence, item: Grant) -> None:
        [(index, (source, _), (target, _))] = item.copies
        assert sequence.pages[index] == source and index == len(sequence.tokens) // SIZE
        self._take(target, sequence.key)
        self.pages[target].content = dict(self.pages[source].content)  # the engine does as the grant says
        sequence.pages[index], sequence.copy = target, source

    def _unshares(self, sequence: ModelSequence, step: Step) -> bool:
        """Room beyond what is resident means that the tail will be written."""
        end = max(len(sequence.tokens), step.start + len(step.tokens))
        return step.total_pages * SIZE > end and self.shares_tail(sequence)

    def _why_not_grow(self, session: str, total: int, counted: int, more: int, available: int) -> set[str]:
        reasons, quota = set[str](), self.sessions[session].max_pages
        if total > PAGES or (quota is not None and total > quota):
            reasons.add("EXCEEDS_POOL")
        if quota is not None and self._counted(session) + counted > quota:
            reasons.add("QUOTA_EXCEEDED")
        if more > available:
            reasons.add("NO_PAGES")
        return reasons

    def _why_not_tokens(self, sequence: ModelSequence, step: Step) -> set[str]:
        resident, end = len(sequence.tokens), step.start + len(step.tokens)
        bad = (
            step.start > resident
            or end > len(sequence.pages) * SIZE
            or (end > resident and self.shares_tail(sequence))
            or list(step.tokens[: resident - step.start]) != sequence.tokens[step.start : end]
        )
        return {"POSITION_MISMATCH"} if bad else set()

    def _append(self, key: Key, step: Step, failed: list[tuple[str, Refused]], now: float) -> None:
        """Only a refused one is answered."""
        sequence = self.sequences.get(key)
        if sequence is None or (reasons := self._why_not_tokens(sequence, step)):
            assert failed and failed[0][0] == key[1], f"{step} was to be refused, and not {failed}"
            error = failed.pop(0)[1]
            if self._live(key, error) is not None:
                refused(error, reasons)
            return
        self._write(sequence, list(step.tokens[len(sequence.tokens) - step.start :]))
        self._touch(sequence, now)

    def _to_share(self, parent: ModelSequence) -> list[int]:
        pages = parent.pages[: -(-len(parent.tokens) // SIZE)]
        if parent.copy is not None:
            pages[len(parent.tokens) // SIZE] = parent.copy
        return pages

    def _forked(self, parent: ModelSequence, key: Key, pages: list[int], now: float) -> ModelSequence:
        turn = self.turns.get(key, False)
        text = parent.tokens + [token ^ turn for token in parent.text[len(parent.tokens) :]]
        self.opened += 1
        tokens, cached = list(parent.tokens), len(parent.tokens)
        child = ModelSequence(
            key, self.opened, parent.key[1], parent.salt, text, tokens, pages, cached, parent.retention
        )
        child.broken = parent.broken
        for page in pages:
            self.pages[page].holders.add(key)
        self._touch(parent, now)
        return child

    def _fork(self, key: Key, parent_id: str, opening: Opening, item: Grant | Refused, now: float) -> None:
        """A fork, then growth; and where the growth cannot be, no fork."""
        parent = self._live((key[0], parent_id), item)
        if parent is None:
            return
        pages = self._to_share(parent)
        total = max(len(pages), opening.total_pages)
        copies = len(parent.tokens) % SIZE > 0 and opening.total_pages * SIZE > len(parent.tokens)
        more = total - len(pages) + copies
        # A fork is of no more pages than its parent: only what it asks for beyond can be too much for any pool.
        available = len(self.free()) + len(self.evictable())
        if self._refused(item, self._why_not_grow(key[0], opening.total_pages, total + copies, more, available)):
            return
        assert isinstance(item, Grant), item
        child = self._forked(parent, key, pages, now)
        self._touch(child, now)
        granted = [page for page, _ in item.pages]
        assert len(granted) == total
        if copies:
            self._unshare(child, item)
        for page in granted[len(pages) :]:
            self._take(page, key)
            child.pages.append(page)
        assert item == self._grant(child, 0)
        self.check_content(child)

    def _get(self, key: Key, answer: Answer, now: float) -> None:
        sequence = self._live(key, answer)
        if sequence is not None:
            self._touch(sequence, now)
            assert answer == Table(
                tuple(map(self._reference, sequence.pages)),
                tuple(sequence.tokens),
                sequence.published(),
                sequence.cached_tokens,
                sequence.access_count,
                sequence.retention,
            )

    def _remove(self, key: Key, now: float) -> bool:
        sequence = self.sequences.get(key)
        if sequence is not None:
            self._release(sequence, now)
        if key not in self.removed:
            self.removed.append(key)
        return sequence is not None

    def _close(self, session: str, answer: Answer, now: float) -> None:
        if session in self.lost:
            assert answer == 0
            self._over(session)
            return
        if session not in self.sessions:
            assert answer is None
            return
        mine = self.of_session(session)
        assert answer == len(mine)
        for sequence in [*mine, *self._expired_of(session)]:
            self._release(sequence, now)
        del self.sessions[session]
        self._over(session)

    def _release_lost(self, session: str, answer: Answer) -> None:
        """An operator's word is taken of those that cannot be seen, and of no other."""
        if session not in self.lost:
            refused(answer, {"QUARANTINE_UNKNOWN"})
        elif self._seen(self.lost[session][0]) and self.lost[session][0] not in self.killed:
            refused(answer, {"ENGINE_ALIVE"})
        else:
            assert answer == len(self._kept(session))
            self._over(session)

    def _seen(self, pid: int | None) -> bool:
        return pid is not None and can_be_seen(pid)

    def _expire(self, age: float, answer: Answer, now: float) -> None:
        old = [sequence for sequence in self.sequences.values() if sequence.last_access <= now - age]
        assert answer == len(old)
        for sequence in old:
            self.expired[sequence.key] = self.sequences.pop(sequence.key)
            own = [at for at, page in enumerate(sequence.pages) if self._is_own(sequence, at, page)]
            for at in reversed(own):
                page = self.pages[sequence.pages.pop(at)]
                page.holders, page.quarantine = set(), sequence.key
            self.removed.append(sequence.key)
        self.totals["expired_sequences"] += len(old)

    def _is_own(self, sequence: ModelSequence, at: int, page: int) -> bool:
        complete = (at + 1) * SIZE <= len(sequence.tokens) and sequence.publishes(at)
        return not complete and self.pages[page].holders == {sequence.key}

    def _expired_of(self, session: str) -> list[ModelSequence]:
        return [sequence for sequence in self.expired.values() if sequence.key[0] == session]

    def _sweep(self, answer: Answer, now: float) -> None:
        lost = [name for name, lease in self.sessions.items() if lease.deadline <= now or lease.pid in self.killed]
        assert answer == frozenset(lost)
        for session in lost:
            for sequence in [*self.of_session(session), *self._expired_of(session)]:
                self._release(sequence, now, (session, ""))
            self.lost[session] = self.sessions.pop(session).pid, now
        self.totals["expired_sessions"] += len(lost)
        for session, (pid, since) in [*self.lost.items()]:
            # No time frees a page. What has none and cannot be seen is forgotten with the drain.
            forgotten = not self._seen(pid) and not self._kept(session) and since + DRAIN_S <= now
            if pid in self.killed or forgotten:
                self._over(session)
        self._pass_time(now)
        while self.cached and self.pages[self.cached[0]].cached_at <= now - CACHE_TTL_S:
            self._uncache(self.cached[0], "expired_pages")

    def _kept(self, session: str) -> list[int]:
        """What a session may still write."""
        return [page for page, model in self.pages.items() if model.quarantine and model.quarantine[0] == session]

    def _over(self, session: str) -> None:
        """Nothing of it writes any more."""
        self.lost.pop(session, None)
        for page in self._kept(session):
            self._give_up(page)

    def _vouched(self, key: Key, now: float) -> None:
        """No step of the engine reads or writes what this sequence left."""
        if (sequence := self.expired.get(key)) is not None:
            self._release(sequence, now)
        for page in [page for page, model in self.pages.items() if model.quarantine == key]:
            self._give_up(page)

    def _damage(self, damaged: int, answer: Answer) -> None:
        """The page and everything computed after it no longer matter."""
        published = [page for page, model in self.pages.items() if model.link is not None]
        self.totals["verified_pages"] += len(published)
        link = self.pages[damaged].link
        if link is None:
            assert answer == 0
            return
        salt, tokens = link
        gone = [
            page for page in published if self._link(page)[0] == salt and self._link(page)[1][: len(tokens)] == tokens
        ]
        self.totals["corrupted_pages"] += 1
        self.totals["withdrawn_pages"] += len(gone)
        assert answer == len(gone)
        for page in gone:
            for sequence in [*self.sequences.values(), *self.expired.values()]:
                if page in sequence.pages:
                    at = sequence.pages.index(page)
                    sequence.broken = at if sequence.broken is None else min(sequence.broken, at)
            if page in self.evictable():
                self._take_out(page)
                self._give_up(page)
            else:
                self._unlink(page)

    # --- pages ---

    def free(self) -> set[int]:
        cached = self.evictable()
        return {p for p, m in self.pages.items() if not m.holders and p not in cached and m.quarantine is None}

    def evictable(self) -> list[int]:
        """Every cached page, in the order they are to go."""
        return self.cached + sorted(self.retained, key=lambda page: (*self._promise(page), self.retained.index(page)))

    def match(self, salt: str, prompt: list[int]) -> list[int]:
        found: list[int] = []
        for end in range(SIZE, len(prompt), SIZE):
            pages = self.links.get((salt, tuple(prompt[:end])))
            if not pages:
                break
            found.append(pages[0])
        return found

    def check_content(self, sequence: ModelSequence) -> None:
        """What the sequence would read is what its own prefix is."""
        for at in range(len(sequence.tokens)):
            want = (sequence.salt, tuple(sequence.tokens[: at + 1]))
            assert self.pages[sequence.pages[at // SIZE]].content[at % SIZE] == want

    def _take(self, page: int, key: Key) -> None:
        """The cache granted this new page: was it its to give?"""
        free = self.free()
        if free:
            assert page in free, f"page {page} granted while {free} were free"
        else:
            assert self.evictable(), f"page {page} granted while none was free or cached"
            assert page == self.evictable()[0], f"evicted {page} of {self.cached}, and retained {self.retained}"
            self._evict()
        self.pages[page].holders, self.pages[page].used = {key}, True
        self.totals["granted_pages"] += 1

    def _give_up(self, page: int) -> None:
        """The page is free: its content is nobody's any more."""
        self._unlink(page)
        self.pages[page] = ModelPage(self.pages[page].generation + 1, used=True)

    def _unlink(self, page: int) -> None:
        """No lookup finds the page any more."""
        old = self.pages[page]
        if old.link is not None:
            self.links[old.link].remove(page)
            if not self.links[old.link]:
                del self.links[old.link]
                self.promises.pop(old.link, None)
            old.link = None

    def _evict(self) -> None:
        self._uncache(self.evictable()[0], "evicted_pages")

    def _uncache(self, page: int, fate: str) -> None:
        """Nothing that is cached may continue it."""
        link = self._link(page)
        self._take_out(page)
        self._give_up(page)
        for salt, tokens in map(self._link, self.evictable()):
            assert link != (salt, tokens[:-SIZE]) or link in self.links, f"{tokens} are cached, and {link} is not"
        self.totals[fate] += 1

    def _take_out(self, page: int) -> None:
        (self.cached if page in self.cached else self.retained).remove(page)

    def _link(self, page: int) -> Link:
        link = self.pages[page].link
        assert link is not None, f"page {page} has no link"
        return link

    # --- retention ---

    def _promise(self, page: int) -> tuple[int, float]:
        """Of a published page; nothing is less than anything."""
        return self.promises.get(self._link(page), (0, 0.0))

    def _pass_time(self, now: float) -> None:
        for page in self.evictable()[len(self.cached) :]:
            if self._promise(page)[1] <= now:
                self.retained.remove(page)
                self._cache(page, now)
        self.promises = {link: promise for link, promise in self.promises.items() if promise[1] > now}

    def _cache(self, page: int, now: float) -> None:
        """Nobody holds it, or it was used now. When too many are retained, the lowest is not any more."""
        if self._promise(page)[1] > now:
            self.retained.append(page)
            if len(self.retained) <= MOST_RETAINED:
                return
            page = self.evictable()[len(self.cached)]
            self.retained.remove(page)
        self.promises.pop(self._link(page), None)
        self.cached.append(page)
        self.pages[page].cached_at = now

    def _write(self, sequence: ModelSequence, tokens: list[int]) -> None:
        """The engine ran these tokens, then reported them."""
        if tokens and sequence.copy is not None:
            self._let_go_of_copy(sequence, None)
        for token in tokens:
            at = len(sequence.tokens)
            sequence.tokens.append(token)
            page = sequence.pages[at // SIZE]
            assert self.pages[page].holders == {sequence.key}, "an engine wrote into a page that others share"
            self.pages[page].content[at % SIZE] = (sequence.salt, tuple(sequence.tokens))
            if (at + 1) % SIZE == 0 and sequence.publishes(at // SIZE):
                link = (sequence.salt, tuple(sequence.tokens))
                self.pages[page].link = link
                self.links.setdefault(link, []).append(page)
                self.totals["published_pages"] += 1

    def _let_go_of_copy(self, sequence: ModelSequence, lost: Key | None) -> None:
        source = self._source(sequence)
        sequence.copy = None
        self.pages[source].holders.remove(sequence.key)
        if not self.pages[source].holders:
            self._leave(source, lost)

    def _leave(self, page: int, lost: Key | None) -> None:
        """An unfinished page lost its last holder."""
        if lost is not None:
            self.pages[page].quarantine = lost
        else:
            self._give_up(page)

    def _release(self, sequence: ModelSequence, now: float, lost: Key | None = None) -> None:
        self._pass_time(now)
        del (self.expired if sequence.key in self.expired else self.sequences)[sequence.key]
        if sequence.copy is not None:
            self._let_go_of_copy(sequence, lost)
        asked = sequence.retention
        promises = [(asked.priority, now + asked.ttl_s)] if asked else []
        for at in reversed(range(len(sequence.pages))):
            page = sequence.pages[at]
            model = self.pages[page]
            model.holders.remove(sequence.key)
            complete = (at + 1) * SIZE <= len(sequence.tokens) and sequence.publishes(at)
            if complete:
                # What is promised of a page behind it is promised of it too.
                link = self._link(page)
                promises += [self.promises[link]] if link in self.promises else []
                if promises:
                    self.promises[link] = (max(p for p, _ in promises), max(until for _, until in promises))
            if complete and model.link is not None and self.links[model.link][0] != page:
                primary = self.links[model.link][0]
                if primary in self.evictable():
                    self._take_out(primary)
                    self._cache(primary, now)
                if not model.holders:
                    self._give_up(page)
            elif complete and not model.holders:
                self._cache(page, now)
            elif not complete and not model.holders:
                self._leave(page, lost)

    # --- sequences ---

    def _live(self, key: Key, answer: Answer) -> ModelSequence | None:
        if key in self.removed:
            refused(answer, {"SEQUENCE_REMOVED"})
        elif key not in self.sequences:
            refused(answer, {"SEQUENCE_UNKNOWN"})
        return self.sequences.get(key)

    def _touch(self, sequence: ModelSequence, now: float) -> None:
        sequence.last_access = now
        sequence.access_count += 1
        self.sequences[sequence.key] = self.sequences.pop(sequence.key, sequence)

    def _grant(self, sequence: ModelSequence, known: int) -> Grant:
        """What a granted demand has to be answered with."""
        pages = tuple(map(self._reference, sequence.pages[known:]))
        if sequence.copy is None:
            return Grant(known, pages, sequence.cached_tokens, ())
        index = len(sequence.tokens) // SIZE
        copy = (index, self._reference(sequence.copy), self._reference(sequence.pages[index]))
        return Grant(known, pages, sequence.cached_tokens, (copy,))

    def _reference(self, page: int) -> tuple[int, int]:
        return page, self.pages[page].generation

    def _counted(self, session: str) -> int:
        """What its quota counts."""
        return sum(len(sequence.pages) + (sequence.copy is not None) for sequence in self.of_session(session))

    def _source(self, sequence: ModelSequence) -> int:
        assert sequence.copy is not None
        return sequence.copy


def refused(answer: Answer | Grant, reasons: set[str]) -> None:
    """The answer had to be an error, for one of these reasons."""
    assert isinstance(answer, Refused) and answer.reason in reasons, f"{answer}, and not one of {reasons}"


def _plain(opening: Opening) -> object:
    """Its origin, to compare."""
    origin = opening.origin
    return origin if isinstance(origin, str) else (tuple(origin.tokens), origin.salt, origin.retention)
