"""Tokens: callers without a certificate show that they know a secret, and the service keeps only its hash.

A file has one token a line, ``NAME:SHA-256``. The tokens are random and long, so that a fast hash is enough: there is
nothing to guess that a slow one would make dearer, and a call is not held up by it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

import structlog

from rocmforge.client.transport.paths import trusted
from services.common.access.identity import Identity
from services.common.errors import InvalidConfiguration

log = structlog.get_logger()

FLAG = "--tokens"
PREFIX = "rocmforge_"
SECRET_BYTES = 32
MAX_FILE_BYTES = 1 << 20

_LINE = re.compile(r"([^:]+):([0-9a-f]{64})")


def make_token(name: str) -> tuple[str, str]:
    """A new token, and the line of the file that admits it as ``name``. Raises ValueError for an impossible name."""
    if ":" in name or name != name.strip() or name.startswith("#"):
        raise ValueError("a name has no colon, no blanks around it, and no # in front")
    Identity.parse(f"token:{name}")
    token = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return token, f"{name}:{_digest(token)}"


class Tokens:
    """The tokens of a file, read again when it changes; a file that cannot be used changes nothing.

    Raises InvalidConfiguration for a file that cannot be used at the start: unreadable, malformed, or one that other
    users could write to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked = self._look()
        self._names = self._read()

    def bearer(self, authorization: str) -> Identity | None:
        """Who an ``authorization`` header is from, None if its token is none of the file's."""
        self._refresh()
        scheme, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, name in self._names.items():  # all of them, whichever matches, so that timing reveals nothing
            if hmac.compare_digest(digest, given):
                found = name
        return Identity.of_token(found) if found is not None and scheme.lower() == "bearer" else None

    def reload(self) -> None:
        """Read the file even if it looks unchanged."""
        self._looked = self._look()
        self._read_or_keep()

    def _refresh(self) -> None:
        looked = self._look()
        if looked != self._looked:
            self._looked = looked
            self._read_or_keep()

    def _read_or_keep(self) -> None:
        try:
            self._names = self._read()
        except InvalidConfiguration as error:
            log.error("tokens_kept", reason=error.reason, detail=error.message)
        else:
            log.info("tokens_read", path=str(self._path), tokens=len(self._names))

    def _look(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid

    def _read(self) -> dict[str, str]:
        """Names by digest. Raises InvalidConfiguration."""
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise self._unusable("is not a regular file")
                if not trusted(found.st_uid):
                    raise self._unusable(f"belongs to uid {found.st_uid}")
                if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    raise self._unusable(f"has mode {stat.S_IMODE(found.st_mode):04o}: others could add tokens")
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror}") from error
        if len(data) > MAX_FILE_BYTES:
            raise self._unusable(f"is larger than {MAX_FILE_BYTES} bytes")
        names: dict[str, str] = {}
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            fits = _LINE.fullmatch(line.strip())
            if fits is None:
                raise self._unusable(f"line {number} is not NAME:SHA-256 in hexadecimal")
            if fits[2] in names:
                raise self._unusable(f"line {number} has the token of {names[fits[2]]} again")
            try:
                Identity.parse(f"token:{fits[1]}")
            except ValueError as error:
                raise self._unusable(f"line {number}: a name cannot be {fits[1]!r}") from error
            names[fits[2]] = fits[1]
        return names

    def _unusable(self, why: str) -> InvalidConfiguration:
        return InvalidConfiguration(f"{FLAG} {self._path}: {why}", field=FLAG)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
