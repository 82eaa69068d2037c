"""TLS of listeners and of channels, with certificates that are read again when their files change.

gRPC asks for the certificates before each handshake, so a renewed one counts from the next connection on, and those
that there are go on. A file that cannot be used changes nothing.

gRPC has no setting for the lowest version of TLS, only one for the ciphers of TLS 1.2, which it reads when it is first
imported: `services/__init__.py` leaves it the one that needs a key which both sides know beforehand. No two processes
have one, so what is spoken is TLS 1.3.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

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


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: the CA that must have signed the server's certificate, and its own for mutual TLS.

    ``name`` is the name that the server's certificate must have, empty for the host that is connected to. ``flags`` are
    those that name the three files, for errors.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    name: str = ""
    flags: tuple[str, str, str] = ("--ca", "--cert", "--key")

    @property
    def options(self) -> list[tuple[str, str]]:
        """Options of the channel."""
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises InvalidConfiguration, naming a file that cannot be read or used."""
        ca_flag, cert_flag, key_flag = self.flags
        ca, cert, key = _read(ca_flag, self.ca), None, None
        _check_ca(ca_flag, self.ca)
        if self.cert is not None and self.key is not None:
            cert, key = _read(cert_flag, self.cert), _read(key_flag, self.key)
            _check_pair(cert_flag, self.cert, self.key)
        return grpc.ssl_channel_credentials(ca, key, cert)


def client_tls(
    ca: Path | None, cert: Path | None, key: Path | None, name: str = "", *, flags: tuple[str, str, str]
) -> ClientTls | None:
    """A client's files as they were given by ``flags``, None without any. Raises InvalidConfiguration if one is missing
    or one that is there cannot be used.
    """
    if ca is None and cert is None and key is None:
        return None
    if (cert is None) != (key is None):
        raise InvalidConfiguration(f"{flags[1]} and {flags[2]} must be given together", field=flags[1])
    if ca is None:
        raise InvalidConfiguration(f"{flags[1]} needs {flags[0]}", field=flags[0])
    found = ClientTls(ca, cert, key, name, flags)
    found.credentials()
    return found


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
        cert, key = _read("--tls-cert", tls.cert), _read("--tls-key", tls.key)
        _check_pair("--tls-cert", tls.cert, tls.key)
        ca = None
        if tls.client_ca is not None:
            ca = _read("--tls-client-ca", tls.client_ca)
            _check_ca("--tls-client-ca", tls.client_ca)
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"{flag}: cannot read {path}: {error.strerror}", field=flag) from error


def _check_pair(flag: str, cert: Path, key: Path) -> None:
    """Raise InvalidConfiguration unless the two files are a certificate and its key, without a password."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(
            f"{flag}: {cert} and {key} are not a PEM certificate and its key: {error}", field=flag
        ) from error


def _check_ca(flag: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(f"{flag}: {path} has no PEM certificate: {error}", field=flag) from error
