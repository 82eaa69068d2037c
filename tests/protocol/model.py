"""Sessions, pages and the fence as a transition system, small enough to be searched whole.

Two engines and a daemon take their steps in any order. That an engine takes none for as long as anything else likes
is what SIGSTOP, a slow kernel and a frozen container have in common, so none of them needs a step of its own. Messages
that were sent stay in the network: each is delivered never, late, or many times. What the daemon answers is known to
whoever asks again, so a lost reply is one not heard yet.

Each sequence has two pages: of a prefix that all sequences share, "p", and of its own. What a page holds is the name of
what was written there: a page written by a step that read anything but the prefix holds rubbish.

``Rules`` are the protections, each of which can be taken away. What the steps correspond to in the code is in
docs/protocol-model.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

PREFIX, NOTHING, RUBBISH, DAMAGED = "p", "", "rubbish", "damaged"
FREE, HELD, CACHED, QUARANTINED = "free", "held", "cached", "quarantined"
LIVE, LOST = "live", "lost"
IDLE, LAUNCHED, HALF, DONE = "idle", "launched", "half", "done"


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protections. ``kill`` is ``--fence=kill``; ``operator`` and ``expiry`` are what operators may do besides,
    rightly or not; ``damage`` is what no protocol prevents.
    """

    quarantine: bool = True  # unfinished pages of a lost session are not free at once
    evidence: bool = True  # nor after a drain
    proof_after_kill: bool = True  # nor when their process was told to end
    true_witness: bool = True  # a process that is said to be gone is gone
    vouch_after_step: bool = True  # an engine closes a session when no step of it is in flight
    release_after_step: bool = True  # and a sequence
    publish_after_step: bool = True  # and reports what a step wrote when it is done
    check_before_step: bool = True  # it launches nothing when its lease is over
    check_after_step: bool = True  # nor uses what was computed while that ended
    earlier_deadline: bool = True  # its lease ends for itself before it does for the daemon
    epoch_in_ids: bool = True  # a session of another run of the daemon is none of this
    hold_expired: bool = True  # what a sequence that was ended without its engine has published is not evicted
    refuse_living: bool = True  # no operator releases a session whose process is seen to live
    verify_hits: bool = True  # what is shared has the checksum that it was published with
    kill: bool = False  # the process of a lost session is killed
    operator: bool = False  # an operator releases lost sessions, without looking what their processes do
    expiry: bool = False  # an operator ends a sequence that runs
    damage: bool = False  # a stray write changes the prefix while nobody holds it


class Sid(NamedTuple):
    """A session: of which run of the daemon, of which engine, the how manieth."""

    epoch: int
    engine: int
    number: int

    def __str__(self) -> str:
        return f"{'AB'[self.engine]}{self.number}" + (f" of run {self.epoch}" if self.epoch else "")


class Page(NamedTuple):
    """``label`` is what lookups find it by, once it is published; ``of`` are who holds it, or may still write it."""

    state: str = FREE
    of: frozenset[Sid] = frozenset()
    label: str = NOTHING
    content: str = NOTHING


class Session(NamedTuple):
    """In the daemon; ``pages`` are what its sequence was granted, the prefix first; ``shared``: that was there."""

    sid: Sid
    state: str = LIVE
    pages: tuple[int, ...] = ()
    shared: bool = False
    published: bool = False
    ended: bool = False  # the sequence was removed, or expired
    killed: bool = False  # SIGKILL was sent to its process, which takes steps until it dies


class Engine(NamedTuple):
    """``leased`` is about time: its own deadline has not passed. ``closing`` is the session that it knows to be over
    and has not heard to be closed.
    """

    alive: bool = True
    sid: Sid | None = None
    memory: int = 0  # of which run of the daemon it has mapped
    leased: bool = False
    pages: tuple[int, ...] = ()
    shared: bool = False
    step: str = IDLE
    misread: bool = False
    resident: bool = False
    ended: bool = False  # it asked for the removal of its sequence
    closing: Sid | None = None
    opened: int = 0


GONE = Engine(alive=False)


class State(NamedTuple):
    """``sent`` are messages: a word and a session."""

    engines: tuple[Engine, ...]
    pages: tuple[Page, ...]
    sessions: tuple[Session, ...] = ()
    sent: frozenset[tuple[str, Sid]] = frozenset()
    epoch: int = 0
    said: str = NOTHING

    def session(self, sid: Sid | None) -> Session | None:
        return next((one for one in self.sessions if one.sid == sid), None)


