"""What engines ask of their sequences: a step's call, and looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from services.common.errors import CapacityExceeded, HostMemoryExceeded, QuotaExceeded, ServiceError, SessionExpired
from services.kvcache import slices
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening, open_sequence
from services.kvcache.cache.shares import Shares
from services.kvcache.cache.steps import Steps, advance
from services.kvcache.lease.quarantine import Quarantine
from services.kvcache.lease.sessions import Session, Sessions
from services.kvcache.pool.budget import Pools
from services.kvcache.pool.debts import Debts
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence
from services.kvcache.slices import Job, Result, Work, finish


class Calls:
    """The calls that name a session and its sequences. Each is one transaction, or work in slices, on the state of the
    `KvCache` that has it.
    """

    def __init__(
        self,
        sessions: Sessions,
        pools: Pools,
        quarantine: Quarantine,
        debts: Debts,
        shares: Shares,
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._pools = pools
        self._quarantine = quarantine
        self._debts = debts
        self._shares = shares
        self._clock = clock

    def use(self, session_id: str, caller: str) -> Session:
        """The live session of a caller, whose lease a call extends. Raises SessionExpired."""
        now = self._clock()
        session = self._sessions.use(session_id, caller, now)
        pool = self._pools[session.pool_id]
        pool.last_used = now
        pool.table.cached.pass_time(now, slices.ENTRIES)
        return session

    def allocate(
        self,
        session_id: str,
        demands: Iterable[Steps | Opening],
        removed: list[str],
        caller: str = "",
        speed: float = 0.0,
    ) -> tuple[list[tuple[str, Grant | ServiceError]], Pool]:
        """The step call: remove, then serve the demands in order. One that fails changes nothing. ``speed`` is how many
        tokens a second the engine prefills, 0 if it does not say.

        Returns, by sequence id, what each opening was granted or why it was not, and of steps what there is to hear:
        pages, copies and errors. Raises SessionExpired, SessionNotAttached, and HostMemoryExceeded for removed ids.
        """
        return finish(self.allocating(session_id, demands, removed, caller, speed), self._clock)

    def allocating(
        self,
        session_id: str,
        demands: Iterable[Steps | Opening],
        removed: list[str],
        caller: str = "",
        speed: float = 0.0,
    ) -> Work[tuple[list[tuple[str, Grant | ServiceError]], Pool]]:
        """As ``allocate``, in slices. Others run between two demands, and of a long one between its pages."""
        session, pool = self._use_attached(session_id, caller)
        if speed:
            session.prefill_tokens_per_s = speed
        session.share_pages = self._shares.most(session, pool, self._clock()) if pool.waiting else None
        work = self._serving(session, pool, demands, removed)
        try:
            job = next(work)
        except StopIteration as end:  # as of nearly every step, of which a layer more would show
            answers: list[tuple[str, Grant | ServiceError]] = end.value
            return answers, pool
        return (yield from self._in_session(session, work, job)), pool

    def _serving(
        self, session: Session, pool: Pool, demands: Iterable[Steps | Opening], removed: list[str]
    ) -> Work[list[tuple[str, Grant | ServiceError]]]:
        if removed:
            yield from self._removing(session, removed)
        now, answers, spent = self._clock(), list[tuple[str, Grant | ServiceError]](), 0
        for demand in demands:
            if isinstance(demand, Steps):
                answers += yield from advance(session, pool, demand, now)
                continue
            answer: Grant | ServiceError | None = None
            if pool.lower is not None:
                answer = yield from self._looking(session, pool, demand)
                now = self._clock()
            if answer is None:
                answer = yield from open_sequence(session, pool, demand, now)
            answers.append((demand.sequence_id, answer))
            spent += 8 + (0 if isinstance(answer, ServiceError) else len(answer.pages))
            if spent >= slices.ENTRIES:
                spent, now = 0, (yield None)
        refused = [one for _, one in answers if isinstance(one, CapacityExceeded | QuotaExceeded)]
        if refused:
            pool.totals.refused_demands += len(refused)
            if any(isinstance(one, CapacityExceeded) for one in refused):
                self._shares.waits(session, pool, now)
        return answers

    @staticmethod
    def _looking(session: Session, pool: Pool, demand: Opening) -> Work[ServiceError | None]:
        """Why a sequence is not opened yet: pages of its prompt are better waited for than computed. Any other reason
        not to open it goes first.
        """
        prompt, lower = demand.origin, pool.lower
        if lower is None or isinstance(prompt, str) or not session.is_new(demand.sequence_id):
            return None
        speed = session.prefill_tokens_per_s
        return (
            yield from lower.look(session.id, demand.sequence_id, prompt.tokens, prompt.salt, demand.fill_wait_s, speed)
        )

    def append(self, session_id: str, steps: Steps, caller: str = "") -> list[tuple[str, ServiceError]]:
        """Record resident tokens and grow nothing; those whose report was refused, by id: it changed nothing.

        Raises SessionExpired, SessionNotAttached.
        """
        return finish(self.appending(session_id, steps, caller), self._clock)

    def appending(self, session_id: str, steps: Steps, caller: str = "") -> Work[list[tuple[str, ServiceError]]]:
        """As ``append``, in slices."""
        session, pool = self._use_attached(session_id, caller)
        work = advance(session, pool, steps, self._clock())
        try:
            job = next(work)
        except StopIteration as end:
            answers: list[tuple[str, Grant | ServiceError]] = end.value
        else:
            answers = yield from self._in_session(session, work, job)
        return [(name, error) for name, error in answers if isinstance(error, ServiceError)]

    def remove(self, session_id: str, sequence_ids: list[str], caller: str = "") -> tuple[list[bool], Pool]:
        """Remove sequences; whether each was there. Raises SessionExpired, HostMemoryExceeded."""
        return finish(self.removing(session_id, sequence_ids, caller), self._clock)

    def removing(self, session_id: str, sequence_ids: list[str], caller: str = "") -> Work[tuple[list[bool], Pool]]:
        """As ``remove``, in slices: the ids are removed at once, and then their pages are given up."""
        session = self.use(session_id, caller)
        pool = self._pools[session.pool_id]
        work = self._removing(session, sequence_ids)
        try:
            job = next(work)
        except StopIteration as end:
            found: list[bool] = end.value
            return found, pool
        return (yield from self._in_session(session, work, job)), pool

    def _removing(self, session: Session, sequence_ids: list[str]) -> Work[list[bool]]:
        while True:
            try:
                session.check_forget(sequence_ids)
                break
            except HostMemoryExceeded:
                if not self._debts:
                    raise
                self._debts.pay(self._clock())
                yield None
        now, held, owed = self._clock(), session.held_pages, len(self._debts)
        found = session.forget(sequence_ids)
        self._quarantine.vouch_for(session.id, sequence_ids, now)
        pool = self._pools[session.pool_id]
        pool.endings.end([sequence for sequence in found if sequence is not None], held - session.held_pages, now)
        if len(self._debts) > owed:
            yield from self._debts.paying()
        return [sequence is not None for sequence in found]

    def _in_session(self, session: Session, work: Work[Result], job: Job | None) -> Work[Result]:
        """The rest of the work of a session's call, which has begun. The lease does not run out meanwhile, and if the
        session ends, so does the work. Raises SessionExpired.
        """
        session.calls += 1
        try:
            while True:
                yield job
                if self._sessions.find(session.id, session.owner) is not session:
                    work.throw(SessionExpired("the session has ended; open a new one"))
                now = self._clock()
                session.renew(now)
                job = work.send(now)
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            session.calls -= 1
            work.close()

    def get_sequence(self, session_id: str, sequence_id: str, caller: str = "") -> tuple[Sequence, Session]:
        """One sequence; counts as an access to it. Raises SessionExpired, SequenceUnknown, SequenceRemoved."""
        session = self.use(session_id, caller)
        sequence = session.sequence(sequence_id)
        self._pools[session.pool_id].touch(sequence, self._clock())
        return sequence, session

    def sequences_of(
        self, session_id: str, start: int, most: int, caller: str = ""
    ) -> tuple[list[tuple[Sequence, Session]], bool]:
        """Sequences of the caller's session, in the order they were opened: those behind the first ``start``, at most
        so many, and whether there are more. Raises SessionExpired.
        """
        return self._listed([self.use(session_id, caller)], start, most)

    def list_sequences(self, handle: str | None, start: int, most: int) -> tuple[list[tuple[Sequence, Session]], bool]:
        """As `sequences_of`, of all sessions or of the one with a handle, which counts as no access to it. Raises
        SessionExpired if none has it.
        """
        return self._listed(self._sessions.all() if handle is None else [self._named(handle)], start, most)

    def inspect_sequence(self, handle: str, sequence_id: str) -> tuple[Sequence, Session]:
        """One sequence of the session with a handle; no access to it. Raises as `get_sequence` does."""
        session = self._named(handle)
        return session.sequence(sequence_id), session

    def _named(self, handle: str) -> Session:
        session = self._sessions.named(handle)
        if session is None:
            raise SessionExpired(f"no session has the handle {handle[:128]!r}", field="session_handle")
        return session

    @staticmethod
    def _listed(sessions: Iterable[Session], start: int, most: int) -> tuple[list[tuple[Sequence, Session]], bool]:
        listed: list[tuple[Sequence, Session]] = []
        for session in sessions:
            if start >= len(session.sequences):
                start -= len(session.sequences)
                continue
            some = islice(session.sequences.values(), start, start + most + 1 - len(listed))
            listed += [(sequence, session) for sequence in some]
            start = 0
            if len(listed) > most:
                return listed[:most], True
        return listed, False

    def _use_attached(self, session_id: str, caller: str) -> tuple[Session, Pool]:
        session = self.use(session_id, caller)
        session.require_attached()
        return session, self._pools[session.pool_id]
