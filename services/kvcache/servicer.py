"""Proto to domain and back; nothing else. Every method is one transaction on the KvCache, without an await in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services import rpc
from services.errors import Draining, FieldInvalid, ServiceError
from services.kvcache.cache import KvCache
from services.kvcache.demand import Demand, Grant
from services.kvcache.events import MAX_LINKS, Event, EventKind, Link
from services.kvcache.explain import PageAnswer
from services.kvcache.layout import PageLayout
from services.kvcache.pool import Pool
from services.kvcache.sequence import Sequence
from services.kvcache.sessions import Process

DOMAIN = "rocmforge.kvcache"
SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"].full_name

MAX_ITEMS = 4096
MAX_NAME = 128
MAX_LIST = 1000

_DTYPES = {pb.DATA_TYPE_F32: "f32", pb.DATA_TYPE_F16: "f16", pb.DATA_TYPE_BF16: "bf16", pb.DATA_TYPE_INT8: "int8"}
_EVENT_FIELDS = {
    EventKind.STORED: "stored",
    EventKind.EVICTED: "evicted",
    EventKind.EXPIRED: "expired",
    EventKind.DROPPED: "dropped",
}
_DATA_TYPES = {name: value for value, name in _DTYPES.items()}

maps_errors = rpc.maps_errors(DOMAIN)


class KvCacheServicer(kvcache_pb2_grpc.KvCacheServiceServicer):
    """The service, over one cache that this event loop owns."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._draining = False
        self._watchers: set[asyncio.Event] = set()

    def drain(self) -> None:
        """End the streams, which would end with the process otherwise: their readers should look elsewhere."""
        self._draining = True
        for watcher in self._watchers:
            watcher.set()

    @maps_errors
    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        """See the proto."""
        _check_name(request.client_name, "client_name", least=0)
        _check_name(request.pool_id, "pool_id")
        if not request.HasField("layout"):
            raise FieldInvalid("layout is missing", field="layout")
        session = self._cache.open_session(
            request.client_name,
            request.pool_id,
            _layout(request.layout),
            pool_pages=request.pool_pages if request.HasField("pool_pages") else None,
            max_pages=request.max_pages if request.HasField("max_pages") else None,
            ttl_s=request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else None,
            process=_process(request.process),
        )
        pool = self._cache.pool_of(session)
        arena = pb.Arena(
            file_path=pool.arena.file_path,
            size_bytes=pool.arena.size_bytes,
            page_bytes=pool.layout.page_bytes,
            total_pages=pool.table.total,
            canary_offset=pool.arena.canary_offset(session.canary_slot),
        )
        return pb.OpenSessionResponse(
            epoch=self._cache.epoch,
            session_id=session.id,
            ttl=_duration(session.ttl_s),
            arena=arena,
            layout=_layout_pb(pool.layout),
        )

    @maps_errors
    async def AttachSession(self, request: pb.AttachSessionRequest, context: Any) -> pb.AttachSessionResponse:
        """See the proto."""
        self._cache.attach_session(request.session_id, request.seen)
        return pb.AttachSessionResponse(epoch=self._cache.epoch)

    @maps_errors
    async def RenewSession(self, request: pb.RenewSessionRequest, context: Any) -> pb.RenewSessionResponse:
        """See the proto."""
        session = self._cache.renew_session(request.session_id)
        return pb.RenewSessionResponse(epoch=self._cache.epoch, ttl=_duration(session.ttl_s))

    @maps_errors
    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        """See the proto."""
        count = self._cache.close_session(request.session_id)
        return pb.CloseSessionResponse(epoch=self._cache.epoch, closed=count is not None, removed_sequences=count or 0)

    @maps_errors
    async def AllocatePages(self, request: pb.AllocatePagesRequest, context: Any) -> pb.AllocatePagesResponse:
        """See the proto."""
        _check_items(len(request.demands), "demands")
        removed = _ids(request.remove_sequence_ids, "remove_sequence_ids")
        demands = [_demand(item, f"demands[{at}]") for at, item in enumerate(request.demands)]
        results, pool = self._cache.allocate(request.session_id, demands, removed)
        grants = []
        for demand, result in zip(demands, results, strict=True):
            if isinstance(result, ServiceError):
                grants.append(pb.SequenceGrant(sequence_id=demand.sequence_id, error=rpc.status_of(result, DOMAIN)))
                continue
            grants.append(_grant(demand.sequence_id, result))
        return pb.AllocatePagesResponse(epoch=self._cache.epoch, grants=grants, available_pages=pool.available_pages)

    @maps_errors
    async def AppendTokens(self, request: pb.AppendTokensRequest, context: Any) -> pb.AppendTokensResponse:
        """See the proto."""
        _check_items(len(request.appends), "appends")
        for at, item in enumerate(request.appends):
            _check_name(item.sequence_id, f"appends[{at}].sequence_id")
        appends = [(item.sequence_id, item.start, list(item.tokens)) for item in request.appends]
        progress = []
        for item, result in zip(request.appends, self._cache.append(request.session_id, appends), strict=True):
            if isinstance(result, ServiceError):
                error = rpc.status_of(result, DOMAIN)
                progress.append(pb.SequenceProgress(sequence_id=item.sequence_id, error=error))
                continue
            progress.append(
                pb.SequenceProgress(
                    sequence_id=item.sequence_id,
                    total_tokens=len(result.tokens),
                    published_pages=result.published,
                )
            )
        return pb.AppendTokensResponse(epoch=self._cache.epoch, progress=progress)

    @maps_errors
    async def RemoveSequences(self, request: pb.RemoveSequencesRequest, context: Any) -> pb.RemoveSequencesResponse:
        """See the proto."""
        ids = _ids(request.sequence_ids, "sequence_ids")
        removed, pool = self._cache.remove(request.session_id, ids)
        sequences = [pb.RemovedSequence(sequence_id=i, removed=r) for i, r in zip(ids, removed, strict=True)]
        return pb.RemoveSequencesResponse(
            epoch=self._cache.epoch, sequences=sequences, available_pages=pool.available_pages
        )

    @maps_errors
    async def GetSequence(self, request: pb.GetSequenceRequest, context: Any) -> pb.GetSequenceResponse:
        """See the proto."""
        _check_name(request.sequence_id, "sequence_id")
        sequence, pool = self._cache.get_sequence(request.session_id, request.sequence_id)
        answer = self._sequence(sequence, pool)
        answer.pages.extend(_page(pool.reference(page)) for page in sequence.pages)
        if request.include_tokens:
            answer.tokens.extend(sequence.tokens)
        return pb.GetSequenceResponse(epoch=self._cache.epoch, sequence=answer)

    @maps_errors
    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        """See the proto."""
        if request.limit > MAX_LIST:
            raise FieldInvalid(f"limit is {request.limit}; it must be at most {MAX_LIST}", field="limit")
        listed = self._cache.list_sequences(request.session_id if request.HasField("session_id") else None)
        start = _cursor(request.cursor)
        end = start + (request.limit or 100)
        return pb.ListSequencesResponse(
            epoch=self._cache.epoch,
            sequences=[self._sequence(sequence, pool) for sequence, pool in listed[start:end]],
            next_cursor=str(end) if end < len(listed) else "",
        )

    @maps_errors
    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """See the proto."""
        cache = self._cache
        return pb.GetStatsResponse(
            epoch=cache.epoch,
            pools=[_pool_stats(pool, cache.session_count(pool)) for pool in cache.pools],
            budget_bytes=cache.limits.budget_bytes,
            arena_bytes=cache.pools.arena_bytes,
            uptime=_duration(cache.now() - cache.started_at),
            expired_sessions=cache.expired_sessions,
            expired_sequences=cache.expired_sequences,
        )

    @maps_errors
    async def Fsck(self, request: pb.FsckRequest, context: Any) -> pb.FsckResponse:
        """See the proto."""
        pools = list(self._cache.pools)
        return pb.FsckResponse(
            epoch=self._cache.epoch,
            checked_pages=sum(pool.table.total for pool in pools),
            checked_sequences=sum(len(pool.sequences) for pool in pools),
            checked_index_entries=sum(len(pool.index) for pool in pools),
            violations=list(self._cache.check()),
        )

    @maps_errors
    async def ForkSequence(self, request: pb.ForkSequenceRequest, context: Any) -> pb.ForkSequenceResponse:
        """See the proto."""
        _check_name(request.parent_sequence_id, "parent_sequence_id")
        _check_name(request.child_sequence_id, "child_sequence_id")
        grant, child = self._cache.fork(request.session_id, request.parent_sequence_id, request.child_sequence_id)
        return pb.ForkSequenceResponse(
            epoch=self._cache.epoch, grant=_grant(child.id, grant), total_tokens=len(child.tokens)
        )

    @maps_errors
    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        """See the proto."""
        _check_name(request.salt, "salt", least=0)
        answers = self._cache.explain(request.pool_id, list(request.prompt), request.salt)
        return pb.ExplainPrefixResponse(epoch=self._cache.epoch, pages=[_page_answer(answer) for answer in answers])

    @maps_errors
    async def EvictPages(self, request: pb.EvictPagesRequest, context: Any) -> pb.EvictPagesResponse:
        """See the proto."""
        most = request.max_pages if request.HasField("max_pages") else None
        count = self._cache.evict_pages(request.pool_id, most)
        return pb.EvictPagesResponse(epoch=self._cache.epoch, evicted_pages=count)

    @maps_errors
    async def ExpireSequences(self, request: pb.ExpireSequencesRequest, context: Any) -> pb.ExpireSequencesResponse:
        """See the proto."""
        if not request.HasField("older_than") or request.older_than.ToNanoseconds() < 0:
            raise FieldInvalid("older_than must be a duration of 0 s or more", field="older_than")
        count = self._cache.expire_sequences(request.older_than.ToNanoseconds() / 1e9)
        return pb.ExpireSequencesResponse(epoch=self._cache.epoch, expired_sequences=count)

    @maps_errors
    async def DropPool(self, request: pb.DropPoolRequest, context: Any) -> pb.DropPoolResponse:
        """See the proto."""
        self._cache.drop_pool(request.pool_id)
        return pb.DropPoolResponse(epoch=self._cache.epoch)

    @maps_errors
    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """See the proto."""
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
                changed.clear()
                gap, events = ring.after(number)
                if why or gap:
                    # The snapshot is taken whole, before the first await, at the number it is true for.
                    number, snapshot = ring.last_number, list(_snapshot(self._cache, request.pool_id))
                    reset = pb.CacheReset(reason=why or pb.RESET_REASON_GAP)
                    yield pb.WatchEventsResponse(epoch=epoch, sequence_number=number, reset=reset)
                    for links in snapshot:
                        yield pb.WatchEventsResponse(epoch=epoch, sequence_number=number, stored=links)
                    why = pb.RESET_REASON_UNSPECIFIED
                    continue
                for event in events:
                    number = event.number
                    if not request.pool_id or event.pool_id == request.pool_id:
                        yield _event(event, epoch)
                if not events:
                    await changed.wait()
        finally:
            unsubscribe()
            self._watchers.discard(changed)

    def _sequence(self, sequence: Sequence, pool: Pool) -> pb.Sequence:
        now = self._cache.now()
        return pb.Sequence(
            session_id=sequence.session_id,
            sequence_id=sequence.id,
            pool_id=pool.id,
            total_tokens=len(sequence.tokens),
            total_pages=len(sequence.pages),
            published_pages=sequence.published,
            cached_tokens=sequence.cached_tokens,
            age=_duration(now - sequence.created_at),
            idle=_duration(now - sequence.last_access),
            access_count=sequence.access_count,
        )


