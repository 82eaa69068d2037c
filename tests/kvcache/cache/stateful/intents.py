# mypy: disable-error-code="assignment, return-value"
"""What engines, operators and time itself may want to do to a cache.

An intent is drawn before it is known what there is, and becomes an operation when its turn comes: nothing that is drawn
depends on the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hypothesis import strategies as st

from services.kvcache.cache.opening import Opening
from services.kvcache.eviction.retention import Retention
from tests.kvcache.cache.demands import Step, fork, opening
from tests.kvcache.cache.stateful.model import SIZE, Key, Model, ModelSequence
from tests.kvcache.cache.stateful.transactions import (
    Allocate,
    Append,
    Close,
    Damage,
    Evict,
    Expire,
    Get,
    Kill,
    Operation,
    PassTime,
    Release,
    Remove,
    Renew,
    Sweep,
    can_be_seen,
)

if TYPE_CHECKING:
    from tests.kvcache.cache.stateful.machine import CacheMachine

#: Prompts are prefixes of these, so that sequences meet, part, and compute the same prefix at the same time.
TEXTS = [[0] * 40, [0] * 4 + [1] * 36, [0, 0, 1, 1] * 10]


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
    retention: Retention | None = None

    def operation(self, machine: CacheMachine) -> Operation | None:
        session = machine.session(self.at)
        return None if session is None else Allocate(session, (self.demand(machine, session),))

    def demand(self, machine: CacheMachine, session: str) -> Opening:
        key, text = machine.new_key(session), TEXTS[self.text]
        machine.model.texts[key] = text
        return opening(key[1], text[: self.length], self.pages, self.salt, self.retention)


@dataclass(frozen=True)
class Part:
    """What one sequence does in a step."""

    which: int
    count: int  # tokens that it ran
    more: int  # pages
    overlap: int  # tokens told again

    def demand(self, sequence: ModelSequence, model: Model) -> Step:
        held, resident = len(sequence.pages), len(sequence.tokens)
        # No engine writes into a tail that it knows to be shared.
        room = 0 if model.shares_tail(sequence) else held * SIZE - resident
        start = max(0, resident - self.overlap)
        tokens = sequence.tokens[start:] + sequence.ahead(min(self.count, room))
        return Step(sequence.key[1], start, tuple(tokens), held + self.more, held)


@dataclass(frozen=True)
class StepTogether:
    """Of several sequences of one session in one call, which may remove others, and open some in between."""

    at: int
    parts: list[Part]
    remove: int
    opening: OpenSequence | None = None
    fork: ForkInStep | None = None
    opens_behind: int = 4  # so many parts

    def operation(self, machine: CacheMachine) -> Operation | None:
        first = machine.sequence(self.at)
        if first is None:
            return None
        session, mine = first.key[0], machine.model.of_session(first.key[0])
        removed = tuple(sequence.key[1] for sequence in mine[self.remove : self.remove + 1])
        steps = dict[str, Step]()
        for part in self.parts:
            sequence = mine[part.which % len(mine)]
            if sequence.key[1] not in steps:
                steps[sequence.key[1]] = part.demand(sequence, machine.model)
        opened = () if self.opening is None else (self.opening.demand(machine, session),)
        if self.fork is not None:
            opened = (self.fork.demand(machine, mine), *opened)
        before, behind = [*steps.values()][: self.opens_behind], [*steps.values()][self.opens_behind :]
        return Allocate(session, (*before, *opened, *behind), removed)


@dataclass(frozen=True)
class ForkInStep:
    """A demand that forks a sequence of its session, and asks for room at once."""

    which: int
    turn: bool
    more: int  # pages beyond those that it shares

    def demand(self, machine: CacheMachine, mine: list[ModelSequence]) -> Opening:
        parent = mine[self.which % len(mine)]
        child = machine.new_key(parent.key[0])
        machine.model.turns[child] = self.turn
        pages = -(-len(parent.tokens) // SIZE) + self.more
        return fork(child[1], parent.key[1], pages if self.more else 0)


@dataclass(frozen=True)
class Report:
    at: int
    count: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        sequence = machine.sequence(self.at)
        if sequence is None:
            return None
        room = len(sequence.pages) * SIZE - len(sequence.tokens)
        tokens = tuple(sequence.ahead(min(self.count, room)))
        return report(sequence.key, len(sequence.tokens), tokens)


@dataclass(frozen=True)
class Misreport:
    """Tokens that leave a gap, overrun the pages or contradict the record."""

    at: int
    flip: int

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
        return report(sequence.key, start, tokens)


def report(key: Key, start: int, tokens: tuple[int, ...]) -> Append:
    return Append(key[0], (Step(key[1], start, tokens),))


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
        return Allocate(parent.key[0], (fork(child[1], parent.key[1]),))


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
        session, name = gone[self.at % len(gone)] if gone and self.how < 6 else (session, "never")
        return [
            Allocate(session, (opening(name, [1, 2, 3], 1),)),
            Allocate(session, (Step(name, 0, (1,), 1),)),
            Allocate(session, (fork("never-two", name, 1),)),
            report((session, name), 0, (1,)),
            Get(session, name),
            Allocate(session, (Step(name, 0, (), 1),)),
            Allocate(session, (fork("never-too", name),)),
            report((session, name), 0, ()),
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
class CloseLost:
    """The engine comes back, and closes what it lost."""

    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        lost = [*machine.model.lost]
        return Close(lost[self.at % len(lost)]) if lost else None


@dataclass(frozen=True)
class ReleaseLost:
    """Of one that is lost, or not."""

    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        named = [*machine.model.lost, *machine.model.sessions]
        return Release(named[self.at % len(named)]) if named else None


@dataclass(frozen=True)
class KillProcess:
    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        model = machine.model
        pids = [lease.pid for lease in model.sessions.values()] + [pid for pid, _ in model.lost.values()]
        seen = [pid for pid in pids if pid is not None and can_be_seen(pid)]
        return Kill(seen[self.at % len(seen)]) if seen else None


@dataclass(frozen=True)
class DamagePage:
    """Bytes of a page change under everybody."""

    at: int

    def operation(self, machine: CacheMachine) -> Operation | None:
        published = [page for page, model in machine.model.pages.items() if model.link is not None]
        return Damage(published[self.at % len(published)]) if published else None


@dataclass(frozen=True)
class Do:
    """Of an operator, or of time itself."""

    what: Operation

    def operation(self, machine: CacheMachine) -> Operation | None:
        return self.what


which = st.integers(0, 11)
#: Their times run out exactly when time is looked at, or outlive what is cached.
retentions = st.none() | st.builds(Retention, st.sampled_from([1.0, 10.0, 20.0, 200.0]), st.sampled_from([1, 50]))
opens = st.builds(
    OpenSequence,
    *(which, st.sampled_from(["", "s"]), st.integers(0, 2), st.integers(1, 13), st.integers(0, 5), retentions),
)
parts = st.builds(Part, which, st.integers(0, 9), st.integers(0, 2), st.integers(0, 3))
forks_in_steps = st.builds(ForkInStep, which, st.booleans(), st.integers(0, 2))
steps = st.builds(
    StepTogether,
    *(which, st.lists(parts, min_size=1, max_size=4), st.integers(0, 20), st.none() | opens),
    *(st.none() | st.none() | forks_in_steps, st.integers(0, 4)),
)
reports = st.builds(Report, which, st.integers(1, 5))
misreports = st.builds(Misreport, which, st.integers(0, 8))
forks = st.builds(ForkSequence, which, st.booleans())
removals = st.builds(RemoveSequence, which)
looks = st.builds(LookAt, which)
late_uses = st.builds(UseRemoved, which, st.integers(0, 8))
renewals = st.builds(RenewLease, which)
endings = st.one_of(
    st.builds(CloseSession, which),
    st.builds(CloseLost, which),
    st.builds(ReleaseLost, which),
    st.builds(KillProcess, which),
    st.builds(Do, st.builds(Evict, st.integers(0, 3), st.booleans())),
    st.builds(Do, st.builds(Expire, st.sampled_from([0.0, 1.0, 2.0, 10.0, 100.0]))),
)
#: They add up to the ttl of a lease, to a drain and to the ttl of a cached page exactly.
times = st.builds(Do, st.builds(PassTime, st.sampled_from([1.0, 1.0, 10.0, 10.0, 20.0, 60.0])))
damages = st.builds(DamagePage, which)
sweeps = st.builds(Do, st.just(Sweep()))

anything = st.one_of(
    *(opens, steps, steps, steps, reports, misreports, forks, removals, looks, late_uses, renewals),
    *(endings, times, sweeps),
)
