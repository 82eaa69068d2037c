"""The state of the daemon, and the only place that changes it.

One ``KvCache`` is owned by one asyncio loop. Every public method is one transaction: it runs to its end without
waiting for anything, so there is nothing to lock. What may take long has another method, which does the same as work in
slices: a row of transactions, between which others run. Clients are trusted with no index, no size and no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable
from itertools import islice, takewhile
from typing import Any

from services.common.errors import AttachMismatch, PoolInUse
from services.kvcache import slices
from services.kvcache.cache.admission import ATTACH_S, Admission
from services.kvcache.cache.calls import Calls
from services.kvcache.cache.explain import PageAnswer, explain
from services.kvcache.cache.limits import Limits
from services.kvcache.cache.opening import Opening, Prompt, check_prompt
from services.kvcache.cache.shares import Shares
from services.kvcache.cache.steps import Steps
from services.kvcache.cache.tiers_below import TiersBelow
from services.kvcache.lease.quarantine import Quarantine
from services.kvcache.lease.sessions import Session, Sessions
from services.kvcache.lease.witness import Observe, Process
from services.kvcache.pool.budget import CANARY_BYTES, Allotment, ArenaMaker, Pools
from services.kvcache.pool.debts import Debts
from services.kvcache.pool.host_memory import HostMemory
from services.kvcache.pool.index.chain_hash import ChainHash, blake2b_chain
from services.kvcache.pool.index.events import EventRing
from services.kvcache.pool.layout import Layout
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import Work, finish

#: The uid of a process that was gone when it was first looked at.
NOBODY = -1


class KvCache:
    """Sessions, pools and what is quarantined.

    ``random_bytes`` makes session ids and canaries; ``clock`` is monotonic, in seconds; ``make_arena`` and
    ``observe`` are the ways to memory and to the process table. ``devices`` is how many GPUs there are to put pools
    on; with None pools are in the host's memory. ``wake`` is called when there is work for ``scrubber``, ``wake_debts``
    when there are ``debts`` to pay.

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
        wake_debts: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self.epoch = epoch
        self.started_at = clock()
        self.opened_sessions = 0
        self.attach_turns = 0
        self.expired_sessions = 0
        self.expired_sequences = 0
        self.memory = HostMemory(limits.host_memory)
        self.memory.reserve(limits.event_ring, limits.max_sessions)
        self.events = EventRing(limits.event_ring)
        self.debts = Debts(wake_debts)
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
            debts=self.debts,
        )
        self._sessions = Sessions()
        self.quarantine = Quarantine(limits.drain_s, limits.fence)
        self._shares = Shares(limits.identity_share, self._sessions, self.quarantine)
        self.admission = Admission(self._sessions, self.quarantine, devices)
        self.calls = Calls(self._sessions, self.pools, self.quarantine, self.debts, self._shares, clock)
        self._observe = observe
        self._clock = clock
        self._random_bytes = random_bytes
        #: The tiers below the pools, if there are any.
        self.tiers: TiersBelow | None = None
        #: Called when a session has attached or has ended.
        self.on_sessions: Callable[[], None] = lambda: None

    def put_below(self, tiers: TiersBelow) -> None:
        """There are tiers below all pools, of which none is made yet."""
        self.tiers = tiers
        self.pools.on_made, self.pools.more_page_bytes = tiers.adopt, tiers.page_bytes

    def check_limits(self, limits: Limits) -> None:
        """Whether ``take_up`` can. Raises InvalidConfiguration."""
        self.memory.check_limit(limits.host_memory)

    def take_up(self, limits: Limits) -> None:
        """Go by other limits from now on, which were checked. What there is stays, also beyond them."""
        self.limits = limits
        self.memory.set_limit(limits.host_memory)
        self.pools.set_limits(
            limits.budget_bytes, Allotment(limits.identity_pools, limits.identity_share), limits.pool_pages
        )
        self.quarantine.set_fence(limits.drain_s, limits.fence)
        self._shares.share = limits.identity_share
        for session in self._sessions.all():
            session.max_sequences = limits.max_sequences

    # --- sessions ---

    def open_session(self, client_name: str, pool_id: str, layout: Layout, **options: Any) -> Session:
        """As ``opening``, at once."""
        return finish(self.opening(client_name, pool_id, layout, **options), self._clock)

    def opening(
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
    ) -> Work[Session]:
        """A new session of the caller, on the pool, which is made if need be: work in slices, of which one may be under
        way, or `dropping`. The session's canary is in its arena then. A ``private`` pool is the caller's own: others
        that name it get another one. ``engine_name`` and ``model`` are what KV events name it by.

        ``uid`` is the user that the caller was proven to be, if it was: a process of another is not taken for its.

        Raises FieldInvalid, LayoutMismatch, InvalidConfiguration, ExceedsBudget, ExceedsShare, TooManyPools,
        TooManySessions, HostMemoryExceeded, AttachBusy, GpuError.
        """
        ttl = self.limits.default_ttl_s if ttl_s is None else ttl_s
        self.admission.check(self.limits, caller, ttl, max_pages, process, device, self._clock())
        if private:
            pool_id = f"{pool_id}/{caller.replace('%', '%25').replace('/', '%2F')}"
        pool = yield from self.pools.get_or_make(pool_id, layout, pool_pages, device, self._is_used, caller)
        now = self._clock()
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
            entry_bytes=pool.headroom.entry_bytes,
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

    def attach_session(self, session_id: str, seen: bytes, caller: str = "") -> Session:
        """The engine has mapped the arena. Raises SessionExpired, AttachMismatch."""
        session = self.calls.use(session_id, caller)
        if seen != session.canary:
            raise AttachMismatch("seen is not the canary in this session's arena: other memory is mapped", field="seen")
        answer = self.pool_of(session).arena.read_answer(session.canary_slot)
        if answer != bytes(byte ^ 0xFF for byte in session.canary):
            raise AttachMismatch("the canary's complement did not arrive in the arena: the mapping is not shared")
        session.attached, session.attach_until = True, 0.0
        session.renew(self._clock())
        self.on_sessions()
        return session

    def _is_used(self, pool: Pool) -> bool:
        """Whether somebody maps the pool's memory, or may: a lost session without proof of its end."""
        return self.session_count(pool) > 0 or self.quarantine.waits_for(pool)

    def renew_session(self, session_id: str, caller: str = "") -> Session:
        """Extend a lease. Raises SessionExpired."""
        return self.calls.use(session_id, caller)

    def close_session(self, session_id: str, caller: str = "") -> int | None:
        """End a session whose engine touches no page any more; the number of its sequences, None when the caller has
        no such session. Of a lost one the engine's word frees what is in quarantine; its sequences ended before.
        """
        session = self._sessions.pop(session_id, caller)
        if session is None:
            return 0 if self.quarantine.vouch(session_id, caller, self._clock()) else None
        pool, sequences, entries = self.pool_of(session), session.sequences, session.held_pages
        count = len(sequences)
        session.end()
        pool.endings.end_session(session.id, sequences, entries, self._clock())
        pool.last_used = self._clock()
        self.quarantine.vouch(session.id, caller, self._clock())
        session.let_go()
        self.on_sessions()
        return count

    def may_close(self, session_id: str, caller: str) -> bool:
        """Whether the caller has a session with this id, live or lost."""
        return self._sessions.find(session_id, caller) is not None or self.quarantine.has(session_id, caller)

    def knows(self, caller: str) -> bool:
        """Whether the caller has any session, live or lost."""
        return bool(self._sessions.of(caller)) or self.quarantine.holds_of(caller)

    def release_quarantine(self, handle: str) -> int:
        """Free the pages of a lost session whose engine the caller knows to be gone, though the daemon cannot see it;
        how many. Raises QuarantineUnknown, EngineAlive.
        """
        return self.quarantine.release(handle)

    def _lose(self, session: Session) -> None:
        now, pool = self._clock(), self.pool_of(session)
        self.quarantine.lose(session, pool, now)
        session.end()
        pool.last_used = now
        self.on_sessions()

    # --- time ---

    def sweep(self) -> list[Session]:
        """Expire what is due; returns the sessions that were lost. Call about once a second.

        A session is lost when its deadline passes or its process is proven gone.
        """
        return finish(self.sweeping(), self._clock)

    def sweeping(self) -> Work[list[Session]]:
        """As ``sweep``, in slices."""
        now, lost = self._clock(), list[Session]()
        for session in self._sessions.all():
            if not (session.deadline <= now and not session.calls) and not session.is_gone():
                continue
            if self._sessions.pop(session.id, session.owner) is not None:
                self._lose(session)
                self.expired_sessions += 1
                lost.append(session)
                yield None
        if self.limits.sequence_ttl_s is not None:
            yield from self.expiring(self.limits.sequence_ttl_s)
        now = self._clock()
        self.quarantine.sweep(now, {s.process for s in self._sessions.all() if s.process is not None})
        for pool in list(self.pools):
            while not pool.table.cached.pass_time(self._clock(), slices.ENTRIES):
                yield None
            ttl = self.limits.cache_ttl_s
            while ttl is not None and pool.published.expire(self._clock() - ttl, slices.ENTRIES) == slices.ENTRIES:
                yield None
        return lost

    def expire_sequences(self, older_than_s: float) -> int:
        """End sequences untouched for so long, as leaked; how many.

        Their engine may be in a step that reads their pages and writes the unfinished ones. Those go into quarantine,
        and the others are held, until it removes the sequences itself, as it does when it asks for them again and is
        told SEQUENCE_REMOVED, or its session ends; what a lost one may write then waits as a lost session's pages do.
        """
        return finish(self.expiring(older_than_s), self._clock)

    def expiring(self, older_than_s: float) -> Work[int]:
        """As ``expire_sequences``, in slices: each sequence is ended alone."""
        before, count, spent = self._clock() - older_than_s, 0, 0
        for pool in list(self.pools):
            # A dict finds its first entry slowly when many before it are gone: they are looked for many at a time.
            while old := list(takewhile(lambda one: one.last_access <= before, islice(pool.sequences, slices.ENTRIES))):
                for sequence in old:
                    if spent >= slices.ENTRIES:
                        spent = 0
                        yield None
                    if sequence not in pool.sequences or sequence.last_access > before:
                        continue  # it was used or has ended since
                    session = self._sessions.by_id(sequence.session_id)
                    session.forget([sequence.id])
                    count += 1
                    self.expired_sequences += 1
                    spent += 2 + sequence.page_count
                    yield from self.quarantine.expire(session, pool, sequence)
        return count

    def evict_pages(self, pool_id: str, most: int | None, *, retained: bool = False) -> tuple[int, int]:
        """Free cached pages, as an allocation would, but retained ones only if told; how many, and how many retained
        ones are left. Raises PoolUnknown.
        """
        return finish(self.evicting(pool_id, most, retained=retained), self._clock)

    def evicting(self, pool_id: str, most: int | None, *, retained: bool = False) -> Work[tuple[int, int]]:
        """As ``evict_pages``, in slices: at most as many as are cached at the beginning."""
        pool, evicted = self.pools.get(pool_id), 0
        cached = pool.table.cached
        while not cached.pass_time(self._clock(), slices.ENTRIES):
            yield None
        left = len(cached) if most is None else min(most, len(cached))
        while left:
            some = pool.published.evict(min(left, slices.ENTRIES), retained=retained)
            pool.totals.evicted_on_request += some
            evicted += some
            left = left - some if some == slices.ENTRIES else 0
            if left:
                yield None
                if pool not in self.pools:
                    break
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
        finish(self.dropping(pool_id), self._clock)

    def dropping(self, pool_id: str) -> Work[None]:
        """As ``drop_pool``, in slices, of which one may be under way, or `opening`."""
        pool = self.pools.get(pool_id)
        sessions = self.session_count(pool)
        if sessions:
            raise PoolInUse(f"pool {pool_id!r} has {sessions} sessions", field="pool_id", sessions=sessions)
        if self.quarantine.waits_for(pool):
            raise PoolInUse(
                f"pool {pool_id!r}: the engine of a lost session may still have its memory mapped", field="pool_id"
            )
        yield from self.pools.drop(pool)

    def close(self) -> None:
        """Give all memory back. Engines that still map it keep their mapping and find no daemon."""
        self.pools.close()
        self.quarantine.close()
        for session in self._sessions.all():
            session.let_go()

    # --- looking ---

    def hits_to_verify(
        self, session_id: str, demands: Iterable[Steps | Opening], caller: str = ""
    ) -> Work[list[tuple[Pool, list[int]]]]:
        """The cached prefixes that these openings would share now, a ``verify_share`` of them, chosen at random. In
        slices.
        """
        share, hits = self.limits.verify_share, list[tuple[Pool, list[int]]]()
        if not (self.limits.checksums and share):
            return hits
        for demand in demands:
            if isinstance(demand, Opening) and isinstance(demand.origin, Prompt) and self._is_drawn(share):
                session = self._sessions.find(session_id, caller)
                if session is not None and session.attached and demand.sequence_id not in session.sequences:
                    pool = self.pool_of(session)
                    found, _ = yield from pool.matching(demand.origin.tokens, demand.origin.salt)
                    hits.append((pool, found))
                    yield None
        return hits

    def _is_drawn(self, share: float) -> bool:
        return share >= 1 or int.from_bytes(self._random_bytes(8), "big") < share * 2**64

    def now(self) -> float:
        """The clock that every time in here is of."""
        return self._clock()

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