class Model:
    """Of so many engines, pages, sessions for each engine and restarts of the daemon."""

    def __init__(self, rules: Rules, *, pages: int = 3, sessions: tuple[int, ...] = (2, 1), restarts: int = 0) -> None:
        self.rules = rules
        self.first = State((Engine(),) * len(sessions), (Page(),) * pages)
        self._sessions = sessions
        self._restarts = restarts

    # --- what must never be -------------------------------------------------------------------------------------------

    def violated(self, state: State) -> str:
        """What is wrong with a state; nothing, if it is sound."""
        writers: dict[int, int] = {}
        for at, engine in enumerate(state.engines):
            for page in self._writes(state, engine):
                if page in writers:
                    return f"engines {writers[page]} and {at} write page {page}"
                writers[page] = at
                owner = state.pages[page]
                if owner.of != {engine.sid} or owner.state not in (HELD, QUARANTINED) or owner.label:
                    return f"engine {at} writes page {page}, which is {owner.state}"
        for at, page_ in enumerate(state.pages):
            if page_.label and page_.content not in (page_.label, DAMAGED):
                return f"page {at} is found as {page_.label!r} and holds {page_.content!r}"
        return state.said

    def _writes(self, state: State, engine: Engine) -> tuple[int, ...]:
        """The pages, in the memory there is now, that a step in flight has yet to write."""
        if not engine.alive or engine.sid is None or engine.memory != state.epoch:
            return ()
        if engine.step == LAUNCHED:
            return engine.pages[engine.shared :]
        return engine.pages[1:] if engine.step == HALF else ()

    # --- what may happen ----------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step from here, by name. What nothing depends on any more is forgotten in what it leads to."""
        return ((name, self._forget(after)) for name, after in self._steps(state))

    def _forget(self, state: State) -> State:
        """The same state without what can make no difference: sessions that are over, which are unknown, messages that
        can change nothing any more, engines that have nothing left to do, and which of like pages is which.
        """
        rules, waiting = self.rules, {sid for page in state.pages for sid in page.of}
        engines, sessions, sent = list(state.engines), list[Session](), set[tuple[str, Sid]]()
        for at, engine in enumerate(engines):
            if engine.sid is None and engine.closing is None and engine.opened == self._sessions[at]:
                engines[at] = GONE
            elif engine.ended and engine.step == IDLE:
                engines[at] = engine._replace(pages=(), shared=False, resident=False)
        for one in state.sessions:
            if one.state == LIVE or one.sid in waiting:
                sessions.append(one)
        known = {one.sid: one for one in sessions}
        for word, sid in state.sent:
            session = known.get(sid)
            if not engines[sid.engine].alive:
                continue  # what it sent may arrive: as from one that lives and does nothing more
            # An unknown session stays unknown, if no later run of the daemon has one of the same name.
            if not rules.epoch_in_ids or (session is not None and _matters(word, session, sid in waiting)):
                sent.add((word, sid))
        return _sorted(state._replace(engines=tuple(engines), sessions=tuple(sessions), sent=frozenset(sent)))

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        for at, engine in enumerate(state.engines):
            if engine.alive:
                for name, after in self._engine(state, at, engine):
                    yield f"{name} {'AB'[at]}", after
                if engine.sid is not None or engine.closing is not None:
                    yield f"die {'AB'[at]}", _with_engine(state, at, GONE)
        for message in state.sent:
            for after in self._delivered(state, *message):
                yield f"{message[0]} {message[1]}", after
        for session in state.sessions:
            for name, after in self._daemon(state, session):
                yield f"{name} {session.sid}", after
        for at, page in enumerate(state.pages):
            if page.state == CACHED:
                yield f"evict {page.label}", _with_pages(state, {at: Page()})
                if self.rules.damage and page.label == PREFIX:
                    yield "damage p", _with_pages(state, {at: page._replace(content=DAMAGED)})
        if state.epoch < self._restarts:
            yield (
                "restart daemon",
                state._replace(
                    epoch=state.epoch + 1,
                    pages=(Page(),) * len(state.pages),
                    sessions=(),
                    engines=tuple(engine._replace(opened=0) for engine in state.engines),
                ),
            )

    def _engine(self, state: State, at: int, engine: Engine) -> Iterator[tuple[str, State]]:
        rules, session, leased = self.rules, state.session(engine.sid), engine.leased

        def now(**changes: object) -> State:
            return _with_engine(state, at, engine._replace(**changes))  # type: ignore[arg-type]

        def send(word: str, sid: Sid, **changes: object) -> State:
            return now(**changes)._replace(sent=state.sent | {(word, sid)})

        if engine.closing is not None:
            if ("close", engine.closing) not in state.sent and state.session(engine.closing) is not None:
                yield "ask-to-close", send("close", engine.closing)
            if state.session(engine.closing) is None:
                yield "hear-closed", now(closing=None)
            if engine.step == IDLE:
                return
        if engine.sid is None:
            if engine.opened < self._sessions[at]:
                number = engine.opened + 1
                sid = Sid(state.epoch if rules.epoch_in_ids else 0, at, number)
                if state.session(sid) is None:
                    opened = now(sid=sid, memory=state.epoch, leased=True, opened=number)
                    yield "open", opened._replace(sessions=(*state.sessions, Session(sid)))
            return
        if leased:
            yield "deadline-passes", now(leased=False)
        elif engine.step == IDLE:
            yield "give-up", now(sid=None, pages=(), shared=False, resident=False, ended=False, closing=engine.sid)
        elif not rules.vouch_after_step and engine.closing is None:
            yield "give-up", now(closing=engine.sid)
        if engine.step == IDLE and engine.closing is None:
            if not engine.pages:
                if session is None:
                    return
                if session.state == LIVE and not session.pages and ("grant", engine.sid) not in state.sent:
                    yield "ask-for-pages", send("grant", engine.sid)
                if session.pages:
                    yield "hear-pages", now(pages=session.pages, shared=session.shared)
            elif not (engine.resident or engine.ended) and (leased or not rules.check_before_step):
                yield "launch", now(step=LAUNCHED)
        if engine.step == LAUNCHED:
            after = state if engine.shared else _written(state, engine, 0, PREFIX)
            yield "write-prefix", _with_engine(after, at, engine._replace(step=HALF))
        if engine.step == HALF:
            reads = _content(state, engine, 0)
            after = _written(state, engine, 1, "AB"[at] if reads == PREFIX else RUBBISH)
            yield "write-own", _with_engine(after, at, engine._replace(step=DONE, misread=reads != PREFIX))
        if engine.step == DONE:
            if leased or not rules.check_after_step:
                said = "a token was said that was computed from rubbish" if engine.misread else NOTHING
                yield "use", now(step=IDLE, misread=False, resident=True)._replace(said=said)
            else:
                yield "discard", now(step=IDLE, misread=False)
        if not engine.pages or engine.ended or session is None or session.state != LIVE:
            return  # nobody would listen
        sent = session.published or session.ended or ("publish", engine.sid) in state.sent
        if (engine.resident or not rules.publish_after_step) and not sent:
            yield "report", send("publish", engine.sid)
        if engine.step == IDLE or not rules.release_after_step:
            yield "ask-to-remove", send("remove", engine.sid, ended=True)

    def _daemon(self, state: State, session: Session) -> Iterator[tuple[str, State]]:
        rules, engine = self.rules, state.engines[session.sid.engine]
        if session.state == LIVE and not (engine.sid == session.sid and engine.leased and rules.earlier_deadline):
            yield "expire", self._lost(state, session)
        if session.state == LIVE and rules.expiry and session.pages and not session.ended:
            ended = _with_session(state, session._replace(ended=True))
            keeps = rules.hold_expired and rules.quarantine
            yield "expire-sequence", _unwritten(ended, session.sid) if keeps else self._let_go(ended, session.sid)
        if not engine.alive or not rules.true_witness:
            yield "prove-gone", _over(self._lost(state, session), session.sid)
        if session.state == LOST and rules.kill and engine.alive and not session.killed:
            yield "kill", _with_session(state, session._replace(killed=True))
        if session.state == LOST and rules.operator and not (engine.alive and rules.refuse_living):
            yield "release", _over(state, session.sid)
        frees = not rules.evidence or (session.killed and not rules.proof_after_kill)
        if session.state == LOST and frees:
            yield "free", _over(state, session.sid)

    def _lost(self, state: State, session: Session) -> State:
        if session.state != LIVE:
            return state
        return self._let_go(_with_session(state, session._replace(state=LOST, ended=True)), session.sid)

    def _let_go(self, state: State, sid: Sid) -> State:
        """Without the engine's word: what is published stays cached, what is not may still be written."""
        return _released(state, sid, QUARANTINED if self.rules.quarantine else FREE)

    def _delivered(self, state: State, word: str, sid: Sid) -> Iterator[State]:
        """What a message may do when it arrives; nothing, if there is nothing for it to change."""
        session = state.session(sid)
        if session is None:
            return
        if word == "close":
            yield _over(_released(state, sid, FREE), sid)
        elif session.state == LIVE and word == "remove":
            # Of a sequence that expired it says that no step writes what is in quarantine.
            yield _freed(_released(_with_session(state, session._replace(ended=True)), sid, FREE), sid)
        elif session.state == LIVE and not session.ended:
            if word == "publish":
                yield _published(state, session)
            elif not session.pages:
                yield from _granted(_purged(state) if self.rules.verify_hits else state, session)


