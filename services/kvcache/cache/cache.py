"""The state of the daemon, and the only place that changes it.

One ``KvCache`` is owned by one asyncio loop. Every public method is one transaction: it runs to its end without
waiting for anything, so there is nothing to lock. Clients are trusted with no index, no size and no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import islice, takewhile

from services.common.errors import (
    AttachBusy,
    AttachMismatch,
    CapacityExceeded,
    FieldInvalid,
    PoolInUse,
    QuotaExceeded,
    ServiceError,
    SessionExpired,
    TooManySessions,
)
from services.kvcache.cache.explain import PageAnswer, explain
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening, Prompt, check_prompt, open_sequence
from services.kvcache.cache.steps import Steps, advance
from services.kvcache.lease.quarantine import WAIT, Quarantine
from services.kvcache.lease.sessions import Session, Sessions
from services.kvcache.lease.witness import Observe, Process
from services.kvcache.pool.budget import CANARY_BYTES, Allotment, ArenaMaker, Pools
from services.kvcache.pool.events import EventRing
from services.kvcache.pool.host_memory import HostMemory
from services.kvcache.pool.layout import Layout
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.prefix_cache import ChainHash, blake2b_chain
from services.kvcache.pool.sequence import Sequence

MIN_TTL_S, MAX_TTL_S = 1.0, 600.0

#: A session has the way to GPU memory for itself until it has attached, and for so long at most: ROCm itself gives an
#: open 10 s. Opens from several processes at a time are not to be relied on.
ATTACH_S = 10.0

#: The uid of a process that was gone when it was first looked at.
NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the daemon may use and how long it waits. Bytes, pages, seconds."""

    budget_bytes: int
    host_memory: int = 1 << 30
    pool_pages: int | None = None
    default_ttl_s: float = 10.0
    drain_s: float = 30.0
    fence: str = WAIT
    cache_ttl_s: float | None = None
    eviction: str = "lru"
    retained_share: float = 0.5
    max_sessions: int = 256
    identity_sessions: int = 64
    identity_unattached: int = 8
    identity_pools: int = 16
    identity_share: float = 1.0
    max_sequences: int = 65536
    sequence_ttl_s: float | None = None
    event_ring: int = 65536
    checksums: bool = True
    verify_share: float = 0.01
    zero_pages: bool = False


