"""Runs a gRPC service: listeners and their exposure, health, reflection, drain."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2_grpc

from services.common.access.acl import open_way
from services.common.access.identity import Identity
from services.common.access.in_flight import InFlight
from services.common.access.tokens import Tokens
from services.common.call_stats import CallStats
from services.common.edge import descriptors, keepalive, unix_sockets
from services.common.edge.health import LIVENESS, NOT_SERVING, SERVING, Health
from services.common.edge.listener import Listener, check_bindable, check_exposure
from services.common.edge.message_limit import MessageLimit, MessageLimits
from services.common.edge.reflection import Reflection
from services.common.edge.tls import Certificates, Tls
from services.common.edge.unix_sockets import guest_socket
from services.common.errors import InvalidConfiguration
from services.common.rpc import Identify, Readable, bearing, certified, unproven
from services.common.tracing.span import Tracing

log = structlog.get_logger()

#: The largest message of any service; methods have limits of their own.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

#: Seconds that a caller has to greet, TLS included.
HANDSHAKE_S = 20.0

_DEFAULT_LIMITS = MessageLimits({}, MessageLimit(MAX_MESSAGE_BYTES))


class Serving:
    """A service with health checking and reflection, from bind to drain.

    Every way in has a grpc.aio server of its own, which knows who comes that way: the unix sockets, where only this
    uid (and root) may connect; one more beside each for every uid of ``guests``, `guest_socket`, where only that uid
    may; and TCP, where a certificate shows it or nothing does. Guests come and go: ``admit``, ``dismiss``. They share
    the servicers, and ``in_flight``. Each has at most ``max_connections`` connections, and closes further ones.
    Readiness, the health of the service's name and of the whole server, is NOT_SERVING until ``ready()``, and for good
    from ``leave()`` on. Liveness is SERVING from the start until ``dead()``. ``drain()`` lets calls in flight end.
    ``limits`` are those of the service's messages; of far larger ones gRPC itself refuses to read the rest. ``tracing``
    begins the spans of its calls.
    """

    def __init__(
        self,
        service: str,
        listeners: Sequence[Listener],
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        max_connections: int = 1024,
        guests: Sequence[int] = (),
        in_flight: InFlight | None = None,
        limits: MessageLimits = _DEFAULT_LIMITS,
        tokens: Tokens | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        check_exposure(listeners, tls, insecure, tokens=tokens is not None)
        self._first_guests = guests
        self._guests: dict[int, grpc.aio.Server] = {}
        self._tracing = tracing
        self._in_flight = in_flight or InFlight()
        self._tokens = tokens
        self._service = service
        self._listeners = list(listeners)
        self._tls = tls
        self._max_connections = max_connections
        self._certificates: Certificates | None = None
        self._limits = limits
        self._health = Health()
        self._leaving = False
        self._paths: list[tuple[Path, int, int | None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._servers: list[grpc.aio.Server] = []
        self._registered: list[tuple[Callable[[Any], None], CallStats]] = []
        self.bound: list[str] = []

    def add(self, register: Callable[[Any], None], calls: CallStats) -> None:
        """Serve a servicer: ``register`` adds it to each server when it starts; ``calls`` counts its calls."""
        self._registered.append((register, calls))

    async def start(self) -> None:
        """Bind and serve. Raises InvalidConfiguration if an address is in use or cannot be bound."""
        self._set_ready(False)
        self._health.set([LIVENESS], SERVING)
        owner, mutual = Identity.of_uid(os.geteuid()), self._tls is not None and self._tls.client_ca is not None
        self._certificates = self._tls.credentials() if self._tls else None
        self._connections = descriptors.connections(self._max_connections, descriptors.raise_limit())
        local, remote = None, None
        for listener in self._listeners:
            if listener.path is not None:
                local = local or self._server(self._with_tokens(lambda context: owner, required=False))
                self.bound.append(self._bind_unix(local, listener.path))
            else:
                remote = remote or self._server(self._with_tokens(certified if mutual else unproven, required=True))
                self.bound.append(_bind_tcp(remote, listener, self._certificates))
        for uid in self._first_guests:
            self._bind_guest(uid)
        for server in self._servers:
            await server.start()

    def _with_tokens(self, identify: Identify, *, required: bool) -> Identify:
        return identify if self._tokens is None else bearing(self._tokens, identify, required=required)

    def _server(self, identify: Identify) -> grpc.aio.Server:
        # Whose message is a little too large shall hear so from its method, with a reason.
        # Without so_reuseport=0, a second server on a port in use would silently take every other connection.
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", min(2 * self._limits.size, MAX_MESSAGE_BYTES)),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                *keepalive.SERVER,
                ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
                ("grpc.max_allowed_incoming_connections", self._connections),
            ]
        )
        self._servers.append(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        Reflection((self._service, health.SERVICE_NAME)).add_to(server)
        for register, calls in self._registered:
            register(Readable(server, calls, self._limits, identify, self._in_flight, self._tracing))
        return server

    @property
    def guests(self) -> list[int]:
        """The uids that have a socket of their own."""
        return sorted(self._guests)

    def admit(self, guests: Collection[int]) -> None:
        """Serve more uids, each on a socket of its own beside each unix socket.

        Raises InvalidConfiguration, and serves none of the new ones then: their sockets are gone again.
        """
        new = sorted(set(guests) - set(self._guests))
        try:
            for uid in new:
                self._bind_guest(uid)
        except InvalidConfiguration:
            self.dismiss([uid for uid in new if uid in self._guests], 0)
            raise
        for uid in new:
            if uid in self._guests:
                self._starts[self._guests[uid]] = self._begin(self._guests[uid].start())

    def dismiss(self, guests: Collection[int], grace_s: float) -> None:
        """Take uids their sockets, at once; calls in flight have ``grace_s`` seconds to end."""
        for uid in guests:
            server = self._guests.pop(uid)
            self._servers.remove(server)
            for path, inode, _ in [one for one in self._paths if one[2] == uid]:
                unix_sockets.unlink(path, inode)
                self.bound.remove(f"unix:{path}")
            self._paths = [one for one in self._paths if one[2] != uid]
            self._begin(self._stop(server, grace_s))

    async def _stop(self, server: grpc.aio.Server, grace_s: float) -> None:
        # A server of gRPC's that is stopped while it starts ends the process with a segmentation fault.
        if (start := self._starts.pop(server, None)) is not None:
            await start
        await server.stop(grace_s)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _bind_guest(self, uid: int) -> None:
        guest = Identity.of_uid(uid)
        paths = [listener.path for listener in self._listeners if listener.path is not None]
        if not paths:
            return
        self._guests[uid] = server = self._server(lambda context: guest)
        for path in paths:
            open_way(path.parent, uid, "--listen")
            self.bound.append(self._bind_unix(server, guest_socket(path, uid), uid))

    def _bind_unix(self, server: grpc.aio.Server, path: Path, guest: int | None = None) -> str:
        self._paths.append((path, unix_sockets.bind(server, path, guest), guest))
        return f"unix:{path}"

    def _set_ready(self, ready: bool) -> None:
        self._health.set(("", self._service), SERVING if ready and not self._leaving else NOT_SERVING)

    def reload(self) -> None:
        """Read certificates and tokens again, if there are any; what cannot be used changes nothing and is logged."""
        if self._tokens is not None:
            self._tokens.reload()
        if self._certificates is not None:
            self._certificates.reload()

    def ready(self) -> None:
        """Set readiness to SERVING, unless the service is leaving."""
        self._set_ready(True)

    def not_ready(self) -> None:
        """Set readiness to NOT_SERVING; calls continue."""
        self._set_ready(False)

    def leave(self) -> None:
        """Set readiness to NOT_SERVING for good; calls continue, and new ones are still accepted."""
        self._leaving = True
        self._set_ready(False)

    def dead(self) -> None:
        """Set liveness to NOT_SERVING: only a restart helps."""
        self._health.set([LIVENESS], NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Leave, reject new calls, and cancel those in flight after ``grace_s`` seconds."""
        self.leave()
        self._health.end()
        await asyncio.gather(*(self._stop(server, grace_s) for server in self._servers))
        for path, inode, _ in self._paths:
            unix_sockets.unlink(path, inode)


def _bind_tcp(server: grpc.aio.Server, listener: Listener, certificates: Certificates | None) -> str:
    check_bindable(listener)
    try:
        if certificates is not None:
            port = server.add_secure_port(str(listener), certificates.server)
        else:
            port = server.add_insecure_port(str(listener))
    except RuntimeError as error:
        doubt = "" if certificates is None else "; check the TLS files"
        raise InvalidConfiguration(f"--listen {listener}: cannot bind{doubt}", field="--listen") from error
    return str(Listener(host=listener.host, port=port))


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[None]], hangup: Callable[[], None]) -> None:
    """Run ``main`` with an event that SIGTERM or SIGINT sets; a second signal ends the process immediately. SIGHUP
    calls ``hangup`` on the event loop.

    Uses uvloop: each call passes through the event loop several times, and every pass is cheaper there.
    """

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if stop.is_set():
                os._exit(128 + number)
            stop.set()
            log.info("signal", number=number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, hangup)
        await main(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
