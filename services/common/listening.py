"""The settings of ``services.common.serving``: where a service listens, who may call it, how long it drains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import InvalidConfiguration
from services.common.serving import LOG_LEVELS, Listener, Tls, check_exposure
from services.common.settings import setting
from services.common.values import Kind, one_of, seconds, switch

address = Kind(Listener.parse, "unix:/path or host:port")
file_path = Kind(Path, "path")


def listen(socket_name: str, port: int) -> Any:
    """The setting of where to listen: by default on a unix socket of this user and on a port of this host alone."""

    def default() -> list[Listener]:
        return [Listener(path=runtime_dir() / socket_name), Listener(host="127.0.0.1", port=port)]

    return _listen(default)


def _listen(default: Any) -> Any:
    help = "unix:/path or host:port; may be repeated"
    return setting(address, default, help, name="listen", many=True, metavar="ADDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """What both services have. Each declares ``listeners`` again, with a default of its own."""

    listeners: list[Listener] = _listen([])
    tls_cert: Path | None = setting(file_path, None, "PEM certificate for the TCP listeners", metavar="FILE")
    tls_key: Path | None = setting(file_path, None, "PEM key of --tls-cert", metavar="FILE")
    tls_client_ca: Path | None = setting(
        file_path, None, "PEM authority that clients' certificates must be signed by", metavar="FILE"
    )
    insecure: bool = setting(switch, False, "allow addresses beyond this host without mutual TLS")
    metrics: Listener | None = setting(
        Kind(Listener.parse_tcp, "host:port"),
        None,
        "host:port where Prometheus finds metrics, without TLS; default: none",
        metavar="ADDR",
    )
    grace_s: float = setting(
        seconds(0, 3600), 10.0, "seconds that running calls have to end on SIGTERM", name="grace", metavar="S"
    )
    log_level: str = setting(
        one_of(*LOG_LEVELS),
        "info",
        f"the lowest level of events that are logged: {', '.join(LOG_LEVELS)}; debug has every call",
        metavar="L",
    )

    @property
    def tls(self) -> Tls | None:
        """The files for TLS. Raises InvalidConfiguration when only some are given."""
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise InvalidConfiguration("--tls-cert and --tls-key go together", field="--tls-cert")
        return Tls(self.tls_cert, self.tls_key, self.tls_client_ca)

    def check_exposure(self) -> None:
        """Refuse what other hosts could reach and must not. Raises InvalidConfiguration."""
        check_exposure(self.listeners, self.tls, self.insecure, self.metrics)


def runtime_dir() -> Path:
    """Where sockets lie unless told otherwise: private to the user."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) / "rocmforge" if os.path.isabs(base) else Path(f"/tmp/rocmforge-{os.getuid()}")
