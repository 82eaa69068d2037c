"""Pages of the KV-cache daemon: one session over gRPC, its memory mapped, its lease kept.

The engine's thread makes every call but one: a small thread renews the lease when no other call has done so for a
third of its ttl.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import structlog

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.call_stats import CallStats
from services.common.edge import keepalive
from services.common.edge.message_limit import STEP_TOKENS
from services.common.edge.paths import check_socket
from services.common.edge.tls import ClientTls
from services.common.errors import (
    AttachMismatch,
    ExceedsPool,
    InvalidConfiguration,
    KvCacheDown,
    ServiceError,
    SessionExpired,
)
from services.common.gpu_ipc import Gpu
from services.common.serving import MAX_MESSAGE_BYTES
from services.engine.pages.connection import Connection
from services.engine.pages.device_arena import DevicePages, map_device_pages
from services.engine.pages.host_arena import Pages, map_pages, process_identity
from services.engine.pages.lease import Lease, LeaseKeeper
from services.engine.pages.source import Demand, Exchange, Geometry, Grant, PageCopy

log = structlog.get_logger()

ATTEMPTS = 2
MAX_CALL_S = 2.0
CLOSE_S = 0.5

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    # In fact how long the other side may take to greet, which outlasts a call: one that is busy is there.
    ("grpc.min_reconnect_backoff_ms", int(2000 * MAX_CALL_S)),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Or a channel that is made anew would find the connection of the one before it, and take that.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


_DATA_TYPES = {"f32": pb.DATA_TYPE_F32, "f16": pb.DATA_TYPE_F16, "bf16": pb.DATA_TYPE_BF16, "int8": pb.DATA_TYPE_INT8}


Reply = TypeVar("Reply")

#: A call of an exchange, and the demands that it makes.
_Part = tuple[pb.AllocatePagesRequest, Items[Demand]]


@dataclass(frozen=True, slots=True)
class _Answer:
    epoch: int
    grants: list[Grant]


@dataclass(frozen=True, slots=True)
class _Session:
    id: str
    lease: Lease
    memory: Pages | DevicePages


class GrpcPageSource:
    """A page source on a daemon's pool. Call ``reopen`` to open the first session, too.

    Engines with the same ``pool_id`` share K and V, so they must have the same weights. The lease lasts ``ttl_s``
    seconds, and a pool created by this session has ``pool_pages`` pages; None takes the daemon's default. With ``gpu``
    the pages are in its memory, otherwise in host memory. ``owner`` is the uid that the daemon runs as, None if it is
    this one or root; ``tls`` is how it shows who it is over TCP. ``calls`` counts the RPCs. Raises InvalidConfiguration
    for a page dtype that the backend does not support.
    """

    def __init__(
        self,
        target: str,
        pool_id: str,
        geometry: Geometry,
        *,
        client_name: str = "",
        pool_pages: int | None = None,
        ttl_s: float | None = None,
        gpu: Gpu | None = None,
        owner: int | None = None,
        tls: ClientTls | None = None,
        calls: CallStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if geometry.dtype not in (_DATA_TYPES if gpu else ("f32",)):
            raise InvalidConfiguration(f"pages of {geometry.dtype} are not supported by this backend")
        self.target = target
        self._pool_id = pool_id
        self._geometry = geometry
        self._client_name = client_name
        self._pool_pages = pool_pages
        self._ttl_s = ttl_s
        self._gpu = gpu
        self._owner = owner
        self._clock = clock
        self.calls = CallStats() if calls is None else calls
        self._tls = tls
        self._connection = Connection(self._connect, kvcache_pb2_grpc.KvCacheServiceStub, replace_lost=tls is not None)
        # gRPC's own futures start a thread for each call, and contend with the step for the interpreter all the while.
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="kvcache-call")
        self._session: _Session | None = None
        self._to_close: list[str] = []  # unmapped, and the daemon does not know yet
        self._total_pages = 0
        self._keeper = LeaseKeeper(lambda: self._session.lease if self._session else None, self._renew, clock)

    def _connect(self) -> grpc.Channel:
        options = [*_CHANNEL_OPTIONS, *keepalive.CLIENT]
        if self._tls is None:
            return grpc.insecure_channel(self.target, options=options)
        return grpc.secure_channel(self.target, self._tls.credentials(), options=[*options, *self._tls.options])

    @property
    def retains(self) -> bool:
        """Always true: the daemon supports retention."""
        return True

    @property
    def total_pages(self) -> int:
        """Pages in the pool, as of the last session."""
        return self._total_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._geometry.page_size

    @property
    def epoch(self) -> int:
        """The epoch of the daemon that the session belongs to; 0 without a session."""
        session = self._session
        return session.lease.epoch if session else 0

    @property
    def memory(self) -> Pages | DevicePages:
        """The pages, ``[page, layer, (k, v), kv_head, slot, head_dim]``; DevicePages on a GPU, for this session only.

        Raises SessionExpired without a session.
        """
        return self._live().memory

    def may_launch(self) -> bool:
        """Whether the lease has not expired and lasts, with a safety margin."""
        session = self._session
        return session is not None and not session.lease.expired and self._clock() < session.lease.deadline

    def _live(self) -> _Session:
        if self._session is None:
            raise SessionExpired("no session is open")
        return self._session

    # --- the step call --------------------------------------------------------------------------------------------

    def exchange(self, demands: Items[Demand], removed: Items[str]) -> Exchange:
        """Send one AllocatePages, or several, one after the other, when the prompts are too long for one.

        Raises SessionExpired without a session.
        """
        session = self._live()
        parts = [
            (pb.AllocatePagesRequest(session_id=session.id, demands=_demand_messages(some)), some)
            for some in _in_parts(demands)
        ]
        parts[0][0].remove_sequence_ids.extend(removed)
        return _Call(self, session, parts)

    def send(self, parts: list[_Part], session: _Session) -> Attempt[_Answer]:
        """Start one attempt at the calls of the session; what is answered to all of them is its result."""
        return Attempt(self._caller, partial(self._answered, parts, _call_s(session.lease)))

    def now(self) -> float:
        """The clock that leases are measured with."""
        return self._clock()

    # --- the session ----------------------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Open a session, map its memory and verify the mapping. No step may be in flight, and no view of the old
        memory may be kept: the session before, lost or not, is closed first, and with that its pages are vouched for.

        Raises KvCacheDown when there is no answer, AttachMismatch when the memory does not match, and any error of
        OpenSession; InvalidConfiguration when the daemon's socket is not one that this user may trust.
        """
        self._let_go()
        self._check_socket()
        # Nobody else vouches: a session that the daemon did not hear closed would keep its pages from all.
        self._close_sessions(MAX_CALL_S)
        sent_at = self._clock()
        opened = self._call("OpenSession", self._opening(), MAX_CALL_S)
        memory: Pages | DevicePages | None = None
        try:
            memory, seen = self._map(opened.arena)
            lease = Lease(opened.epoch, opened.ttl.ToNanoseconds() / 1e9, sent_at)
            sent_at = self._clock()
            attach = pb.AttachSessionRequest(session_id=opened.session_id, seen=seen)
            lease.renewed(sent_at, self._call("AttachSession", attach, _call_s(lease)).epoch)
        except BaseException:
            self._vouch(opened.session_id, memory)
            self._close_best_effort()
            raise
        self._session, self._total_pages = _Session(opened.session_id, lease, memory), opened.arena.total_pages
        log.info(
            "session_opened",
            target=self.target,
            pool_id=opened.pool_id,
            epoch=f"{lease.epoch:016x}",
            pages=self._total_pages,
            ttl_s=lease.ttl_s,
        )
        self._keeper.start()

    def close(self) -> None:
        """Close the session, best effort. Idempotent."""
        self._keeper.close()
        self._caller.shutdown()
        self._let_go()
        self._close_best_effort()
        self._connection.close()

    def _check_socket(self) -> None:
        kind, _, path = self.target.partition(":")
        if kind == "unix":
            check_socket(Path(path), "--kvcache", *self._others())

    def _others(self) -> tuple[int, ...]:
        return () if self._owner is None else (self._owner,)

    def _let_go(self) -> None:
        """Unmap the session's memory, if there is one, and remember to close it."""
        session, self._session = self._session, None
        if session is not None:
            self._vouch(session.id, session.memory)

    def _vouch(self, session_id: str, memory: Pages | DevicePages | None) -> None:
        """Unmap, and have the session closed, unless the GPU may still write its pages: then the daemon waits for the
        end of this process.
        """
        # A mapped file goes when its last array does, and nothing writes it but this thread.
        if not isinstance(memory, DevicePages) or memory.close():
            self._to_close.append(session_id)
        else:
            log.error("session_not_vouched_for", pool_id=self._pool_id)

    def _close_sessions(self, timeout_s: float) -> None:
        """Close what is to be closed. Raises KvCacheDown when there is no answer; any answer will do."""
        while self._to_close:
            try:
                self._call("CloseSession", pb.CloseSessionRequest(session_id=self._to_close[0]), timeout_s)
            except KvCacheDown:
                raise
            except ServiceError as error:
                log.warning("session_not_closed", reason=error.reason, detail=error.message)
            del self._to_close[0]

    def _close_best_effort(self) -> None:
        """Silence is ignored: a session expires, and the end of the process speaks for it."""
        try:
            self._close_sessions(CLOSE_S)
        except KvCacheDown as error:
            log.info("session_not_closed", reason=error.reason, detail=error.message)

    def _opening(self) -> pb.OpenSessionRequest:
        geometry = self._geometry
        request = pb.OpenSessionRequest(
            client_name=self._client_name,
            pool_id=self._pool_id,
            layout=pb.PageLayout(
                page_size=geometry.page_size,
                layers=geometry.layers,
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                data_type=_DATA_TYPES[geometry.dtype],
            ),
            pool_pages=self._pool_pages,
            process=_process(),
            device_ordinal=self._gpu.ordinal if self._gpu else None,
        )
        if self._ttl_s is not None:
            request.ttl.FromNanoseconds(int(self._ttl_s * 1e9))
        return request

    def _map(self, arena: pb.Arena) -> tuple[Pages | DevicePages, bytes]:
        announced = {
            "total_pages": arena.total_pages,
            "page_bytes": arena.page_bytes,
            "size_bytes": arena.size_bytes,
            "canary_offset": arena.canary_offset,
        }
        if self._gpu is None and arena.file_path:
            return map_pages(Path(arena.file_path), self._geometry, **announced, owner=self._owner)
        if self._gpu is not None and arena.device_ipc_handle:
            return map_device_pages(
                arena.device_ipc_handle,
                self._geometry,
                self._gpu,
                device_ordinal=arena.device_ordinal if arena.HasField("device_ordinal") else None,
                device_id=arena.device_id,
                **announced,
            )
        raise AttachMismatch("the daemon offers memory of a kind this backend cannot map")

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return self._timed(method, request, timeout_s)
        except grpc.RpcError as failure:
            raise _error_of(failure, self.target) from failure

    def _answered(self, parts: list[_Part], timeout_s: float) -> _Answer:
        grants: list[Grant] = []
        for request, demands in parts:
            reply = self._timed("AllocatePages", request, timeout_s)
            grants += _grants(reply, demands)  # made here, a step runs meanwhile
        return _Answer(reply.epoch, grants)

    def _timed(self, method: str, request: Any, timeout_s: float) -> Any:
        began, code = self._clock(), "UNKNOWN"
        try:
            reply = self._connection.call(method, request, timeout_s)
            code = "OK"
            return reply
        except grpc.RpcError as failure:
            code = failure.code().name
            raise
        finally:
            self.calls.done(method, code, self._clock() - began)

    def _renew(self, lease: Lease) -> None:
        session = self._session
        if session is None or session.lease is not lease:
            return
        sent_at = self._clock()
        request = pb.RenewSessionRequest(session_id=session.id)
        lease.renewed(sent_at, self._call("RenewSession", request, _call_s(lease)).epoch)