def _pool_stats(pool: Pool, sessions: int) -> pb.PoolStats:
    table, totals = pool.table, pool.totals
    return pb.PoolStats(
        pool_id=pool.id,
        layout=_layout_pb(pool.layout),
        page_bytes=pool.layout.page_bytes,
        total_pages=table.total,
        free_pages=table.free_count,
        held_pages=table.held_count,
        cached_pages=table.cached_count,
        quarantined_pages=table.quarantined_count,
        never_used_pages=table.never_used_count,
        recycled_pages=table.recycled_count,
        sessions=sessions,
        active_sequences=len(pool.sequences),
        total_tokens=sum(len(sequence.tokens) for sequence in pool.sequences),
        lookup_tokens=totals.lookup_tokens,
        hit_tokens=totals.hit_tokens,
        granted_pages=totals.granted_pages,
        published_pages=totals.published_pages,
        evicted_pages=totals.evicted_pages,
        expired_pages=totals.expired_pages,
        refused_demands=totals.refused_demands,
    )


def _grant(sequence_id: str, grant: Grant) -> pb.SequenceGrant:
    return pb.SequenceGrant(
        sequence_id=sequence_id,
        first_index=grant.first_index,
        pages=[_page(reference) for reference in grant.pages],
        cached_tokens=grant.cached_tokens,
        copies=[
            pb.PageCopy(index=copy.index, source=_page(copy.source), target=_page(copy.target)) for copy in grant.copies
        ],
    )


