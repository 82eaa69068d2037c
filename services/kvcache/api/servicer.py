"""Proto to domain and back; nothing else. Every method is one transaction on the KvCache, without an await in it, or a
row of them, in slices: what is read of pages is read before or after. Calls of one session that go in slices do so one
after the other. A long message is read in slices too, before its transaction.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.access.identity import CALLER, Identity
from services.common.access.policy import Policy
from services.common.errors import Draining, FieldInvalid
from services.common.tracing.span import SPAN, Value
from services.kvcache.api import requests, responses
from services.kvcache.api.event_messages import event_messages, snapshot_messages
from services.kvcache.api.roles import ENGINE, INCLUDES, NEEDED, OPERATOR
from services.kvcache.api.tier_responses import mover_message, name_tiers, tier_messages
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.walk import walk
from services.kvcache.lease.sessions import Session
from services.kvcache.lease.witness import Process
from services.kvcache.pool.sequence import Sequence
from services.kvcache.scrub.scrubber import Report, Scrubber
from services.kvcache.slices import Result, Slices, Work, found_in
from services.kvcache.tiers.tiers import Tiers
from services.version import VERSION

SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"].full_name

maps_errors = rpc.maps_errors(responses.DOMAIN)

log = structlog.get_logger()


class KvCacheServicer(kvcache_pb2_grpc.KvCacheServiceServicer):
    """The service, over one cache that this event loop owns.

    ``policy`` says who may do what, until ``set_policy``, and by default that this user may do all. ``owner_of`` is the
    uid of a process, None if it cannot be seen. With ``shared_pools`` engines of all identities that name one pool have
    it in common.
    """

    def __init__(
        self,
        cache: KvCache,
        scrubber: Scrubber,
        policy: Policy | None = None,
        *,
        owner_of: Callable[[Process], int | None] = lambda process: None,
        shared_pools: bool = False,
        slices: Slices | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._cache = cache
        self._scrubber = scrubber
        self._policy = policy or Policy(Identity.of_uid(os.geteuid()), [], INCLUDES)
        self._owner_of = owner_of
        self._shared_pools = shared_pools
        self._slices = slices or Slices(cache.now)
        self._tiers = tiers
        self._draining = False
        self._watchers: set[asyncio.Event] = set()
        self._fsck = asyncio.Lock()  # one at a time: each has copies of its own

    def set_policy(self, policy: Policy) -> None:
        """Go by another policy from the next call on. Streams of those who may not see them any more end."""
        self._policy = policy
        for watcher in self._watchers:
            watcher.set()

    def drain(self) -> None:
        """End the streams, which would end with the process otherwise: their readers should look elsewhere."""
        self._draining = True
        for watcher in self._watchers:
            watcher.set()

    @maps_errors
    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        """See the proto."""
        caller = self._policy.require(NEEDED["OpenSession"])
        requests.check_name(request.client_name, "client_name", least=0)
        requests.check_name(request.pool_id, "pool_id")
        requests.check_name(request.engine_name, "engine_name", least=0)
        requests.check_name(request.model, "model", least=0)
        if not request.HasField("layout"):
            raise FieldInvalid("layout is missing", field="layout")
        process = self._proven(requests.read_process(request.process))
        work = self._cache.opening(
            request.client_name,
            request.pool_id,
            requests.read_layout(request.layout),
            pool_pages=request.pool_pages if request.HasField("pool_pages") else None,
            max_pages=request.max_pages if request.HasField("max_pages") else None,
            ttl_s=request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else None,
            process=process,
            uid=self._owner_of(process) if process is not None else None,
            device=request.device_ordinal if request.HasField("device_ordinal") else None,
            caller=caller,
            private=not self._shared_pools and caller != self._policy.owner.text,
            engine_name=request.engine_name,
            model=request.model,
        )
        session = await self._in_pools(work)
        pool = self._cache.pool_of(session)
        return pb.OpenSessionResponse(
            epoch=self._cache.epoch,
            session_id=session.id,
            ttl=responses.duration_message(session.ttl_s),
            arena=responses.arena_message(pool, session.canary_slot),
            layout=responses.layout_message(pool.layout),
            pool_id=pool.id,
            session_handle=session.handle,
        )

    async def _in_pools(self, work: Work[Result]) -> Result:
        """Work that makes pools or drops them. It ends whatever becomes of the call: memory may be under way to it."""
        return await asyncio.shield(self._slices.run(work, order="pools"))

    def _proven(self, process: Process | None) -> Process | None:
        """The process that a caller names as its own; None when nothing shows whose it is.

        What is believed of a process decides when its session ends. Raises FieldInvalid for another user's process.
        """
        caller = CALLER.get()
        if process is None or caller.uid is None:
            return None
        uid = self._owner_of(process)
        # Root comes through the owner's socket.
        if uid is not None and uid != caller.uid and not (uid == 0 and caller == self._policy.owner):
            raise FieldInvalid(
                f"process.pid is {process.pid}, a process of uid {uid}; {caller} can only name its own",
                field="process.pid",
            )
        return process

    @maps_errors
    async def AttachSession(self, request: pb.AttachSessionRequest, context: Any) -> pb.AttachSessionResponse:
        """See the proto."""
        caller = self._policy.require(NEEDED["AttachSession"])
        session = self._cache.attach_session(request.session_id, request.seen, caller)
        log.info("session_attached", **_named(session))
        pool = self._cache.pool_of(session)
        return pb.AttachSessionResponse(epoch=self._cache.epoch, available_pages=pool.headroom.pages)

    @maps_errors
    async def RenewSession(self, request: pb.RenewSessionRequest, context: Any) -> pb.RenewSessionResponse:
        """See the proto."""
        session = self._cache.renew_session(request.session_id, self._policy.require(NEEDED["RenewSession"]))
        return pb.RenewSessionResponse(
            epoch=self._cache.epoch,
            ttl=responses.duration_message(session.ttl_s),
            available_pages=self._cache.pool_of(session).headroom.pages,
        )

    @maps_errors
    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        """See the proto. Who has a session may close it, whatever roles it has lost: its word frees the pages."""
        caller = CALLER.get().text
        if not self._cache.may_close(request.session_id, caller):
            self._policy.require(NEEDED["CloseSession"])
        session = self._cache.live_session(request.session_id, caller)
        count = self._cache.close_session(request.session_id, caller)
        if session is not None:
            log.info("session_closed", **_named(session), removed_sequences=count)
        return pb.CloseSessionResponse(epoch=self._cache.epoch, closed=count is not None, removed_sequences=count or 0)

    @maps_errors
    async def AllocatePages(self, request: pb.AllocatePagesRequest, context: Any) -> pb.AllocatePagesResponse:
        """See the proto."""
        caller = self._policy.require(NEEDED["AllocatePages"])
        demands = await self._slices.run(requests.read_demands(request.demands))
        removed = requests.read_ids(request.remove_sequence_ids, "remove_sequence_ids")
        if hits := await self._slices.run(self._cache.hits_to_verify(request.session_id, demands, caller)):
            await self._scrubber.verify_hits(hits)
        if (span := SPAN.get()) is not None:
            span.set(_traced(self._cache.live_session(request.session_id, caller)))
        speed = requests.read_speed(request.prefill_tokens_per_s) if request.prefill_tokens_per_s else 0.0
        work = self._cache.calls.allocating(request.session_id, demands, removed, caller, speed)
        served, pool = await self._slices.run(work, order=request.session_id)
        if (unclean := pool.table.unclean) is not None and unclean.granted:
            await self._scrubber.zero_granted(pool)  # nobody writes to a page whose grant is not answered yet
        response = pb.AllocatePagesResponse(epoch=self._cache.epoch, available_pages=pool.headroom.pages)
        if served:
            await self._slices.run(responses.fill_grants(response, served))
        return response

    @maps_errors
    async def AppendTokens(self, request: pb.AppendTokensRequest, context: Any) -> pb.AppendTokensResponse:
        """See the proto."""
        caller = self._policy.require(NEEDED["AppendTokens"])
        requests.check_tokens(len(request.steps.tokens), 0, "steps.tokens")
        steps = await self._slices.run(requests.read_steps(request.steps, "steps", growing=False))
        response = pb.AppendTokensResponse(epoch=self._cache.epoch)
        work = self._cache.calls.appending(request.session_id, steps, caller)
        for sequence_id, error in await self._slices.run(work, order=request.session_id):
            response.errors.add(sequence_id=sequence_id, error=rpc.status_of(error, responses.DOMAIN))
        return response

    @maps_errors
    async def RemoveSequences(self, request: pb.RemoveSequencesRequest, context: Any) -> pb.RemoveSequencesResponse:
        """See the proto."""
        caller = self._policy.require(NEEDED["RemoveSequences"])
        ids = requests.read_ids(request.sequence_ids, "sequence_ids")
        work = self._cache.calls.removing(request.session_id, ids, caller)
        removed, pool = await self._slices.run(work, order=request.session_id)
        absent = [name for name, was_there in zip(ids, removed, strict=True) if not was_there]
        return pb.RemoveSequencesResponse(
            epoch=self._cache.epoch,
            removed_sequences=len(ids) - len(absent),
            available_pages=pool.headroom.pages,
            absent_sequence_ids=absent,
        )

    @maps_errors
    async def GetSequence(self, request: pb.GetSequenceRequest, context: Any) -> pb.GetSequenceResponse:
        """See the proto."""
        handle = request.session_handle
        caller = self._policy.require(OPERATOR if handle else NEEDED["GetSequence"])
        requests.check_name(request.sequence_id, "sequence_id")
        requests.check_one_session(bool(request.session_id), bool(handle))
        if handle:
            sequence, session = self._cache.calls.inspect_sequence(handle, request.sequence_id)
        else:
            sequence, session = self._cache.calls.get_sequence(request.session_id, request.sequence_id, caller)
        pool = self._cache.pool_of(session)
        response = pb.GetSequenceResponse(epoch=self._cache.epoch, sequence=self._sequence(sequence, session))
        work = responses.fill_sequence(response.sequence, pool, session, sequence, tokens=request.include_tokens)
        await self._slices.run(work)
        await self._scrubber.zero_granted(pool)
        return response

    @maps_errors
    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        """See the proto."""
        if request.limit > requests.MAX_LIST:
            raise FieldInvalid(f"limit is {request.limit}; it must be at most {requests.MAX_LIST}", field="limit")
        requests.check_one_session(request.HasField("session_id"), request.HasField("session_handle"))
        start, most = requests.read_cursor(request.cursor), request.limit or 100
        if request.HasField("session_id"):
            listed, more = self._cache.calls.sequences_of(request.session_id, start, most, self._policy.require(ENGINE))
        else:
            self._policy.require(NEEDED["ListSequences"])
            handle = request.session_handle if request.HasField("session_handle") else None
            listed, more = self._cache.calls.list_sequences(handle, start, most)
        return pb.ListSequencesResponse(
            epoch=self._cache.epoch,
            sequences=[self._sequence(sequence, session) for sequence, session in listed],
            next_cursor=str(start + most) if more else "",
        )

    @maps_errors
    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """See the proto."""
        self._policy.require(NEEDED["GetStats"])
        cache = self._cache
        return pb.GetStatsResponse(
            epoch=cache.epoch,
            pools=[responses.pool_stats_message(pool, cache.session_count(pool)) for pool in cache.pools],
            budget_bytes=cache.limits.budget_bytes,
            arena_bytes=cache.pools.arena_bytes,
            uptime=responses.duration_message(cache.now() - cache.started_at),
            expired_sessions=cache.expired_sessions,
            expired_sequences=cache.expired_sequences,
            lost_sessions=[responses.lost_session_message(record, cache.now()) for record in cache.quarantine.lost()],
            killed_engines=cache.quarantine.killed,
            host_memory_bytes=cache.memory.used,
            host_memory_limit_bytes=cache.memory.limit,
            sessions=[responses.session_message(session, cache.now()) for session in cache.live_sessions()],
            version=VERSION,
            tiers=tier_messages(self._tiers, cache.now()) if self._tiers is not None else (),
            mover=mover_message(self._tiers) if self._tiers is not None else None,
        )

    @maps_errors
    async def Fsck(self, request: pb.FsckRequest, context: Any) -> pb.FsckResponse:
        """See the proto."""
        self._policy.require(NEEDED["Fsck"])
        report = Report()
        if request.deep:
            if not self._cache.limits.checksums:
                raise FieldInvalid("deep is set, and this daemon keeps no checksums: --checksums is off", field="deep")
            report = await self._scrubber.verify_all()
        async with self._fsck:
            violations = await self._slices.run(found_in(walk(self._cache)))
        pools = list(self._cache.pools)
        return pb.FsckResponse(
            epoch=self._cache.epoch,
            checked_pages=sum(pool.table.total for pool in pools),
            checked_sequences=sum(len(pool.sequences) for pool in pools),
            checked_index_entries=sum(len(pool.index) for pool in pools),
            violations=[*report.violations, *violations],
            verified_pages=report.verified_pages,
        )

    @maps_errors
    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        """See the proto."""
        self._policy.require(NEEDED["ExplainPrefix"])
        requests.check_name(request.salt, "salt", least=0)
        requests.check_tokens(len(request.prompt), 0, "prompt")
        size = self._cache.pools.get(request.pool_id).layout.page_size
        if len(request.prompt) > size * requests.MAX_EXPLAINED:
            raise FieldInvalid(
                f"prompt has {len(request.prompt)} tokens; it may have {requests.MAX_EXPLAINED} pages of {size}",
                field="prompt",
                limit=size * requests.MAX_EXPLAINED,
            )
        others = self._policy.has(CALLER.get(), OPERATOR)
        prompt = await self._slices.run(requests.read_tokens(request.prompt))
        answers = await self._slices.run(self._cache.explain(request.pool_id, prompt, request.salt, others=others))
        response = pb.ExplainPrefixResponse(epoch=self._cache.epoch)
        await self._slices.run(responses.fill_explanation(response, answers))
        if self._tiers is not None:
            pool = self._cache.pools.get(request.pool_id)
            await name_tiers(self._slices, self._tiers, pool, prompt, request.salt, response)
        return response

    @maps_errors
    async def EvictPages(self, request: pb.EvictPagesRequest, context: Any) -> pb.EvictPagesResponse:
        """See the proto."""
        self._policy.require(NEEDED["EvictPages"])
        most = request.max_pages if request.HasField("max_pages") else None
        work = self._cache.evicting(request.pool_id, most, retained=request.include_retained)
        evicted, left = await self._slices.run(work)
        return pb.EvictPagesResponse(epoch=self._cache.epoch, evicted_pages=evicted, retained_pages=left)

    @maps_errors
    async def ExpireSequences(self, request: pb.ExpireSequencesRequest, context: Any) -> pb.ExpireSequencesResponse:
        """See the proto."""
        self._policy.require(NEEDED["ExpireSequences"])
        if not request.HasField("older_than") or request.older_than.ToNanoseconds() < 0:
            raise FieldInvalid("older_than must be a duration of 0 s or more", field="older_than")
        count = await self._slices.run(self._cache.expiring(request.older_than.ToNanoseconds() / 1e9))
        return pb.ExpireSequencesResponse(epoch=self._cache.epoch, expired_sequences=count)

    @maps_errors
    async def ReleaseQuarantine(
        self, request: pb.ReleaseQuarantineRequest, context: Any
    ) -> pb.ReleaseQuarantineResponse:
        """See the proto."""
        self._policy.require(NEEDED["ReleaseQuarantine"])
        count = self._cache.release_quarantine(request.session_handle)
        return pb.ReleaseQuarantineResponse(epoch=self._cache.epoch, released_pages=count)

    @maps_errors
    async def DropPool(self, request: pb.DropPoolRequest, context: Any) -> pb.DropPoolResponse:
        """See the proto."""
        self._policy.require(NEEDED["DropPool"])
        await self._in_pools(self._cache.dropping(request.pool_id))
        return pb.DropPoolResponse(epoch=self._cache.epoch)

    @maps_errors
    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """See the proto."""
        tokens, tiers = request.include_tokens, request.include_tiers
        role = OPERATOR if tokens else NEEDED["WatchEvents"]
        self._policy.require(role)
        ring, epoch = self._cache.events, self._cache.epoch
        number, why = request.after_sequence_number, pb.RESET_REASON_UNSPECIFIED
        if not request.HasField("after_sequence_number"):
            why = pb.RESET_REASON_START
        elif request.HasField("epoch") and request.epoch != epoch:
            why = pb.RESET_REASON_NEW_EPOCH
        changed = asyncio.Event()
        self._watchers.add(changed)
        unsubscribe = ring.subscribe(changed.set)
        try:
            while True:
                if self._draining:
                    raise Draining("the daemon is shutting down")
                self._policy.require(role)
                changed.clear()
                gap, events = ring.after(number)
                if why or gap:
                    # The snapshot is taken whole, before the first await, at the number it is true for.
                    number = ring.last_number
                    snapshot = snapshot_messages(self._cache, request.pool_id, tokens=tokens, tiers=tiers)
                    reset = pb.CacheReset(reason=why or pb.RESET_REASON_GAP)
                    yield pb.WatchEventsResponse(epoch=epoch, sequence_number=number, reset=reset)
                    for links in snapshot:
                        if links is None:
                            await asyncio.sleep(0)
                            continue
                        yield pb.WatchEventsResponse(epoch=epoch, sequence_number=number, stored=links)
                    why = pb.RESET_REASON_UNSPECIFIED
                    continue
                for event in events:
                    number = event.number
                    if event.tier and not tiers:
                        continue
                    if not request.pool_id or event.pool_id == request.pool_id:
                        for message in event_messages(self._cache, event, tokens=tokens):
                            yield message
                if not events:
                    await changed.wait()
        finally:
            unsubscribe()
            self._watchers.discard(changed)

    def _sequence(self, sequence: Sequence, session: Session) -> pb.Sequence:
        now = self._cache.now()
        return pb.Sequence(
            session_handle=session.handle,
            sequence_id=sequence.id,
            pool_id=session.pool_id,
            total_tokens=len(sequence.tokens),
            total_pages=len(sequence.pages),
            published_pages=sequence.published,
            cached_tokens=sequence.cached_tokens,
            age=responses.duration_message(now - sequence.created_at),
            idle=responses.duration_message(now - sequence.last_access),
            access_count=sequence.access_count,
            retention=responses.retention_message(sequence.retention),
        )


def _traced(session: Session | None) -> dict[str, Value]:
    """The attributes of a span of a session's call; its id is a secret."""
    if session is None:
        return {}
    return {"rocmforge.session": session.handle, "rocmforge.pool": session.pool_id}


def _named(session: Session) -> dict[str, str]:
    """What a session is known by in the log of either side."""
    return {
        "session": session.handle,
        "engine": session.engine_name or session.client_name,
        "owner": session.owner,
        "pool_id": session.pool_id,
    }
