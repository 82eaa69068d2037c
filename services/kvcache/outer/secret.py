"""Files with a secret: a key or a password, readable by this user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rocmforge.client.transport.paths import trusted
from services.common.errors import InvalidConfiguration

KEY_BYTES = 32

_MOST_BYTES = 4096


def read_key(path: Path, flag: str) -> bytes:
    """A key of 32 bytes, from a file that has these bytes or 64 hexadecimal digits. Raises InvalidConfiguration."""
    data = _read_private(path, flag)
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidConfiguration(
            f"{flag} {path}: must have {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits; it has {len(data)} "
            f"bytes; `openssl rand -hex {KEY_BYTES}` writes one",
            field=flag,
        )
    return key


def read_password(path: Path, flag: str) -> str:
    """A password, without the line end after it. Raises InvalidConfiguration."""
    try:
        password = _read_private(path, flag).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidConfiguration(f"{flag} {path}: must be UTF-8", field=flag) from error
    if not password:
        raise InvalidConfiguration(f"{flag} {path}: is empty", field=flag)
    return password


def _read_private(path: Path, flag: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidConfiguration(f"{flag} {path}: not a regular file", field=flag)
            if not trusted(found.st_uid) or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise InvalidConfiguration(
                    f"{flag} {path}: must belong to uid {os.geteuid()} or root, with mode 0600 or less; it belongs to "
                    f"uid {found.st_uid}, with mode {stat.S_IMODE(found.st_mode):04o}",
                    field=flag,
                )
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidConfiguration(f"{flag} {path}: {error.strerror or error}", field=flag) from error
    if len(data) > _MOST_BYTES:
        raise InvalidConfiguration(f"{flag} {path}: at most {_MOST_BYTES} bytes", field=flag)
    return data