def _page_answer(answer: PageAnswer) -> pb.PageExplanation:
    return pb.PageExplanation(
        outcome=getattr(pb, f"PAGE_OUTCOME_{answer.outcome.name}"),
        page=_page(answer.page) if answer.page is not None else None,
        diverged_at=answer.diverged_at,
    )


def _page(reference: tuple[int, int]) -> pb.PageRef:
    return pb.PageRef(page_id=reference[0], generation=reference[1])


def _event(event: Event, epoch: int) -> pb.WatchEventsResponse:
    answer = pb.WatchEventsResponse(epoch=epoch, sequence_number=event.number)
    getattr(answer, _EVENT_FIELDS[event.kind]).CopyFrom(_links(event.pool_id, event.links))
    return answer


def _links(pool_id: str, links: list[Link]) -> pb.CacheLinks:
    return pb.CacheLinks(
        pool_id=pool_id, hashes=[link.hash for link in links], parent_hashes=[link.parent for link in links]
    )


def _snapshot(cache: KvCache, pool_id: str) -> Iterator[pb.CacheLinks]:
    for pool in cache.pools:
        if not pool_id or pool.id == pool_id:
            links = pool.index.links()
            while chunk := list(islice(links, MAX_LINKS)):
                yield _links(pool.id, chunk)