def _matters(word: str, session: Session, waits: bool) -> bool:
    """Whether a message to this session may still change anything."""
    if word == "close":
        return True
    if session.state != LIVE:
        return False
    if word == "remove":
        return waits or not session.ended
    return not (session.ended or (session.pages if word == "grant" else session.published))


def _sorted(state: State) -> State:
    """With its pages in an order that depends on what they are."""
    order = sorted(range(len(state.pages)), key=lambda at: _key(state.pages[at]))
    if order == [*range(len(order))]:
        return state
    at = {old: new for new, old in enumerate(order)}
    return state._replace(
        pages=tuple(state.pages[old] for old in order),
        engines=tuple(one._replace(pages=tuple(at[old] for old in one.pages)) for one in state.engines),
        sessions=tuple(one._replace(pages=tuple(at[old] for old in one.pages)) for one in state.sessions),
    )


@functools.cache
def _key(page: Page) -> tuple[str, list[Sid], str, str]:
    return page.state, sorted(page.of), page.label, page.content


# --- changes ----------------------------------------------------------------------------------------------------------


def _with_engine(state: State, at: int, engine: Engine) -> State:
    return state._replace(engines=(*state.engines[:at], engine, *state.engines[at + 1 :]))


def _with_session(state: State, session: Session) -> State:
    return state._replace(sessions=tuple(session if one.sid == session.sid else one for one in state.sessions))


