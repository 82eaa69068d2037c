"""TLS of a channel: the CA that the server's certificate is checked with, and a certificate of the client's own."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from rocmforge.client.errors import InvalidConfiguration


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
        ca, cert, key = read_file(ca_flag, self.ca), None, None
        check_ca(ca_flag, self.ca)
        if self.cert is not None and self.key is not None:
            cert, key = read_file(cert_flag, self.cert), read_file(key_flag, self.key)
            check_pair(cert_flag, self.cert, self.key)
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


def read_file(flag: str, path: Path) -> bytes:
    """The bytes of a file. Raises InvalidConfiguration, which names ``flag``."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"{flag}: cannot read {path}: {error.strerror}", field=flag) from error


def check_pair(flag: str, cert: Path, key: Path) -> None:
    """Raise InvalidConfiguration unless the two files are a certificate and its key, without a password."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(
            f"{flag}: {cert} and {key} are not a PEM certificate and its key: {error}", field=flag
        ) from error


def check_ca(flag: str, path: Path) -> None:
    """Raise InvalidConfiguration unless the file has a PEM certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(f"{flag}: {path} has no PEM certificate: {error}", field=flag) from error