def _demand(item: pb.SequenceDemand, field: str) -> Demand:
    opening = item.opening if item.HasField("opening") else None
    _check_name(item.sequence_id, f"{field}.sequence_id")
    if opening is not None:
        _check_name(opening.salt, f"{field}.opening.salt", least=0)
    return Demand(
        sequence_id=item.sequence_id,
        prompt=list(opening.prompt) if opening is not None else None,
        salt=opening.salt if opening is not None else "",
        start=item.start,
        tokens=list(item.tokens),
        total_pages=item.total_pages,
        known_pages=item.known_pages,
    )


def _layout(message: pb.PageLayout) -> PageLayout:
    return PageLayout(
        page_size=message.page_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        dtype=_DTYPES.get(message.data_type, ""),
    )


def _layout_pb(layout: PageLayout) -> pb.PageLayout:
    return pb.PageLayout(
        page_size=layout.page_size,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        data_type=_DATA_TYPES[layout.dtype],
    )


def _process(message: pb.ProcessIdentity) -> Process | None:
    if not message.HasField("pid") or not message.HasField("start_time"):
        return None
    return Process(message.pid, message.start_time, message.pid_namespace)


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _check_name(name: str, field: str, *, least: int = 1) -> None:
    if not least <= len(name) <= MAX_NAME:
        raise FieldInvalid(
            f"{field} has {len(name)} characters; it must have {least} to {MAX_NAME}", field=field, limit=MAX_NAME
        )


def _check_items(count: int, field: str) -> None:
    if count > MAX_ITEMS:
        raise FieldInvalid(f"{field} has {count} items; it may have {MAX_ITEMS}", field=field, limit=MAX_ITEMS)


def _ids(ids: Any, field: str) -> list[str]:
    _check_items(len(ids), field)
    for at, name in enumerate(ids):
        _check_name(name, f"{field}[{at}]")
    return list(ids)


def _cursor(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise FieldInvalid(f"cursor {text[:MAX_NAME]!r} is not one that ListSequences gave", field="cursor")
    return int(text)
