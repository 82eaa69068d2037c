"""Sessions: each is an engine's lease on a pool, with a deadline and a witness of its process."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.common.errors import SequenceRemoved, SequenceUnknown, SessionExpired, SessionNotAttached
from services.kvcache import slices
from services.kvcache.lease.witness import Process, Witness
from services.kvcache.pool.host_memory import (
    REMOVED,
    SEQUENCE,
    HostMemory,
    is_sparse,
    removed_bytes,
    sequence_bytes,
    text_bytes,
    texts_bytes,
)
from services.kvcache.pool.sequence import Sequence

#: Removed sequence ids that a session remembers, so that a late or replayed call cannot recreate one. A call that is
#: this many removals late would have passed its deadline long ago.
REMEMBERED_REMOVALS = 65536


@dataclass(slots=True, eq=False)
class Session:
    """One engine's lease on one pool, and its sequences. Times are seconds of the cache's clock.

    ``process`` is what the engine said; ``witness`` is of that process, and None if it cannot be seen or is not the
    caller's. ``uid`` is the user that the caller was proven to be, and so the process; None if nobody proved it.
    """

    id: str  # a secret: its owner, presenting it, acts as the session
    client_name: str
    owner: str  # the identity that opened it
    pool_id: str
    ttl_s: float
    deadline: float
    process: Process | None
    canary: bytes
    canary_slot: int
    max_sequences: int
    attach_by: float  # without an attachment by then, it ends
    max_pages: int | None = None
    share_pages: int | None = None  # as max_pages, while another identity waits for pages
    expired: int = 0  # sequences that were ended without its engine, which has not removed them yet
    witness: Witness | None = None
    uid: int | None = None
    attached: bool = False
    attach_until: float = 0.0  # until it attaches to GPU memory, other sessions wait for it up to this time
    sequences: dict[str, Sequence] = field(default_factory=dict)
    removed: OrderedDict[str, None] = field(default_factory=OrderedDict)
    held_pages: int = 0  # counted against the quota: the sum of its sequences' page_count
    memory: HostMemory = field(default_factory=HostMemory)
    entry_bytes: int = 0  # what it is charged for each of the held pages
    ids_bytes: int = 0  # what it is charged for sequences without their pages, and for removed ids
    engine_name: str = ""  # of the replica, and the model it serves: what KV events name it by
    model: str = ""
    prefill_tokens_per_s: float = 0.0  # as its engine measured it last; 0 until it has
    calls: int = 0  # under way, in slices: its lease does not run out meanwhile

    @property
    def handle(self) -> str:
        """What people call it by. It names the session, and nobody can act with it."""
        return hashlib.blake2b(self.id.encode(), digest_size=6, person=b"rocmforge.handle").hexdigest()

    @property
    def pid(self) -> int | None:
        """The pid of its process, if the daemon sees that process under it."""
        return self.process.pid if self.process is not None and self.witness is not None else None

    def is_gone(self) -> bool:
        """Whether its process is proven gone."""
        return self.witness is not None and self.witness.gone()

    def let_go(self) -> None:
        """Close its witness: what becomes of the process is of no more interest."""
        if self.witness is not None:
            self.witness.close()

    def renew(self, now: float) -> None:
        """Extend the deadline to one TTL from now, but never that for attaching."""
        self.deadline = now + self.ttl_s if self.attached else min(now + self.ttl_s, self.attach_by)

    def require_attached(self) -> None:
        """Raises SessionNotAttached."""
        if not self.attached:
            raise SessionNotAttached(f"session {self.handle} has not called AttachSession yet")

    def find(self, sequence_id: str) -> Sequence | None:
        """The live sequence; None for an unused id, which may be opened. Raises SequenceRemoved."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None and sequence_id in self.removed:
            raise SequenceRemoved(f"sequence {sequence_id!r} was removed; open another id", sequence_id=sequence_id)
        return sequence

    def is_new(self, sequence_id: str) -> bool:
        """Whether a sequence may be opened with this id, as far as ids and their number go."""
        unused = sequence_id not in self.sequences and sequence_id not in self.removed
        return unused and len(self.sequences) + self.expired < self.max_sequences

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
        """Add a new sequence, which holds no pages yet."""
        self.sequences[sequence.id] = sequence
        self._charge(sequence_bytes(sequence.id, sequence.salt))

    def take_back(self, sequence: Sequence) -> None:
        """Undo that a sequence was added and holds pages: its id was never used."""
        del self.sequences[sequence.id]
        self.hold(-sequence.page_count)
        self._charge(-sequence_bytes(sequence.id, sequence.salt))

    def hold(self, more: int) -> None:
        """Count so many pages more, which its sequences hold now."""
        self.held_pages += more
        self.memory.used += more * self.entry_bytes

    def _charge(self, more: int) -> None:
        self.ids_bytes += more
        self.memory.used += more

    def end(self) -> None:
        """Forget all sequences and all ids: nobody can name them any more."""
        self.sequences = {}  # those that there were may be the pool's now
        self.removed.clear()
        self.hold(-self.held_pages)
        self._charge(-self.ids_bytes)

    def walk_charges(self) -> Iterator[str | None]:
        """Whether it is charged what its sequences without their pages, and its removed ids, cost; None now and then.

        It may change meanwhile: which there are is of one moment, and neither an id nor a salt ever changes.
        """
        # As a plain dict, whose keys are found much faster, if in no order.
        charged, live, removed = self.ids_bytes, list(self.sequences.values()), list(dict.keys(self.removed))
        costs = SEQUENCE * len(live) + REMOVED * len(removed)
        for at in range(0, max(len(live), len(removed)), slices.ENTRIES):
            yield None
            some = live[at : at + slices.ENTRIES]
            costs += texts_bytes([sequence.id for sequence in some]) + texts_bytes([one.salt for one in some])
            costs += texts_bytes(removed[at : at + slices.ENTRIES])
        if costs != charged:
            yield f"session {self.handle} is charged {charged} bytes for ids, they cost {costs}"

    def check_forget(self, sequence_ids: list[str]) -> None:
        """Whether the daemon's own memory has room to remember those ids that are new. Raises HostMemoryExceeded; never
        for live sequences, which cost more than their ids do.
        """
        unknown = [name for name in sequence_ids if name not in self.sequences and name not in self.removed]
        if unknown:
            self.memory.check(sum(map(removed_bytes, unknown)), f"to remember {len(unknown)} removed ids")

    def forget(self, sequence_ids: list[str]) -> list[Sequence | None]:
        """Remove sequences for good: their ids cannot be opened again in this session, whether they were live or not.

        Returns, for each id, the sequence if it was live, else None.
        """
        removed, pop, found = self.removed, self.sequences.pop, list[Sequence | None]()
        pages = charge = 0
        for sequence_id in sequence_ids:
            sequence = pop(sequence_id, None)
            found.append(sequence)
            if sequence is not None:
                pages += len(sequence.pages) if sequence.copy is None else sequence.page_count
                charge += REMOVED - SEQUENCE - text_bytes(sequence.salt)
            elif sequence_id in removed:
                removed.move_to_end(sequence_id)
                continue
            else:
                charge += removed_bytes(sequence_id)
            removed[sequence_id] = None
            if len(removed) > REMEMBERED_REMOVALS:
                charge -= removed_bytes(removed.popitem(last=False)[0])
        self.hold(-pages)
        self._charge(charge)
        if is_sparse(self.sequences):
            self.sequences = dict(self.sequences)
        return found


