"""Which directories, sockets and files a process trusts: those of its own user and of root, which nobody else can
replace.

Whoever may write to a directory may replace everything in it, so a path is worth the least trusted directory on the way
to it. Each name on the way must belong to a trusted user, symbolic links included: a stranger's link is not followed.
Nothing has to be checked twice, since only trusted users could change what has been checked.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rocmforge.client.errors import InvalidConfiguration

ROOT_UID = 0
MAX_LINKS = 40

_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_EVERY_UID = 2**32 - 1


def trusted(uid: int, *others: int) -> bool:
    """Whether a user is this one, root, or one of the others."""
    return uid in (ROOT_UID, os.geteuid(), *others)


def check_directory(directory: Path, flag: str, *others: int) -> None:
    """Check that only this user, root and ``others`` could replace what is in a directory.

    It must belong to one of them and be writable by nobody else; directories above it may be sticky instead, as /tmp
    is. Raises InvalidConfiguration, or OSError if it cannot be looked at.
    """

    real, found = check_way(directory, directory, flag, *others)
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidConfiguration(f"{flag} {directory}: not a directory", field=flag)
    if not trusted(found.st_uid, *others):
        raise _replaceable(directory, flag, f"{real} belongs to uid {found.st_uid}")
    if _shared(found):
        raise _replaceable(directory, flag, f"{real} has mode {stat.S_IMODE(found.st_mode):04o}")


def check_socket(path: Path, flag: str, *others: int) -> int | None:
    """Check a unix socket before connecting to it: its directory, and that it belongs to a trusted user.

    Returns the uid of its owner; None if nothing is there, or nothing that can be looked at. Raises
    InvalidConfiguration.
    """
    path = path.absolute()
    try:
        found = os.lstat(path)
        check_directory(path.parent, flag, *others)
    except OSError:
        return None  # connecting will say why
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidConfiguration(f"{flag} unix:{path}: not a socket", field=flag)
    if not trusted(found.st_uid, *others):
        raise InvalidConfiguration(
            f"{flag} unix:{path}: belongs to uid {found.st_uid}, whom uid {os.geteuid()} does not trust", field=flag
        )
    return found.st_uid


def open_file(path: Path, *others: int) -> int:
    """Open a trusted user's regular file for reading and writing; returns its descriptor.

    Symbolic links are not followed, and opening something else (a pipe, a device) neither waits nor does anything to
    it. Raises OSError, PermissionError if the file is somebody else's or not a regular one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if not trusted(found.st_uid, *others):
            raise PermissionError(f"{path} belongs to uid {found.st_uid}")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def check_way(path: Path, directory: Path, flag: str, *others: int) -> tuple[Path, os.stat_result]:
    """Check all that looking up ``path`` passes; returns what is at its end. Errors name ``directory``."""
    real, found = Path("/"), os.lstat("/")
    for real, found in _way(path):
        if not trusted(found.st_uid, *others, *_unmapped_root()):
            raise _replaceable(directory, flag, f"{real} belongs to uid {found.st_uid}")
        if not stat.S_ISLNK(found.st_mode) and _shared(found) and not found.st_mode & stat.S_ISVTX:
            raise _replaceable(directory, flag, f"{real} has mode {stat.S_IMODE(found.st_mode):04o}")
    return real, found


def _replaceable(directory: Path, flag: str, why: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"{flag} {directory}: other users could replace what is in it: {why}; "
        f"the directory must belong to uid {os.geteuid()} or root and be writable by no one else",
        field=flag,
    )


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every directory and link that looking up an absolute path passes, and what is at its end. Raises OSError."""
    at, names, links = Path("/"), deque(path.parts[1:]), 0
    yield at, os.lstat(at)
    while names:
        name = names.popleft()
        if name == "..":
            at = at.parent
            continue
        found = os.lstat(at / name)
        yield at / name, found
        if not stat.S_ISLNK(found.st_mode):
            at /= name
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(f"{path}: more than {MAX_LINKS} symbolic links")
        target = Path(os.readlink(at / name))
        if target.is_absolute():
            at = Path("/")
        names.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))


def _shared(found: os.stat_result) -> bool:
    return bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _unmapped_root() -> tuple[int, ...]:
    """How root appears in a user namespace that does not map it; nobody outside of such a namespace is meant."""
    with contextlib.suppress(OSError, ValueError):
        if sum(int(line.split()[2]) for line in _UID_MAP.read_text().splitlines()) < _EVERY_UID:
            return (int(_OVERFLOW_UID.read_text()),)
    return ()
