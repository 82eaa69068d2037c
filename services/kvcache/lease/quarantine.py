"""Quarantine for pages that a lost session may still write, and for pools whose memory it may still map.

An engine that lost its lease may have a step in flight, or may be stopped in the middle of one and go on in an hour,
and the daemon cannot unmap its memory. Its unfinished pages wait here, and no time that passes frees one. It takes
evidence that nothing writes it any more:

- the process is proven gone;
- the engine vouches, by closing the lost session once its last step is over;
- an operator vouches, for a process that the daemon cannot see.

The engine of an expired sequence has its lease, and says what it computes. So such a sequence also keeps the pages that
its engine reads, until that removes it or the session is over: one that is lost uses no result.

With ``--fence=kill`` the daemon itself sees to the first. Until then the pool's memory is kept too: on a GPU, freeing
memory that another process has mapped is undefined behaviour.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

import structlog

from services.common.errors import EngineAlive, QuarantineUnknown
from services.kvcache.lease.sessions import Session
from services.kvcache.lease.witness import Process
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence, entries_of
from services.kvcache.slices import Work

log = structlog.get_logger()

#: What becomes of a lost session whose process outlives the drain: its pages wait for it, or it is killed.
WAIT, KILL = "wait", "kill"
FENCES = (WAIT, KILL)

#: The key of what a session held when it was lost; no sequence has this id.
_HELD = ""


class Fence(enum.Enum):
    """What a lost session waits for."""

    DRAINING = enum.auto()  # it was lost a moment ago: its engine may just be slow
    ALIVE = enum.auto()  # its process is alive: for the end of that, or its word
    UNSEEN = enum.auto()  # its process cannot be seen from here: for its word, or an operator's
    KILLED = enum.auto()  # it was killed, and is not gone yet


@dataclass(slots=True, eq=False)
class Record:
    """What one session may still write: pages by the sequence that left them, and the pool's memory, mapped.

    ``lost_at`` is None while the session lives and some of its sequences were ``expired``, by id.
    """

    session: Session
    pool: Pool
    left: dict[str, list[int]] = field(default_factory=dict)
    expired: dict[str, Sequence] = field(default_factory=dict)
    lost_at: float | None = None
    kept: int = 0  # the pages of both
    overdue: bool = False
    killed: bool = False
    over: bool = False

    @property
    def pages(self) -> list[int]:
        """All pages, in the order they were left."""
        return list(chain.from_iterable(self.left.values()))

    def keep(self, pages: list[int]) -> bool:
        """Keep pages that the lost session held. False if it is known by now that nothing writes them."""
        if not self.over:
            self.left.setdefault(_HELD, []).extend(pages)
            self.kept += len(pages)
        return not self.over

    @property
    def page_count(self) -> int:
        """How many pages it keeps."""
        return sum(map(len, self.left.values()))

    def miscounted(self) -> Iterator[str]:
        """Whether it counts other pages, or expired sequences, than it has."""
        kept = self.page_count + entries_of(self.expired.values())
        if kept != self.kept:
            yield f"session {self.session.handle} is said to keep {self.kept} pages, it keeps {kept}"
        expired = self.session.expired if self.lost_at is None else 0
        if expired != len(self.expired):
            yield f"session {self.session.handle} counts {expired} expired sequences of {len(self.expired)}"

    @property
    def fence(self) -> Fence:
        """What it waits for, once its session is lost."""
        if self.killed:
            return Fence.KILLED
        if not self.overdue:
            return Fence.DRAINING
        return Fence.UNSEEN if self.session.witness is None else Fence.ALIVE


class Quarantine:
    """One record for each session that left pages, or may have memory mapped. Times are seconds of the cache's clock.

    ``drain_s`` is how long a lost session may stay silent before it counts as fenced: it is reported then and, if
    ``fence`` is kill, killed.
    """

    def __init__(self, drain_s: float, fence: str = WAIT) -> None:
        self.set_fence(drain_s, fence)
        self._records: dict[str, Record] = {}
        self.killed = 0

    def set_fence(self, drain_s: float, fence: str) -> None:
        """Go by these from the next sweep on, for those that are lost already too."""
        self._drain_s = drain_s
        self._kills = fence == KILL

    def has(self, session_id: str, owner: str) -> bool:
        """Whether an identity has a session with this id here."""
        record = self._records.get(session_id)
        return record is not None and record.session.owner == owner

    def kept_by(self, owner: str, pool: Pool) -> int:
        """How many pages of a pool the lost sessions and expired sequences of an identity keep."""
        records = self._records.values()
        return sum(record.kept for record in records if record.pool is pool and record.session.owner == owner)

    def lost_of(self, owner: str) -> int:
        """The lost sessions of an identity."""
        return sum(record.session.owner == owner for record in self.lost())

    def holds_of(self, owner: str) -> bool:
        """Whether anything of an identity is here."""
        return any(record.session.owner == owner for record in self._records.values())

    def __len__(self) -> int:
        """Lost sessions."""
        return sum(record.lost_at is not None for record in self._records.values())

    def lost(self) -> Iterator[Record]:
        """The lost sessions, in the order in which they left their first pages."""
        return (record for record in self._records.values() if record.lost_at is not None)

    def expire(self, session: Session, pool: Pool, sequence: Sequence) -> Work[None]:
        """End a live session's sequence, whose engine may still read and write its pages; in slices, if it has many."""
        record = self._record(session, pool)
        record.expired[sequence.id] = sequence
        record.kept += sequence.page_count
        session.expired += 1
        pool.endings.expire(sequence)
        at = sequence.published
        while at < len(sequence.pages) and record.expired.get(sequence.id) is sequence:
            own, at = pool.endings.fence_expired(sequence, at)
            if own:
                record.left.setdefault(sequence.id, []).extend(own)
            if at < len(sequence.pages):
                yield None

    def lose(self, session: Session, pool: Pool, now: float) -> None:
        """A session is lost, with its sequences and all that it left before."""
        # The handle of a GPU's memory is opened before a session attaches, so that any may have it mapped.
        mapped = session.attached or pool.arena.device is not None
        if session.sequences or mapped or session.id in self._records:
            record = self._record(session, pool)
            record.lost_at = now
            pool.endings.end_session(session.id, session.sequences, session.held_pages, now, record.keep)
            expired = list(record.expired.values())
            record.expired.clear()
            record.kept -= sum(sequence.page_count for sequence in expired)
            pool.endings.end_expired(expired, now, record.keep)
        else:
            session.let_go()

    def _record(self, session: Session, pool: Pool) -> Record:
        return self._records.setdefault(session.id, Record(session, pool))

    def vouch(self, session_id: str, caller: str, now: float) -> bool:
        """The engine touches no page of this session of the caller any more, live or lost; whether there was anything
        of it here.
        """
        record = self._records.get(session_id)
        if record is None or record.session.owner != caller:
            return False
        self._release_expired(record, [*record.expired], now)
        self._end(record, "vouched")
        return True

    def vouch_for(self, session_id: str, sequence_ids: list[str], now: float) -> None:
        """The engine touches no page of these sequences any more, which were ended without it."""
        record = self._records.get(session_id)
        if record is None:
            return
        left = [record.left.pop(name) for name in sequence_ids if name in record.left]
        record.kept -= sum(map(len, left))
        record.pool.endings.unquarantine(list(chain.from_iterable(left)))
        self._release_expired(record, sequence_ids, now)
        if record.lost_at is None and not record.expired:
            del self._records[session_id]

    @staticmethod
    def _release_expired(record: Record, sequence_ids: list[str], now: float) -> None:
        expired = [record.expired.pop(name) for name in sequence_ids if name in record.expired]
        if expired:
            record.kept -= sum(sequence.page_count for sequence in expired)
            record.session.expired -= len(expired)
            record.pool.endings.end_expired(expired, now)

    def release(self, handle: str) -> int:
        """An operator vouches for a lost session; how many pages that frees. Raises QuarantineUnknown, EngineAlive."""
        record = next((record for record in self.lost() if record.session.handle == handle), None)
        if record is None:
            raise QuarantineUnknown(f"no lost session {handle[:64]!r} is in quarantine", field="session_handle")
        witness = record.session.witness
        if witness is not None and not witness.gone():
            pid = record.session.pid
            raise EngineAlive(
                f"session {handle}: its process {pid} is alive and may write its pages; end the process, and they "
                "come back by themselves",
                field="session_handle",
                pid=pid,
            )
        count = record.page_count
        self._end(record, "released")
        return count

    def sweep(self, now: float, busy: Collection[Process]) -> None:
        """Free what nothing can write any more, and see to those that stay silent. ``busy`` processes have a session:
        whatever became of an earlier one, they are at work, and not killed.
        """
        for record in [*self.lost()]:
            session, witness = record.session, record.session.witness
            if witness is not None and witness.gone():
                self._end(record, "gone")
            elif record.lost_at is not None and now - record.lost_at >= self._drain_s:
                if witness is None and not record.left and record.pool.arena.device is None:
                    # A mapped file outlives its removal: no other engine gets this memory by it.
                    self._end(record, "drained")
                    continue
                if not record.overdue:
                    record.overdue = True
                    log.warning("engine_fenced", fence=record.fence.name.lower(), **_facts(record))
                if self._kills and not record.killed and session.process not in busy:
                    self._kill(record)

    def _kill(self, record: Record) -> None:
        session, witness = record.session, record.session.witness
        # A caller of another user could name any process; whose identity is known was compared with the process.
        if witness is None or not (witness.own or session.uid is not None):
            return
        record.killed = witness.kill()
        if record.killed:
            self.killed += 1
            log.warning("engine_killed", **_facts(record))

    def _end(self, record: Record, why: str) -> None:
        del self._records[record.session.id]
        record.over = True
        record.pool.endings.unquarantine(record.pages)
        if record.overdue:
            log.info("engine_fence_over", why=why, **_facts(record))
        if record.lost_at is not None:
            record.session.let_go()

    def waits_for(self, pool: Pool) -> bool:
        """Whether a process may still map or write the pool's memory."""
        return any(record.pool is pool for record in self._records.values())

    def records(self, pool: Pool) -> list[Record]:
        """The records of a pool."""
        return [record for record in self._records.values() if record.pool is pool]

    def close(self) -> None:
        """Let go of all processes."""
        for record in self._records.values():
            record.session.let_go()


def _facts(record: Record) -> dict[str, object]:
    session = record.session
    return {
        "session": session.handle,
        "client": session.client_name,
        "pool": record.pool.id,
        "pid": session.pid,
        "pages": record.page_count,
    }