class Attempt(Generic[Reply]):
    """A call on its way to another thread, which makes it while this one has a step to run.

    An idle engine asks for the reply at once, before the other thread has begun: then this one makes the call, and
    neither waits for the other to wake up.
    """

    def __init__(self, caller: Executor, call: Callable[[], Reply]) -> None:
        self._call = call
        self._future = caller.submit(call)

    def result(self) -> Reply:
        """The reply. Raises what the call raises."""
        return self._call() if self._future.cancel() else self._future.result()


class _Call:
    """An exchange under way. Sent again as it is when nobody answers: a replay changes nothing more."""

    def __init__(self, source: GrpcPageSource, session: _Session, parts: list[_Part]) -> None:
        self._source, self._session, self._parts = source, session, parts
        self._send()

    def _send(self) -> None:
        self._sent_at = self._source.now()
        self._future = self._source.send(self._parts, self._session)

    def result(self) -> list[Grant]:
        """Wait for the grants. Raises SessionExpired, KvCacheDown and whatever the call is refused with."""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._send()
            try:
                answer = self._future.result()
                break
            except grpc.RpcError as failure:
                error = _error_of(failure, self._source.target)
                if not isinstance(error, KvCacheDown) or attempt + 1 == ATTEMPTS:
                    raise error from failure
        self._session.lease.renewed(self._sent_at, answer.epoch)
        return answer.grants