class KvCache:
    """Sessions, pools and what is quarantined.

    ``random_bytes`` makes session ids and canaries; ``clock`` is monotonic, in seconds; ``make_arena`` and
    ``observe`` are the ways to memory and to the process table. ``devices`` is how many GPUs there are to put pools
    on; with None pools are in the host's memory. ``wake`` is called when there is work for ``scrubber``.

    Raises InvalidConfiguration when ``host_memory`` is less than what is charged from the start.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        epoch: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        make_arena: ArenaMaker,
        observe: Observe,
        chain_hash: ChainHash = blake2b_chain,
        devices: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self._devices = devices
        self.epoch = epoch
        self.started_at = clock()
        self.opened_sessions = 0
        self.attach_turns = 0
        self.attach_refusals = 0
        self.expired_sessions = 0
        self.expired_sequences = 0
        self.memory = HostMemory(limits.host_memory)
        self.memory.reserve(limits.event_ring, limits.max_sessions)
        self.events = EventRing(limits.event_ring)
        self.pools = Pools(
            limits.budget_bytes,
            Allotment(limits.identity_pools, limits.identity_share),
            limits.pool_pages,
            limits.max_sessions,
            make_arena,
            chain_hash,
            self.events,
            limits.eviction,
            limits.retained_share,
            wake,
            checksums=limits.checksums,
            zero_pages=limits.zero_pages,
            memory=self.memory,
        )
        self._sessions = Sessions()
        self.quarantine = Quarantine(limits.drain_s, limits.fence)
        self._observe = observe
        self._clock = clock
        self._random_bytes = random_bytes
        #: Called when a session has attached or has ended.
        self.on_sessions: Callable[[], None] = lambda: None

    # --- sessions ---

    def open_session(
        self,
        client_name: str,
        pool_id: str,
        layout: Layout,
        *,
        pool_pages: int | None = None,
        max_pages: int | None = None,
        ttl_s: float | None = None,
        process: Process | None = None,
        uid: int | None = None,
        device: int | None = None,
        caller: str = "",
        private: bool = False,
        engine_name: str = "",
        model: str = "",
    ) -> Session:
        """A new session of the caller, on the pool, which is made if need be. The session's canary is in its arena
        then. A ``private`` pool is the caller's own: others that name it get another one. ``engine_name`` and ``model``
        are what KV events name it by.

        ``uid`` is the user that the caller was proven to be, if it was: a process of another is not taken for its.

        Raises FieldInvalid, LayoutMismatch, InvalidConfiguration, ExceedsBudget, ExceedsShare, TooManyPools,
        TooManySessions, HostMemoryExceeded, AttachBusy, GpuError.
        """
        ttl = self.limits.default_ttl_s if ttl_s is None else ttl_s
        if not MIN_TTL_S <= ttl <= MAX_TTL_S:
            raise FieldInvalid(f"ttl is {ttl:g} s; it must be {MIN_TTL_S:g} to {MAX_TTL_S:g} s", field="ttl")
        opened, lost = len(self._sessions), len(self.quarantine)
        if opened + lost >= self.limits.max_sessions:
            raise TooManySessions(
                f"{opened} sessions are open and {lost} lost ones in quarantine, the limit",
                limit=self.limits.max_sessions,
            )
        self._check_sessions_of(caller)
        if max_pages == 0:
            raise FieldInvalid("max_pages is 0; a session needs at least one page", field="max_pages")
        now = self._clock()
        self._check_device(device)
        self._check_turn(process, now)
        if private:
            pool_id = f"{pool_id}/{caller.replace('%', '%25').replace('/', '%2F')}"
        pool = self.pools.get_or_make(pool_id, layout, pool_pages, device, self._is_used, caller)
        pool.arena.admit(caller)
        taken = {session.canary_slot for session in self._sessions.all() if session.pool_id == pool.id}
        session = Session(
            id=f"{self.epoch:016x}-{self._random_bytes(16).hex()}",
            client_name=client_name,
            owner=caller,
            pool_id=pool.id,
            ttl_s=ttl,
            deadline=now + min(ttl, ATTACH_S),
            attach_by=now + ATTACH_S,
            process=process,
            canary=self._random_bytes(CANARY_BYTES),
            canary_slot=next(slot for slot in range(self.limits.max_sessions) if slot not in taken),
            max_sequences=self.limits.max_sequences,
            max_pages=max_pages,
            attach_until=now + ATTACH_S if device is not None else 0.0,
            uid=uid,
            memory=self.memory,
            entry_bytes=pool.entry_bytes,
            engine_name=engine_name,
            model=model,
        )
        pool.arena.write_canary(session.canary_slot, session.canary)
        session.witness = self._observe(process) if process is not None else None
        if session.witness is not None and uid is not None and session.witness.uid not in (uid, NOBODY):
            session.let_go()
            session.witness = None
        pool.last_used = now
        self._sessions.add(session)
        self.opened_sessions += 1
        self.attach_turns += device is not None
        return session

    def _check_sessions_of(self, caller: str) -> None:
        own = self._sessions.of(caller)
        if len(own) >= self.limits.identity_sessions:
            raise TooManySessions(
                f"{caller} has {len(own)} sessions, the limit of one identity",
                identity=caller,
                limit=self.limits.identity_sessions,
            )
        unattached = sum(not session.attached for session in own)
        if unattached >= self.limits.identity_unattached:
            raise TooManySessions(
                f"{caller} has {unattached} sessions that have not attached, the limit of one identity; each ends "
                f"{ATTACH_S:g} s after it was opened",
                identity=caller,
                limit=self.limits.identity_unattached,
            )

    def attach_session(self, session_id: str, seen: bytes, caller: str = "") -> Session:
        """The engine has mapped the arena. Raises SessionExpired, AttachMismatch."""
        session = self._use(session_id, caller)
        if seen != session.canary:
            raise AttachMismatch("seen is not the canary in this session's arena: other memory is mapped", field="seen")
        answer = self.pool_of(session).arena.read_answer(session.canary_slot)
        if answer != bytes(byte ^ 0xFF for byte in session.canary):
            raise AttachMismatch("the canary's complement did not arrive in the arena: the mapping is not shared")
        session.attached, session.attach_until = True, 0.0
        session.renew(self._clock())
        self.on_sessions()
        return session

    def _check_device(self, device: int | None) -> None:
        count = self._devices
        if count is None and device is not None:
            raise FieldInvalid(
                f"device_ordinal is {device}; this daemon's pages are in the host's memory: leave it unset, or start "
                "the daemon with --device gpu",
                field="device_ordinal",
            )
        if count is not None and (device is None or device >= count):
            raise FieldInvalid(
                f"device_ordinal is {'unset' if device is None else device}; this daemon's pages are on GPUs, and it "
                f"has {count}: it must be 0 to {count - 1}",
                field="device_ordinal",
                limit=count - 1,
            )

    def _check_turn(self, process: Process | None, now: float) -> None:
        for other in self._sessions.all():
            # An engine that opens again has given its last attempt up: it never saw the reply.
            if other.attach_until > now and (process is None or other.process != process):
                self.attach_refusals += 1
                raise AttachBusy("another engine is attaching to GPU memory, which only one does at a time")

    def _is_used(self, pool: Pool) -> bool:
        """Whether somebody maps the pool's memory, or may: a lost session without proof of its end."""
        return self.session_count(pool) > 0 or self.quarantine.waits_for(pool)

    def renew_session(self, session_id: str, caller: str = "") -> Session:
        """Extend a lease. Raises SessionExpired."""
        return self._use(session_id, caller)

    def close_session(self, session_id: str, caller: str = "") -> int | None:
        """End a session whose engine touches no page any more; the number of its sequences, None when the caller has
        no such session. Of a lost one the engine's word frees what is in quarantine; its sequences ended before.
        """
        session = self._sessions.pop(session_id, caller)
        if session is None:
            return 0 if self.quarantine.vouch(session_id, caller, self._clock()) else None
        pool, sequences = self.pool_of(session), list(session.sequences.values())
        pool.release(sequences, self._clock())
        session.end()
        pool.last_used = self._clock()
        self.quarantine.vouch(session.id, caller, self._clock())
        session.let_go()
        self.on_sessions()
        return len(sequences)

    def release_quarantine(self, handle: str) -> int:
        """Free the pages of a lost session whose engine the caller knows to be gone, though the daemon cannot see it;
        how many. Raises QuarantineUnknown, EngineAlive.
        """
        return self.quarantine.release(handle)

    def _use(self, session_id: str, caller: str) -> Session:
        now = self._clock()
        session = self._sessions.use(session_id, caller, now)
        pool = self.pool_of(session)
        pool.last_used = now
        pool.table.cached.pass_time(now)
        return session

    def _lose(self, session: Session) -> None:
        now, pool, unsafe = self._clock(), self.pool_of(session), list[int]()
        for sequence in session.sequences.values():
            unsafe += pool.lose(sequence, now)
        session.end()
        pool.last_used = now
        self.quarantine.lose(session, pool, unsafe, now)
        self.on_sessions()

    # --- sequences ---

    def allocate(
        self, session_id: str, demands: Iterable[Steps | Opening], removed: list[str], caller: str = ""
    ) -> tuple[list[tuple[str, Grant | ServiceError]], Pool]:
        """The step call: remove, then serve the demands in order. One that fails changes nothing.

        Returns, by sequence id, what each opening was granted or why it was not, and of steps what there is to hear:
        pages, copies and errors. Raises SessionExpired, SessionNotAttached, and HostMemoryExceeded for removed ids.
        """
        session, pool = self._use_attached(session_id, caller)
        if removed:
            self._remove(session, removed)
        now, told = self._clock(), list[tuple[str, Grant | ServiceError]]()
        for demand in demands:
            if isinstance(demand, Steps):
                told += advance(session, pool, demand, now)
                continue
            try:
                told.append((demand.sequence_id, open_sequence(session, pool, demand, now)))
            except ServiceError as error:
                told.append((demand.sequence_id, error.bare()))
        pool.totals.refused_demands += sum(isinstance(one, CapacityExceeded | QuotaExceeded) for _, one in told)
        return told, pool

    def append(self, session_id: str, steps: Steps, caller: str = "") -> list[tuple[str, ServiceError]]:
        """Record resident tokens and grow nothing; those whose report was refused, by id: it changed nothing.

        Raises SessionExpired, SessionNotAttached.
        """
        session, pool = self._use_attached(session_id, caller)
        told = advance(session, pool, steps, self._clock())
        return [(name, error) for name, error in told if isinstance(error, ServiceError)]

    def remove(self, session_id: str, sequence_ids: list[str], caller: str = "") -> tuple[list[bool], Pool]:
        """Remove sequences; whether each was there. Raises SessionExpired, HostMemoryExceeded."""
        session = self._use(session_id, caller)
        return self._remove(session, sequence_ids), self.pool_of(session)

    def _remove(self, session: Session, sequence_ids: list[str]) -> list[bool]:
        session.check_forget(sequence_ids)
        now, found = self._clock(), session.forget(sequence_ids)
        self.quarantine.vouch_for(session.id, sequence_ids, now)
        self.pool_of(session).release([sequence for sequence in found if sequence is not None], now)
        return [sequence is not None for sequence in found]

    def get_sequence(self, session_id: str, sequence_id: str, caller: str = "") -> tuple[Sequence, Session]:
        """One sequence; counts as an access to it. Raises SessionExpired, SequenceUnknown, SequenceRemoved."""
        session = self._use(session_id, caller)
        sequence = session.sequence(sequence_id)
        self.pool_of(session).touch(sequence, self._clock())
        return sequence, session

    def sequences_of(
        self, session_id: str, start: int, most: int, caller: str = ""
    ) -> tuple[list[tuple[Sequence, Session]], bool]:
        """Sequences of the caller's session, in the order they were opened: those behind the first ``start``, at most
        so many, and whether there are more. Raises SessionExpired.
        """
        return self._listed([self._use(session_id, caller)], start, most)

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
        session = self._use(session_id, caller)
        session.require_attached()
        return session, self.pool_of(session)

    # --- time ---

    def sweep(self) -> list[Session]:
        """Expire what is due; returns the sessions that were lost. Call about once a second.

        A session is lost when its deadline passes or its process is proven gone.
        """
        now = self._clock()
        lost = [s for s in self._sessions.all() if s.deadline <= now or s.is_gone()]
        for session in lost:
            self._sessions.pop(session.id, session.owner)
            self._lose(session)
        self.expired_sessions += len(lost)
        if self.limits.sequence_ttl_s is not None:
            self.expire_sequences(self.limits.sequence_ttl_s)
        self.quarantine.sweep(now, {s.process for s in self._sessions.all() if s.process is not None})
        for pool in self.pools:
            pool.table.cached.pass_time(now)
            if self.limits.cache_ttl_s is not None:
                pool.expire_cached(now - self.limits.cache_ttl_s)
        return lost

    def expire_sequences(self, older_than_s: float) -> int:
        """End sequences untouched for so long, as leaked; how many.

        Their engine may be in a step that reads their pages and writes the unfinished ones. Those go into quarantine,
        and the others are held, until it removes the sequences itself, as it does when it asks for them again and is
        told SEQUENCE_REMOVED, or its session ends; what a lost one may write then waits as a lost session's pages do.
        """
        now, count = self._clock(), 0
        sessions = {session.id: session for session in self._sessions.all()}
        for pool in self.pools:
            old = list(takewhile(lambda sequence: sequence.last_access <= now - older_than_s, pool.sequences))
            for sequence in old:
                session = sessions[sequence.session_id]
                session.forget([sequence.id])
                self.quarantine.expire(session, pool, sequence)
            count += len(old)
        self.expired_sequences += count
        return count

    def evict_pages(self, pool_id: str, most: int | None, *, retained: bool = False) -> tuple[int, int]:
        """Free cached pages, as an allocation would, but retained ones only if told; how many, and how many retained
        ones are left. Raises PoolUnknown.
        """
        pool = self.pools.get(pool_id)
        cached = pool.table.cached
        cached.pass_time(self._clock())
        evicted = pool.evict(pool.table.total if most is None else most, retained=retained)
        pool.totals.evicted_on_request += evicted
        return evicted, cached.retained_count

    def explain(
        self, pool_id: str, prompt: array[int], salt: str, *, others: bool = True
    ) -> Generator[None, None, list[PageAnswer]]:
        """Why the prompt's pages are cached or not, in slices; changes nothing. Without ``others`` it tells of nothing
        but the prompt itself under its own salt. Raises PoolUnknown, FieldInvalid.
        """
        pool = self.pools.get(pool_id)
        check_prompt(prompt, "prompt")
        return explain(pool, self.events, prompt, salt, others=others)

    def drop_pool(self, pool_id: str) -> None:
        """Give the memory of a pool that nobody uses back. Raises PoolUnknown, PoolInUse."""
        pool = self.pools.get(pool_id)
        sessions = self.session_count(pool)
        if sessions:
            raise PoolInUse(f"pool {pool_id!r} has {sessions} sessions", field="pool_id", sessions=sessions)
        if self.quarantine.waits_for(pool):
            raise PoolInUse(
                f"pool {pool_id!r}: the engine of a lost session may still have its memory mapped", field="pool_id"
            )
        self.pools.drop(pool)

    def close(self) -> None:
        """Give all memory back. Engines that still map it keep their mapping and find no daemon."""
        self.pools.close()
        self.quarantine.close()
        for session in self._sessions.all():
            session.let_go()

    # --- looking ---

    def hits_to_verify(
        self, session_id: str, demands: Iterable[Steps | Opening], caller: str = ""
    ) -> list[tuple[Pool, list[int]]]:
        """The cached prefixes that these openings would share now, a ``verify_share`` of them, chosen at random."""
        share, hits = self.limits.verify_share, list[tuple[Pool, list[int]]]()
        if not (self.limits.checksums and share):
            return hits
        for demand in demands:
            if isinstance(demand, Opening) and isinstance(demand.origin, Prompt) and self._is_drawn(share):
                session = self._sessions.find(session_id, caller)
                if session is not None and session.attached and demand.sequence_id not in session.sequences:
                    pool = self.pool_of(session)
                    hits.append((pool, pool.match(demand.origin.tokens, demand.origin.salt)))
        return hits

    def _is_drawn(self, share: float) -> bool:
        return share >= 1 or int.from_bytes(self._random_bytes(8), "big") < share * 2**64

    def now(self) -> float:
        """The clock that every time in here is of."""
        return self._clock()

    def sessions(self) -> list[Session]:
        """All live sessions, in the order they were opened."""
        return self._sessions.all()

    def session_count(self, pool: Pool) -> int:
        """Live sessions on a pool."""
        return sum(session.pool_id == pool.id for session in self._sessions.all())

    def live_session(self, session_id: str, caller: str) -> Session | None:
        """A live session of the caller, which is not renewed by that; None if it has none with this id."""
        return self._sessions.find(session_id, caller)

    def live_sessions(self) -> list[Session]:
        """In the order they were opened."""
        return self._sessions.all()

    def attached_sessions(self) -> list[Session]:
        """Live sessions that have attached, in the order they were opened."""
        return [session for session in self._sessions.all() if session.attached]

    def pool_of(self, session: Session) -> Pool:
        """The pool of a live session."""
        return self.pools[session.pool_id]