class Sessions:
    """Live sessions by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> None:
        """Add a session."""
        self._by_id[session.id] = session

    def find(self, session_id: str, caller: str) -> Session | None:
        """The live session of a caller, which is not renewed by that; None if it has none with this id."""
        session = self._by_id.get(session_id)
        return session if session is not None and session.owner == caller else None

    def use(self, session_id: str, caller: str, now: float) -> Session:
        """The live session of a caller, renewed. Raises SessionExpired: a call never revives a session past its
        deadline, and who does not own one cannot tell it from one that never was.
        """
        session = self._by_id.get(session_id)
        if session is None or session.owner != caller or session.deadline <= now:
            raise SessionExpired("the session has ended or belongs to an earlier run of the daemon; open a new one")
        session.renew(now)
        return session

    def by_id(self, session_id: str) -> Session:
        """A live session. Raises KeyError."""
        return self._by_id[session_id]

    def pop(self, session_id: str, caller: str) -> Session | None:
        """Remove and return a session of a caller; None if it has none with this id."""
        return self._by_id.pop(session_id) if self.find(session_id, caller) is not None else None

    def named(self, handle: str) -> Session | None:
        """The session with a handle, for people who ask; looks at each."""
        return next((session for session in self._by_id.values() if session.handle == handle), None)

    def of(self, owner: str) -> list[Session]:
        """The sessions of an identity."""
        return [session for session in self._by_id.values() if session.owner == owner]

    def all(self) -> list[Session]:
        """All sessions, in the order they were opened."""
        return list(self._by_id.values())
