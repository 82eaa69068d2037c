"""The settings of ``services.common.serving``: listen addresses, TLS, metrics, drain time and log level."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.edge.listener import Listener, check_exposure
from services.common.edge.tls import Tls
from services.common.errors import InvalidConfiguration
from services.common.logs import LOG_LEVELS
from services.common.settings import setting
from services.common.tracing import collector
from services.common.values import Kind, one_of, seconds, share, switch, whole

address = Kind(Listener.parse, "unix:/path or host:port")
tcp_address = Kind(Listener.parse_tcp, "host:port")
file_path = Kind(Path, "path")


def listen(socket_name: str, port: int | None = None) -> Any:
    """The listen setting. Its default is a unix socket of this user and, given a port, that one of the loopback
    interface, where any user of the machine can call.
    """

    def default() -> list[Listener]:
        local = [] if port is None else [Listener(host="127.0.0.1", port=port)]
        return [Listener(path=runtime_dir() / socket_name), *local]

    return _listen(default)


def _listen(default: Any) -> Any:
    help = "address to listen on, unix:/path or host:port; repeatable"
    return setting(address, default, help, name="listen", many=True, metavar="ADDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The settings common to both services. Each redeclares ``listeners`` with its own default."""

    listeners: list[Listener] = _listen([])
    tls_cert: Path | None = setting(file_path, None, "PEM certificate for the TCP listeners", metavar="FILE")
    tls_key: Path | None = setting(file_path, None, "PEM private key of --tls-cert", metavar="FILE")
    tls_client_ca: Path | None = setting(
        file_path, None, "PEM CA certificate that must have signed client certificates", metavar="FILE"
    )
    insecure: bool = setting(switch, False, "allow listening beyond this host without mutual TLS")
    max_connections: int = setting(
        whole(1, 1 << 20),
        1024,
        "most connections over TCP, and as many over unix sockets; fewer where the limit on open files is low",
        metavar="N",
    )
    metrics: Listener | None = setting(
        tcp_address,
        None,
        "serve Prometheus metrics on host:port, without TLS; default: off",
        metavar="ADDR",
    )
    otlp_endpoint: str | None = setting(
        collector.endpoint,
        None,
        "send OpenTelemetry traces to the OTLP/gRPC collector at http://host:port, or https://host:port; needs the "
        "extra `otel`; default: off",
        metavar="URL",
    )
    trace_ratio: float = setting(
        share,
        0.01,
        "share of calls to trace, 0 to 1, of those whose caller has not decided: a traceparent's sampled flag decides",
        metavar="X",
    )
    grace_s: float = setting(
        seconds(0, 3600),
        25.0,
        "seconds that calls in flight may take to end after SIGTERM; less than a container has to stop",
        name="grace",
        metavar="S",
    )
    log_level: str = setting(
        one_of(*LOG_LEVELS),
        "info",
        f"minimum level of logged events: {', '.join(LOG_LEVELS)}; debug includes every call",
        metavar="L",
    )

    @property
    def tls(self) -> Tls | None:
        """The TLS files, if any. Raises InvalidConfiguration if the certificate or the key is missing."""
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise InvalidConfiguration("--tls-cert and --tls-key must be given together", field="--tls-cert")
        return Tls(self.tls_cert, self.tls_key, self.tls_client_ca)

    def check_exposure(self, *, tokens: bool = False) -> None:
        """Reject addresses that other hosts can reach without mutual TLS, or TLS and ``tokens``. Raises
        InvalidConfiguration.
        """
        clear = collector.in_clear(self.otlp_endpoint) if self.otlp_endpoint is not None else ""
        check_exposure(self.listeners, self.tls, self.insecure, self.metrics, tokens=tokens, collector=clear)


#: The fields of `Listening` that can change while a service runs.
LIVE = frozenset({"log_level", "grace_s"})


def runtime_dir() -> Path:
    """The default directory for sockets, private to the user."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) / "rocmforge" if os.path.isabs(base) else Path(f"/tmp/rocmforge-{os.getuid()}")