def _call_s(lease: Lease) -> float:
    """Seconds to wait for an answer: some attempts must fit into the lease."""
    return min(MAX_CALL_S, lease.ttl_s / 3)


def _in_parts(demands: Items[Demand]) -> list[Items[Demand]]:
    """The demands in order, in as many calls as their tokens need; nearly always in one."""
    if sum(map(_token_count, demands)) <= STEP_TOKENS:
        return [demands]
    parts, room = [list[Demand]()], STEP_TOKENS
    for demand in demands:
        count = _token_count(demand)
        if count > room and parts[-1]:
            parts.append([])
            room = STEP_TOKENS
        parts[-1].append(demand)
        room -= count
    return list(parts)


def _token_count(demand: Demand) -> int:
    return len(demand.tokens) if demand.opening is None else len(demand.opening.prompt)


def _is_too_long(demand: Demand) -> bool:
    """Whether no call can open it; such a demand is refused here, since a refused call would refuse them all."""
    return demand.opening is not None and len(demand.opening.prompt) > STEP_TOKENS


def _demand_messages(demands: Items[Demand]) -> Iterator[pb.Demand]:
    """In order: one message for each sequence to open, and one for all that go on in a row."""
    for opens, group in groupby(demands, attrgetter("opens")):
        if opens:
            yield from (pb.Demand(opening=_opening(demand)) for demand in group if not _is_too_long(demand))
        else:
            yield pb.Demand(steps=_steps(list(group)))


