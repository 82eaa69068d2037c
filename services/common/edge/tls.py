"""TLS of listeners, with certificates that are read again when their files change.

gRPC asks for the certificates before each handshake, so a renewed one counts from the next connection on, and those
that there are go on. A file that cannot be used changes nothing.

gRPC has no setting for the lowest version of TLS, only one for the ciphers of TLS 1.2, which it reads when it is first
imported: `services/__init__.py` leaves it the one that needs a key which both sides know beforehand. No two processes
have one, so what is spoken is TLS 1.3.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from rocmforge.client.transport.tls import check_ca, check_pair, read_file
from services.common.errors import InvalidConfiguration

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. With ``client_ca``, every client must present a certificate signed by that CA."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> Certificates:
        """Read the files. Raises InvalidConfiguration, naming a file that cannot be read or used."""
        return Certificates(self)


class Certificates:
    """A server's certificates, as of the last change of their files that left them usable.

    ``server`` is what a listener is bound with. Threads of gRPC ask for the certificates.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._looked = self._look()
        read = self._read()
        self._fresh: grpc.ServerCertificateConfiguration | None = None
        self.server = grpc.dynamic_ssl_server_credentials(read, self._changed, tls.client_ca is not None)

    def reload(self) -> None:
        """Read the files even if they look unchanged, and log whether they can be used."""
        with self._lock:
            self._looked = self._look()
            self._fresh = self._read_or_log()

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC is to use from now on, None for no change. gRPC's threads ask before each handshake."""
        with self._lock:
            looked = self._look()
            if looked != self._looked:
                self._looked = looked
                self._fresh = self._read_or_log()
            fresh, self._fresh = self._fresh, None
            return fresh

    def _read_or_log(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            read = self._read()
        except InvalidConfiguration as error:
            log.error("certificates_kept", reason=error.reason, detail=error.message)
            return None
        log.info("certificates_read", cert=str(self._tls.cert))
        return read

    def _look(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file is written or replaced."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self._tls.cert, self._tls.key, self._tls.client_ca):
            state = None
            with contextlib.suppress(OSError):
                if path is not None:
                    at = os.stat(path)
                    state = (at.st_mtime_ns, at.st_size, at.st_ino)
            found.append(state)
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        tls = self._tls
        cert, key = read_file("--tls-cert", tls.cert), read_file("--tls-key", tls.key)
        check_pair("--tls-cert", tls.cert, tls.key)
        ca = None
        if tls.client_ca is not None:
            ca = read_file("--tls-client-ca", tls.client_ca)
            check_ca("--tls-client-ca", tls.client_ca)
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)
