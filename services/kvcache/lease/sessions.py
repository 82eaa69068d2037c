"""Leases: who may use the cache, until when, and what is known of their process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from services.common.errors import SequenceRemoved, SequenceUnknown, SessionExpired, SessionNotAttached
from services.kvcache.pool.sequence import Sequence

#: Removed ids a session remembers, so that a late or replayed call cannot bring one back. A call this many removals
#: late would have outlived its deadline long ago.
REMEMBERED_REMOVALS = 65536


@dataclass(frozen=True, slots=True)
class Process:
    """An engine's process; ``start_time`` in clock ticks after boot tells it from a later one with the same pid."""

    pid: int
    start_time: int
    pid_namespace: str


@dataclass(slots=True, eq=False)
class Session:
    """One engine's lease on one pool, and its sequences. Times are seconds of the cache's clock."""

    id: str
    client_name: str
    pool_id: str
    ttl_s: float
    deadline: float
    process: Process | None
    canary: bytes
    canary_slot: int
    max_sequences: int
    max_pages: int | None = None
    attached: bool = False
    attach_until: float = 0.0  # while it has not attached to GPU memory, others wait for it until then
    sequences: dict[str, Sequence] = field(default_factory=dict)
    removed: OrderedDict[str, None] = field(default_factory=OrderedDict)
    held_pages: int = 0  # what the quota counts: the sum of its sequences' page_count

    def renew(self, now: float) -> None:
        """Move the deadline to a ttl from now."""
        self.deadline = now + self.ttl_s

    def require_attached(self) -> None:
        """Raises SessionNotAttached."""
        if not self.attached:
            raise SessionNotAttached(f"session {self.id[:12]}… has not called AttachSession yet")

    def find(self, sequence_id: str) -> Sequence | None:
        """The live sequence; None for an id never seen, which may be opened. Raises SequenceRemoved."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None and sequence_id in self.removed:
            raise SequenceRemoved(f"sequence {sequence_id!r} was removed; open another id", sequence_id=sequence_id)
        return sequence

    def sequence(self, sequence_id: str) -> Sequence:
        """The live sequence. Raises SequenceRemoved or SequenceUnknown."""
        sequence = self.find(sequence_id)
        if sequence is None:
            raise self.unknown(sequence_id)
        return sequence

    @staticmethod
    def unknown(sequence_id: str) -> SequenceUnknown:
        """The error for an id that was never opened."""
        return SequenceUnknown(f"no sequence {sequence_id!r} in this session", sequence_id=sequence_id)

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence, which holds nothing yet."""
        self.sequences[sequence.id] = sequence

    def forget(self, sequence_ids: list[str]) -> list[Sequence | None]:
        """Take sequences out for good: their ids never open again in this session, whether they were live or not.

        Returns those that were live, None for each other id.
        """
        removed, pop, found = self.removed, self.sequences.pop, list[Sequence | None]()
        for sequence_id in sequence_ids:
            sequence = pop(sequence_id, None)
            found.append(sequence)
            if sequence is not None:
                self.held_pages -= len(sequence.pages) if sequence.copy is None else sequence.page_count
            elif sequence_id in removed:
                removed.move_to_end(sequence_id)
                continue
            removed[sequence_id] = None
            if len(removed) > REMEMBERED_REMOVALS:
                removed.popitem(last=False)
        return found


class Sessions:
    """Live sessions by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> None:
        """Make a session known."""
        self._by_id[session.id] = session

    def use(self, session_id: str, now: float) -> Session:
        """The live session, renewed. Raises SessionExpired; one whose deadline passed is never revived by a call."""
        session = self._by_id.get(session_id)
        if session is None or session.deadline <= now:
            raise SessionExpired("the session ended or belongs to an earlier run of the daemon; open a new one")
        session.renew(now)
        return session

    def pop(self, session_id: str) -> Session | None:
        """Take a session out."""
        return self._by_id.pop(session_id, None)

    def all(self) -> list[Session]:
        """In the order they were opened."""
        return list(self._by_id.values())
