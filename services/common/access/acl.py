"""Files that one more user may use: POSIX access control lists, written without a program's help.

Only the file's owner or root can give access. Where the file system keeps no such lists, root gives the file away.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path

from services.common.errors import InvalidConfiguration

_ACL = "system.posix_acl_access"
_VERSION = 2
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 2**32 - 1
_READ_WRITE, _SEARCH = 6, 1


def admit(path: Path, uid: int) -> None:
    """Let a user read and write a file, or connect to a socket, that so far is its owner's alone.

    Others let in before stay so. Raises OSError where neither a list nor, for root, giving it away is possible.
    """
    try:
        _add(path, uid, _READ_WRITE)
    except OSError as error:
        if error.errno != errno.ENOTSUP or os.geteuid() != 0:
            raise
        os.chown(path, uid, -1, follow_symlinks=False)


def dismiss(path: Path, uid: int) -> None:
    """Take back what ``admit`` gave. What the user has open stays open. Raises OSError."""
    if path.lstat().st_uid == uid:
        os.chown(path, os.geteuid(), -1, follow_symlinks=False)
        return
    entries = _entries(path)
    if entries.pop((_USER, uid), None) is not None:
        _write(path, entries)


def open_way(directory: Path, uid: int, flag: str) -> None:
    """Let a user pass through a directory of this user, without listing it or writing to it.

    Raises InvalidConfiguration, naming ``flag``, also if the user cannot reach the directory.
    """
    try:
        if directory.stat().st_uid == os.geteuid() and not _passes(directory, uid):
            _let_through(directory, uid)
        shut = next((one for one in (directory, *directory.parents) if not _passes(one, uid)), None)
    except OSError as error:
        raise InvalidConfiguration(
            f"{flag} {directory}: uid {uid} cannot be let in: {error.strerror}", field=flag
        ) from error
    if shut is not None:
        raise InvalidConfiguration(
            f"{flag} {directory}: uid {uid} cannot be let in, because it may not pass through {shut}; use a directory "
            "that it can reach",
            field=flag,
        )


def _let_through(directory: Path, uid: int) -> None:
    try:
        _add(directory, uid, _SEARCH)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        directory.chmod(stat.S_IMODE(directory.stat().st_mode) | stat.S_IXOTH)


def _passes(directory: Path, uid: int) -> bool:
    found = directory.stat()
    if uid == 0 or found.st_mode & stat.S_IXOTH:
        return True
    if found.st_uid == uid:
        return bool(found.st_mode & stat.S_IXUSR)
    return bool(_entries(directory).get((_USER, uid), 0) & _SEARCH)


def _add(path: Path, uid: int, rights: int) -> None:
    entries = _entries(path)
    entries[_USER, uid] = entries.get((_USER, uid), 0) | rights
    _write(path, entries)


def _write(path: Path, entries: dict[tuple[int, int], int]) -> None:
    # The mask bounds what named users and the group have; the group itself keeps what it had.
    mask = 0
    for (tag, _), has in entries.items():
        if tag in (_USER, _GROUP_OBJ):
            mask |= has
    entries[_MASK, _NO_ID] = mask
    packed = struct.pack("<I", _VERSION)
    for (tag, who), has in sorted(entries.items()):
        packed += struct.pack("<HHI", tag, has, who)
    os.setxattr(path, _ACL, packed, follow_symlinks=False)


def _entries(path: Path) -> dict[tuple[int, int], int]:
    """The list of a file by tag and id; where it has none, what its mode says."""
    try:
        packed = os.getxattr(path, _ACL, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise
        mode = path.lstat().st_mode
        rights = {_USER_OBJ: mode >> 6 & 7, _GROUP_OBJ: mode >> 3 & 7, _OTHER: mode & 7}
        return {(tag, _NO_ID): has for tag, has in rights.items()}
    return {(tag, who): has for tag, has, who in struct.iter_unpack("<HHI", packed[4:])}