def _with_pages(state: State, changes: dict[int, Page]) -> State:
    return state._replace(pages=tuple(changes.get(at, page) for at, page in enumerate(state.pages)))


def _content(state: State, engine: Engine, which: int) -> str:
    """What an engine reads; in the memory of an earlier run is what it wrote there."""
    if engine.sid is None or engine.memory != state.epoch:
        return PREFIX
    return state.pages[engine.pages[which]].content


def _written(state: State, engine: Engine, which: int, content: str) -> State:
    if engine.sid is None or engine.memory != state.epoch:
        return state
    at = engine.pages[which]
    return _with_pages(state, {at: state.pages[at]._replace(content=content)})


def _granted(state: State, session: Session) -> Iterator[State]:
    """The prefix is shared if it is found, and other pages are free ones; all or none. What is cached was evicted
    before, or is not.
    """
    found = next((at for at, page in enumerate(state.pages) if page.label == PREFIX), None)
    free = [at for at, page in enumerate(state.pages) if page.state == FREE]
    wanted = 2 if found is None else 1
    if len(free) < wanted:
        return
    taken, changes = free[:wanted], {at: Page(HELD, frozenset({session.sid})) for at in free[:wanted]}
    if found is not None:
        page = state.pages[found]
        changes[found] = page._replace(state=HELD, of=page.of | {session.sid})
        taken.insert(0, found)
    granted = session._replace(pages=tuple(taken), shared=found is not None)
    yield _with_session(_with_pages(state, changes), granted)


def _purged(state: State) -> State:
    """Without a prefix that is damaged, and without what follows it."""
    if all(page.content != DAMAGED for page in state.pages):
        return state
    return _with_pages(
        state,
        {
            at: Page() if page.state == CACHED else page._replace(label=NOTHING)
            for at, page in enumerate(state.pages)
            if page.label
        },
    )


def _published(state: State, session: Session) -> State:
    changes, labels = {}, {page.label for page in state.pages}
    for at, label in zip(session.pages, (PREFIX, "AB"[session.sid.engine]), strict=False):
        if not state.pages[at].label and label not in labels:
            changes[at] = state.pages[at]._replace(label=label)
    return _with_session(_with_pages(state, changes), session._replace(published=True))


def _released(state: State, sid: Sid, unfinished: str) -> State:
    """A session holds nothing any more: published pages without another holder are cached, others ``unfinished``."""
    changes = {}
    for at, page in enumerate(state.pages):
        if page.state == HELD and sid in page.of:
            others = page.of - {sid}
            if others:
                changes[at] = page._replace(of=others)
            elif page.label:
                changes[at] = page._replace(state=CACHED, of=frozenset())
            elif unfinished == QUARANTINED:
                changes[at] = page._replace(state=QUARANTINED)
            else:
                changes[at] = Page()
    return _with_pages(state, changes)


def _unwritten(state: State, sid: Sid) -> State:
    """What a session alone holds and has not published is in quarantine; it holds the rest as before."""
    return _with_pages(
        state,
        {
            at: page._replace(state=QUARANTINED)
            for at, page in enumerate(state.pages)
            if page.state == HELD and page.of == {sid} and not page.label
        },
    )


def _freed(state: State, sid: Sid) -> State:
    """What it may have written is free."""
    return _with_pages(
        state,
        {at: Page() for at, page in enumerate(state.pages) if page.state == QUARANTINED and sid in page.of},
    )


def _over(state: State, sid: Sid) -> State:
    after = _freed(state, sid)
    return after._replace(sessions=tuple(one for one in after.sessions if one.sid != sid))
