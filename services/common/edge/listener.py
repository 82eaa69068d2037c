"""Addresses to listen on, and who may reach them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.edge.tls import Tls
from services.common.errors import InvalidConfiguration

_TCP = "host:port with a port of 0 to 65535"
_UNIX_PATH_LIMIT = 107  # bytes of sockaddr_un.sun_path, less the terminator


@dataclass(frozen=True, slots=True)
class Listener:
    """One address to listen on: a unix socket path, or a TCP host and port (0 picks a free port)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Listener:
        """Parse ``unix:/path``, ``host:port`` or ``[v6]:port``. Raises InvalidConfiguration."""
        if text.startswith("unix:"):
            path = Path(text.removeprefix("unix:"))
            encoded = os.fsencode(path)
            # gRPC takes addresses as text, on both sides, and percent-decodes them.
            spoken = "%" not in text and encoded.decode(errors="replace") == str(path)
            if not path.is_absolute() or len(encoded) > _UNIX_PATH_LIMIT or not spoken:
                raise InvalidConfiguration(
                    f"a unix socket path must be absolute, at most {_UNIX_PATH_LIMIT} bytes, UTF-8 and without %",
                    field="--listen",
                )
            return cls(path=path)
        try:
            return cls.parse_tcp(text)
        except ValueError as error:
            raise InvalidConfiguration(f"expected unix:/path or {_TCP}", field="--listen") from error

    @classmethod
    def parse_tcp(cls, text: str) -> Listener:
        """Parse only ``host:port`` or ``[v6]:port``. Raises ValueError, saying what was expected."""
        host, colon, port = text.rpartition(":")
        numbered = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
        if not colon or not host or not numbered or text.startswith("unix:"):
            raise ValueError(f"expected {_TCP}")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    @property
    def local_only(self) -> bool:
        """Whether only processes on this host can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_exposure(
    listeners: Sequence[Listener],
    tls: Tls | None,
    insecure: bool,
    metrics: Listener | None = None,
    *,
    tokens: bool = False,
    collector: str = "",
) -> None:
    """Refuse to listen beyond this host without mutual TLS, or TLS and ``tokens``, unless ``insecure`` is set.

    Metrics are always served without TLS. ``collector`` is the host that traces are sent to without TLS. Raises
    InvalidConfiguration.
    """
    if collector and not Listener(host=collector).local_only and not insecure:
        raise InvalidConfiguration(
            f"--otlp-endpoint: traces would go to {collector} without TLS, which requires --insecure; use https",
            field="--otlp-endpoint",
        )
    if metrics is not None and not metrics.local_only and not insecure:
        raise InvalidConfiguration(
            f"--metrics {metrics}: reachable from other hosts without TLS, which requires --insecure",
            field="--metrics",
        )
    if not listeners:
        raise InvalidConfiguration("--listen: at least one address is required", field="--listen")
    for listener in listeners:
        guarded = tls is not None and (tls.client_ca is not None or tokens)
        if not listener.local_only and not guarded and not insecure:
            raise InvalidConfiguration(
                f"--listen {listener}: reachable from other hosts, which requires --tls-cert, --tls-key and "
                "--tls-client-ca, or --insecure",
                field="--listen",
            )


def check_bindable(listener: Listener) -> None:
    """Raise InvalidConfiguration, with the reason, if a TCP address cannot be bound.

    A host name may resolve to several addresses: a port in use on any of them is an error, as is having none that can
    be bound. gRPC's core only logs the reason to stderr, in its own format, and does not return it; silencing the core
    (GRPC_VERBOSITY) would also hide failed TLS handshakes. If another process takes the port between this check and
    gRPC's bind, the bind still fails, with that log line.
    """
    where = f"--listen {listener}"
    try:
        found = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidConfiguration(f"{where}: {listener.host}: {error.strerror}", field="--listen") from error
    refused, bindable = None, False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: a port in TIME_WAIT is free
                probe.bind(address)
                probe.listen(1)  # two sockets may bind one port, but only one may listen
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InvalidConfiguration(f"{where}: the port is in use", field="--listen") from error
            refused = error
        else:
            bindable = True
    if refused is not None and not bindable:
        raise InvalidConfiguration(f"{where}: cannot bind: {refused.strerror}", field="--listen") from refused
