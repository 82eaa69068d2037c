"""Pages in a file that engines map: the arena of a machine without a GPU.

The file is private to the user (0600), its blocks are reserved before anybody maps it (a hole that cannot be filled
would kill whoever touches it with SIGBUS), and it is locked while its daemon lives. A daemon that was killed leaves an
unlocked file, which the next one in the same directory removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

from services.common.errors import ExceedsBudget, InvalidConfiguration
from services.kvcache.arena.room import REMEDY, Room
from services.kvcache.pool.budget import CANARY_BYTES, CANARY_SLOT_BYTES
from services.kvcache.pool.layout import PageLayout

_SUFFIX = ".arena"


class FileArena:
    """``total_pages`` pages, then ``canary_slots`` canaries with room for their answers; see ``pool.Arena``.

    Raises ExceedsBudget when the file system has no room for it.
    """

    device = None

    def __init__(self, directory: Path, name: str, layout: PageLayout, total_pages: int, canary_slots: int) -> None:
        self._canaries = total_pages * layout.page_bytes
        self._size = self._canaries + canary_slots * CANARY_SLOT_BYTES
        self._path = directory / f"{name}{_SUFFIX}"
        try:
            self._fd = _made_and_locked(self._path)
            try:
                os.posix_fallocate(self._fd, 0, self._size)
                self._map = mmap.mmap(self._fd, self._size)
            except OSError:
                self._path.unlink(missing_ok=True)
                os.close(self._fd)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                room = Room.of(directory)
                told = f", with {room.free} of its {room.total} bytes free" if room else ""
                raise ExceedsBudget(
                    f"the arena of {self._size} bytes does not fit the file system of {directory}: {error.strerror}"
                    f"{told}; make room there, or for the daemon {REMEDY}",
                    field="pool_pages",
                    wanted_bytes=self._size,
                    **({"free_bytes": room.free, "total_bytes": room.total} if room else {}),
                ) from error
            raise

    @property
    def file_path(self) -> str:
        """The file that engines map."""
        return str(self._path)

    @property
    def size_bytes(self) -> int:
        """All of it: the pages and the canaries behind them."""
        return self._size

    def canary_offset(self, slot: int) -> int:
        """Byte offset of a canary slot."""
        return self._canaries + slot * CANARY_SLOT_BYTES

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Write a session's canary and clear its answer."""
        at = self.canary_offset(slot)
        self._map[at : at + CANARY_SLOT_BYTES] = canary + bytes(CANARY_BYTES)

    def read_answer(self, slot: int) -> bytes:
        """What the engine wrote behind its canary."""
        at = self.canary_offset(slot) + CANARY_BYTES
        return self._map[at : at + CANARY_BYTES]

    def close(self) -> None:
        """Remove the file. Engines that still map it keep the memory until they let go."""
        self._path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._fd)


def _made_and_locked(path: Path) -> int:
    """A new file, locked before it takes any memory, so that one whose daemon dies can always be told."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # until it was locked, a starting daemon took it for a dead one's and removed it


def default_directory() -> Path:
    """Where arenas lie unless told otherwise: in memory where the system has a place for that."""
    shm = Path("/dev/shm")
    return (shm if os.access(shm, os.W_OK) else Path("/tmp")) / f"rocmforge-{os.getuid()}"


def prepare_directory(directory: Path) -> list[str]:
    """Make the directory, private to the user, and remove arenas whose daemon is dead; returns their names.

    Raises InvalidConfiguration when it cannot be had, or when other users could replace what lies in it.
    """
    removed: list[str] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.getuid()) or shared:
            raise InvalidConfiguration(
                f"--arena-dir {directory}: other users could replace the arenas in it; it must be this user's own, "
                "writable by nobody else",
                field="--arena-dir",
            )
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                path.unlink()
                removed.append(path.name)
    except OSError as error:
        raise InvalidConfiguration(
            f"--arena-dir {directory}: {error.strerror or error}", field="--arena-dir"
        ) from error
    return removed