def _opening(demand: Demand) -> pb.SequenceOpening:
    message = pb.SequenceOpening(sequence_id=demand.sequence_id, total_pages=demand.total_pages)
    opening = demand.opening
    if opening is None:
        message.parent_sequence_id = demand.parent
        return message
    message.prompt.tokens.extend(opening.prompt)
    message.prompt.salt = opening.salt
    if opening.retention is not None:
        message.prompt.retention.ttl.FromNanoseconds(round(opening.retention.ttl_s * 1e9))
        message.prompt.retention.priority = opening.retention.priority
    return message


def _steps(demands: list[Demand]) -> pb.SequenceSteps:
    return pb.SequenceSteps(
        sequence_ids=[demand.sequence_id for demand in demands],
        starts=[demand.start for demand in demands],
        token_counts=[len(demand.tokens) for demand in demands],
        tokens=[token for demand in demands for token in demand.tokens],
        total_pages=[demand.total_pages for demand in demands],
        known_pages=[demand.known_pages for demand in demands],
    )


def _grants(reply: pb.AllocatePagesResponse, demands: Items[Demand]) -> list[Grant]:
    told, grants = deque(reply.grants), list[Grant]()
    for demand in demands:
        if told and told[0].sequence_id == demand.sequence_id:
            grants.append(_grant(told.popleft()))
        elif _is_too_long(demand):
            error = ExceedsPool(
                f"the prompt has {_token_count(demand)} tokens; a KV-cache daemon takes at most {STEP_TOKENS}",
                field="prompt",
                limit=STEP_TOKENS,
            )
            grants.append(Grant(demand.sequence_id, error=error))
        else:
            grants.append(Grant(demand.sequence_id, demand.known_pages))  # nothing to tell: it has what it asked for
    return grants


def _grant(grant: pb.SequenceGrant) -> Grant:
    if grant.HasField("error"):
        return Grant(grant.sequence_id, error=rpc.error_from_status(grant.error))
    pages = tuple(grant.page_ids[:])
    copies = tuple(PageCopy(copy.index, copy.source.page_id, copy.target.page_id) for copy in grant.copies)
    return Grant(grant.sequence_id, grant.first_index, pages, grant.cached_tokens, copies=copies)


def _error_of(failure: grpc.RpcError, target: str) -> ServiceError:
    error = rpc.error_from(failure)
    if failure.code() in _SILENT:
        return KvCacheDown(f"no answer from the KV-cache daemon at {target}: {error.message}")
    return error


def _process() -> pb.ProcessIdentity | None:
    found = process_identity()
    return found and pb.ProcessIdentity(pid=found[0], start_time=found[1], pid_namespace=found[2])
