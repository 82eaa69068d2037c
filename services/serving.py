"""Running a gRPC service: listeners and who may reach them, health, reflection, drain. Shared by both services."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.errors import InvalidConfiguration

log = structlog.get_logger()

#: Enough for 4096 demands with prompts; a request beyond it is refused by gRPC itself.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_UNIX_PATH_LIMIT = 107  # bytes of sockaddr_un.sun_path, less the terminator


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. With ``client_ca`` every client must present a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files. Raises InvalidConfiguration naming the one that cannot be read."""
        read: list[bytes] = []
        for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-client-ca", self.client_ca)):
            if path is None:
                continue
            try:
                read.append(path.read_bytes())
            except OSError as error:
                raise InvalidConfiguration(f"{flag}: cannot read {path}: {error.strerror}", field=flag) from error
        ca = read[2] if self.client_ca else None
        return grpc.ssl_server_credentials([(read[1], read[0])], ca, require_client_auth=ca is not None)


@dataclass(frozen=True, slots=True)
class Listener:
    """One address to listen on: a unix socket's path, or a TCP host and port (0 picks a free one)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Listener:
        """Read ``unix:/path``, ``host:port`` or ``[v6]:port``. Raises InvalidConfiguration."""
        if text.startswith("unix:"):
            path = Path(text.removeprefix("unix:"))
            if not path.is_absolute() or len(os.fsencode(path)) > _UNIX_PATH_LIMIT:
                raise InvalidConfiguration(
                    f"--listen {text}: a unix socket needs an absolute path of at most {_UNIX_PATH_LIMIT} bytes",
                    field="--listen",
                )
            return cls(path=path)
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidConfiguration(
                f"--listen {text}: want unix:/path or host:port with a port of 0 to 65535", field="--listen"
            )
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    @property
    def local_only(self) -> bool:
        """Whether only processes of this host can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_exposure(listeners: Sequence[Listener], tls: Tls | None, insecure: bool) -> None:
    """Refuse to listen beyond this host without mutual TLS, unless ``insecure`` says that it is meant.

    Raises InvalidConfiguration.
    """
    if not listeners:
        raise InvalidConfiguration("--listen: at least one address is needed", field="--listen")
    for listener in listeners:
        guarded = tls is not None and tls.client_ca is not None
        if not listener.local_only and not guarded and not insecure:
            raise InvalidConfiguration(
                f"--listen {listener}: reachable from other hosts, which needs --tls-cert, --tls-key and "
                "--tls-client-ca, or --insecure",
                field="--listen",
            )


class Serving:
    """A grpc.aio server with health and reflection, from bind to drain.

    Health says NOT_SERVING until ``ready()``; ``drain()`` flips it back, then lets running calls end.
    """

    def __init__(
        self, service: str, listeners: Sequence[Listener], *, tls: Tls | None = None, insecure: bool = False
    ) -> None:
        check_exposure(listeners, tls, insecure)
        self._service = service
        self._listeners = list(listeners)
        self._tls = tls
        self._health = health.aio.HealthServicer()
        self._paths: list[tuple[Path, int]] = []
        self.bound: list[str] = []
        # Without so_reuseport=0 a second server takes every other connection of a port in use, silently.
        self.server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ]
        )

    async def start(self) -> None:
        """Bind and serve. Raises InvalidConfiguration when an address is in use or cannot be had."""
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((self._service, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        credentials = self._tls.credentials() if self._tls else None
        for listener in self._listeners:
            self.bound.append(self._bind(listener, credentials))
        await self.server.start()

    def _bind(self, listener: Listener, credentials: grpc.ServerCredentials | None) -> str:
        if listener.path is not None:
            return self._bind_unix(listener.path)
        try:
            if credentials is not None:
                port = self.server.add_secure_port(str(listener), credentials)
            else:
                port = self.server.add_insecure_port(str(listener))
        except RuntimeError as error:
            raise InvalidConfiguration(
                f"--listen {listener}: cannot bind; is the port in use or the address not this host's?",
                field="--listen",
            ) from error
        return str(Listener(host=listener.host, port=port))

    def _bind_unix(self, path: Path) -> str:
        # gRPC unlinks whatever lies at the path, a living server's socket too: look first.
        if _answers(path):
            raise InvalidConfiguration(f"--listen unix:{path}: another server listens there", field="--listen")
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise InvalidConfiguration(f"--listen unix:{path}: exists and is no socket", field="--listen")
        previous = os.umask(0o177)
        try:
            # mkdir under this umask would make a directory nobody can enter; its mode is set right after.
            if not path.parent.exists():
                path.parent.mkdir(parents=False)
                path.parent.chmod(0o700)
            self.server.add_insecure_port(f"unix:{path}")
        except (OSError, RuntimeError) as error:
            raise InvalidConfiguration(f"--listen unix:{path}: cannot bind: {error}", field="--listen") from error
        finally:
            os.umask(previous)
        self._paths.append((path, path.stat().st_ino))
        return f"unix:{path}"

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", self._service):
            await self._health.set(name, status)

    async def ready(self) -> None:
        """Say SERVING."""
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def not_ready(self) -> None:
        """Say NOT_SERVING while calls go on."""
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Say NOT_SERVING for good, refuse new calls, let running ones end for ``grace_s`` seconds, then cut them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
        for path, inode in self._paths:
            # Only our own socket: somebody may have bound the path anew.
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``main`` with an event that SIGTERM or SIGINT sets; a second signal ends the process at once."""

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if stop.is_set():
                os._exit(128 + number)
            log.info("signal", number=number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await main(stop)

    asyncio.run(body())


def configure_logging() -> None:
    """Log structlog events to stderr: coloured lines on a terminal, one JSON object a line otherwise."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not sys.stderr.isatty():
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
