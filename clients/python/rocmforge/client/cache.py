"""A session with the KV-cache daemon: its memory mapped, its lease kept, its step calls made.

The engine's thread makes every call but one: a small thread renews the lease when no other call has done so for a
third of its ttl.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc

from rocmforge.client.arena.announced import Announced
from rocmforge.client.arena.device import DevicePages, map_device_pages
from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from rocmforge.client.arena.host import HostPages, map_pages
from rocmforge.client.demands import Demand, Grant
from rocmforge.client.errors import AttachMismatch, InvalidConfiguration, KvCacheDown, ServiceError, SessionExpired
from rocmforge.client.events import LOGGED, EventLog
from rocmforge.client.layout import Layout
from rocmforge.client.lease import Lease, LeaseKeeper
from rocmforge.client.messages import demand_messages, grants, in_parts, opening_request
from rocmforge.client.options import OnCall, Options, check_options
from rocmforge.client.step import Answer, Attempt, Part, Step, error_of
from rocmforge.client.transport.channel import channel_to
from rocmforge.client.transport.connection import Connection, Metadata
from rocmforge.client.transport.paths import check_socket
from rocmforge.client.transport.tls import ClientTls
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc

MAX_CALL_S = 2.0
CLOSE_S = 0.5
#: gRPC connects to the remainder of a larger one.
MAX_PORT = 65535

#: The pages of a session.
Pages: TypeAlias = HostPages | DevicePages


@dataclass(frozen=True, slots=True)
class _Session:
    id: str
    lease: Lease
    pages: Pages


class KvCache:
    """The pages of a daemon's pool, for one engine. `connect` opens the session; an instance made without it has none
    until `reopen`.

    - ``target``: the daemon's address as gRPC writes it, such as ``unix:/run/user/1000/rocmforge/kvcache.sock``.
    - ``pool_id``: engines that name the same pool share K and V, so they must have the same weights and numerics.
    - ``layout``: a `PageLayout`, or an `OpaqueLayout` that only the engines know the inside of.
    - ``client_name``: for logs. ``engine_name``, ``model``: how the daemon's KV events name the engine and its model.
    - ``pool_pages``: pages of the pool if this session creates it; None takes the daemon's default.
    - ``max_pages``: the most pages that the session's sequences hold together; a shared one counts for each.
    - ``ttl_s``: the lease in seconds, 1 to 600; None takes the daemon's default, 10.
    - ``gpu``: the GPU that has the pages, or its ordinal; None for pages in host memory.
    - ``owner``: the uid that the daemon runs as, None if it is this one's or root's.
    - ``tls``: the certificates of a daemon that is called over TCP.
    - ``flag``: what ``target`` is called in errors. ``on_call``: hears of every call that has ended. ``log``: takes
      events. ``clock``: a monotonic one, in seconds.

    One thread makes the calls, of the process that made the instance: a fork of it has no session. `may_write`,
    `epoch`, `total_pages` and `available_pages` may be read on any.

    The laws of a client: write only to pages granted to a live sequence of yours, and not to a shared one's tokens;
    report tokens only when the work that wrote their K and V has synchronised; before each write, and again before you
    use what was computed, ask `may_write`; call `reopen` and `close` only when nothing of yours still writes.

    Raises InvalidConfiguration for a dtype that is unknown, a number that is out of range, or a GPU that is not there.
    """

    def __init__(
        self,
        target: str,
        pool_id: str,
        layout: Layout,
        *,
        client_name: str = "",
        engine_name: str = "",
        model: str = "",
        pool_pages: int | None = None,
        max_pages: int | None = None,
        ttl_s: float | None = None,
        gpu: Gpu | int | None = None,
        owner: int | None = None,
        tls: ClientTls | None = None,
        flag: str = "target",
        on_call: OnCall | None = None,
        log: EventLog = LOGGED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.pool_id = pool_id
        self.layout = layout
        self._gpu = Runtime.load().gpu(gpu) if isinstance(gpu, int) else gpu
        layout.page_bytes  # noqa: B018  # raises for an unknown dtype
        check_options(pool_pages=pool_pages, max_pages=max_pages, ttl_s=ttl_s)
        self._request = partial(
            opening_request,
            pool_id,
            layout,
            client_name=client_name,
            engine_name=engine_name,
            model=model,
            pool_pages=pool_pages,
            max_pages=max_pages,
            ttl_s=ttl_s,
            device_ordinal=self._gpu.ordinal if self._gpu else None,
        )
        self._owner = owner
        self._flag = flag
        self._on_call = on_call
        self._log = log
        self._clock = clock
        self._connection = Connection(
            partial(channel_to, target, tls), kvcache_pb2_grpc.KvCacheServiceStub, replace_lost=tls is not None, log=log
        )
        # gRPC's own futures start a thread for each call, and contend with the step for the interpreter all the while.
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="kvcache-call")
        self._closed = False
        self._process = os.getpid()
        self._session: _Session | None = None
        self._to_close: list[str] = []  # unmapped, and the daemon does not know yet
        self._total_pages = 0
        self._available_pages: int | None = None
        self._keeper = LeaseKeeper(lambda: self._session.lease if self._session else None, self._renew, clock, log)

    @classmethod
    def connect(cls, target: str, pool_id: str, layout: Layout, **options: Unpack[Options]) -> Self:
        """Open a session; takes what the class takes, and raises what `reopen` raises."""
        cache = cls(target, pool_id, layout, **options)
        try:
            cache.reopen()
        except BaseException:
            cache.close()
            raise
        return cache

    def __enter__(self) -> Self:
        """The session, closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    @property
    def total_pages(self) -> int:
        """Pages in the pool, as of the last session."""
        return self._total_pages

    @property
    def available_pages(self) -> int | None:
        """Pages of the whole pool that are free or evictable: of the last step, or of the last renewal while there are
        no steps. None without a session, and before a daemon that does not say has answered a step.
        """
        return None if self._session is None else self._available_pages

    @property
    def epoch(self) -> int:
        """The epoch of the daemon that the session belongs to; 0 without a session."""
        session = self._session
        return session.lease.epoch if session else 0

    @property
    def pages(self) -> Pages:
        """The pages, for this session only. Raises SessionExpired without a session."""
        return self._live().pages

    @property
    def silent_since(self) -> float | None:
        """Since when, by the clock, the lease could not be renewed; None while it can, and without a session."""
        session = self._session
        return session.lease.silent_since if session is not None else None

    def may_write(self) -> bool:
        """Whether the pages are certain to be this session's for as long as a step takes, by this process's clock.

        False some time before the daemon would end the session: a fifth of its ttl.
        """
        session = self._session
        if session is None or session.lease.expired or self._is_copy():
            return False
        return self._clock() < session.lease.deadline

    def _is_copy(self) -> bool:
        """Whether this is another process, forked from the one that the session belongs to."""
        return os.getpid() != self._process

    def _live(self) -> _Session:
        if self._is_copy():
            raise SessionExpired(f"the session belongs to process {self._process}; a fork of it opens one of its own")
        if self._session is None:
            raise SessionExpired("no session is open")
        return self._session

    # --- the step call --------------------------------------------------------------------------------------------

    def step(
        self, demands: Items[Demand], removed: Items[str] = (), *, prefill_tokens_per_s: float = 0.0
    ) -> list[Grant]:
        """Make a step call and wait for it: `start_step` and `Step.result` in one."""
        return self.start_step(demands, removed, prefill_tokens_per_s=prefill_tokens_per_s).result()

    def start_step(
        self,
        demands: Items[Demand],
        removed: Items[str] = (),
        *,
        traceparent: str = "",
        prefill_tokens_per_s: float = 0.0,
    ) -> Step:
        """Send one AllocatePages, or several, one after the other, when the prompts are too long for one.

        The ``removed`` sequences go first: no step in flight may use their pages. Then the ``demands`` are served in
        order. Does not block: a thread of its own makes the call. ``traceparent`` is a W3C trace context, which the
        daemon's spans of the call continue. ``prefill_tokens_per_s`` is how fast the engine prefills, 0 if it does not
        know: by it the daemon decides what to fetch from a lower tier. Raises SessionExpired without a session.
        """
        session = self._live()
        if isinstance(removed, str):
            raise TypeError(f"removed is {removed!r}: it must be a list of ids")
        parts: list[Part] = [
            (
                pb.AllocatePagesRequest(
                    session_id=session.id,
                    remove_sequence_ids=ended,
                    demands=demand_messages(some),
                    prefill_tokens_per_s=prefill_tokens_per_s,
                ),
                some,
            )
            for ended, some in in_parts(demands, removed)
        ]
        return Step(self, session.lease, parts, traceparent)

    def send(self, parts: list[Part], lease: Lease, traceparent: str) -> Attempt[Answer]:
        """Start one attempt at the calls of a step; what is answered to all of them is its result."""
        metadata = (("traceparent", traceparent),) if traceparent else None
        return Attempt(self._caller, partial(self._answered, parts, call_s(lease), metadata))

    def now(self) -> float:
        """The clock that leases are measured with."""
        return self._clock()

    def renew(self) -> None:
        """Extend the lease by its ttl, as any other call does. Seldom needed: a thread of the client does.

        Raises SessionExpired, KvCacheDown.
        """
        self._renew(self._live().lease)

    # --- the session ----------------------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Open a session, map its memory and verify the mapping. It has no sequences.

        Nothing of this process may still write the pages, and no array on them may be kept: the session before, lost or
        not, is closed first, and with that its pages are vouched for.

        Raises KvCacheDown when there is no answer, AttachMismatch when the memory does not match, and any error of
        OpenSession; InvalidConfiguration when the daemon's socket is not one that this user may trust; SessionExpired
        after `close`.
        """
        if self._closed or self._is_copy():
            raise SessionExpired("the client was closed, or belongs to another process: it opens no more sessions")
        self._let_go()
        self._check_socket()
        # Nobody else vouches: a session that the daemon did not hear closed would keep its pages from all.
        self._close_sessions(MAX_CALL_S)
        sent_at = self._clock()
        opened = self._call("OpenSession", self._request(), MAX_CALL_S)
        pages: Pages | None = None
        try:
            pages, seen = self._map(opened.arena)
            lease = Lease(opened.epoch, opened.ttl.ToNanoseconds() / 1e9, sent_at)
            sent_at = self._clock()
            attach = pb.AttachSessionRequest(session_id=opened.session_id, seen=seen)
            attached = self._call("AttachSession", attach, call_s(lease))
            lease.renewed(sent_at, attached.epoch)
            self._available_pages = attached.available_pages if attached.HasField("available_pages") else None
        except BaseException:
            self._vouch(opened.session_id, pages)
            self._close_best_effort()
            raise
        self._session, self._total_pages = _Session(opened.session_id, lease, pages), opened.arena.total_pages
        self._log.info(
            "session_opened",
            target=self.target,
            pool_id=opened.pool_id,
            session=opened.session_handle,
            epoch=f"{lease.epoch:016x}",
            pages=self._total_pages,
            ttl_s=lease.ttl_s,
        )
        self._keeper.start()

    def close(self) -> None:
        """Close the session for good, best effort. Nothing of this process may still write the pages. Idempotent.

        In a fork of this process it does nothing: the session is not the fork's to close.
        """
        if self._closed or self._is_copy():
            return
        self._closed = True
        self._keeper.close()
        self._caller.shutdown()
        self._let_go()
        self._close_best_effort()
        self._connection.close()

    def _check_socket(self) -> None:
        kind, _, path = self.target.partition(":")
        port = self.target.rpartition(":")[2]
        if not self.target or (kind not in ("unix", "unix-abstract") and port.isdigit() and int(port) > MAX_PORT):
            raise InvalidConfiguration(
                f"{self._flag} is {self.target!r}; it must be unix:/PATH, or HOST:PORT with a port of 1 to {MAX_PORT}",
                field=self._flag,
            )
        if kind == "unix-abstract":
            raise InvalidConfiguration(
                f"{self._flag} {self.target}: an abstract socket may be anybody's; name one in a directory, unix:/PATH",
                field=self._flag,
            )
        if kind == "unix":
            check_socket(Path(path), self._flag, *(() if self._owner is None else (self._owner,)))

    def _let_go(self) -> None:
        """Unmap the session's memory, if there is one, and remember to close it."""
        session, self._session = self._session, None
        if session is not None:
            session.lease.expired = True  # for a step of it that is still waited for
            self._vouch(session.id, session.pages)

    def _vouch(self, session_id: str, pages: Pages | None) -> None:
        """Unmap, and have the session closed, unless the GPU may still write its pages: then the daemon waits for the
        end of this process.
        """
        if pages is None or pages.close():
            self._to_close.append(session_id)
        else:
            self._log.error("session_not_vouched_for", pool_id=self.pool_id)

    def _close_sessions(self, timeout_s: float) -> None:
        """Close what is to be closed. Raises KvCacheDown when there is no answer; any answer will do."""
        while self._to_close:
            try:
                self._call("CloseSession", pb.CloseSessionRequest(session_id=self._to_close[0]), timeout_s)
            except KvCacheDown:
                raise
            except ServiceError as error:
                self._log.warning("session_not_closed", reason=error.reason, detail=error.message)
            del self._to_close[0]

    def _close_best_effort(self) -> None:
        """Silence is ignored: a session expires, and the end of the process speaks for it."""
        try:
            self._close_sessions(CLOSE_S)
        except KvCacheDown as error:
            self._log.info("session_not_closed", reason=error.reason, detail=error.message)

    def _map(self, arena: pb.Arena) -> tuple[Pages, bytes]:
        announced = Announced(arena.total_pages, arena.page_bytes, arena.size_bytes, arena.canary_offset)
        if self._gpu is None and arena.file_path:
            return map_pages(Path(arena.file_path), self.layout, announced, owner=self._owner)
        if self._gpu is not None and arena.device_ipc_handle:
            return map_device_pages(
                arena.device_ipc_handle,
                self.layout,
                announced,
                self._gpu,
                device_ordinal=arena.device_ordinal if arena.HasField("device_ordinal") else None,
                device_id=arena.device_id,
                log=self._log,
            )
        raise AttachMismatch("the daemon offers memory of a kind this client cannot map")

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return self._timed(method, request, timeout_s)
        except grpc.RpcError as failure:
            raise error_of(failure, self.target) from failure

    def _answered(self, parts: list[Part], timeout_s: float, metadata: Metadata | None) -> Answer:
        granted: list[Grant] = []
        for request, demands in parts:
            reply = self._timed("AllocatePages", request, timeout_s, metadata)
            granted += grants(reply, demands)  # made here, a step runs meanwhile
        self._available_pages = reply.available_pages
        return Answer(reply.epoch, granted)

    def _timed(self, method: str, request: Any, timeout_s: float, metadata: Metadata | None = None) -> Any:
        began, code = self._clock(), "UNKNOWN"
        try:
            reply = self._connection.call(method, request, timeout_s, metadata)
            code = "OK"
            return reply
        except grpc.RpcError as failure:
            code = failure.code().name
            raise
        finally:
            if self._on_call is not None:
                self._on_call(method, code, self._clock() - began)

    def _renew(self, lease: Lease) -> None:
        session = self._session
        if session is None or session.lease is not lease:
            return
        sent_at = self._clock()
        request = pb.RenewSessionRequest(session_id=session.id)
        answer = self._call("RenewSession", request, call_s(lease))
        lease.renewed(sent_at, answer.epoch)
        if answer.HasField("available_pages"):
            self._available_pages = answer.available_pages


def call_s(lease: Lease) -> float:
    """Seconds to wait for an answer: some attempts must fit into the lease."""
    return min(MAX_CALL_S, lease.ttl_s / 3)
