"""Pages in a file that engines map: the arena of a machine without a GPU.

The file is private to the user (0600), its blocks are reserved before any process maps it (touching a hole that cannot
be filled would kill the process with SIGBUS), and it is locked while its daemon lives. A killed daemon leaves an
unlocked file, which the next daemon in the same directory removes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import zlib
from pathlib import Path

from rocmforge.client.transport.paths import open_file
from services.common.access import acl
from services.common.access.identity import Identity
from services.common.edge.paths import make_directory
from services.common.errors import ExceedsBudget, InvalidConfiguration
from services.kvcache.arena.access import Access
from services.kvcache.arena.room import REMEDY, Room
from services.kvcache.pool.budget import CANARY_BYTES, CANARY_SLOT_BYTES
from services.kvcache.pool.layout import Layout

_SUFFIX = ".arena"

#: Bytes of a page that are read at once, off the loop: closing an arena waits for no more.
PIECE_BYTES = 1 << 20


class FileArena:
    """``total_pages`` pages, then ``canary_slots`` canaries, each with space for its answer; see ``pool.Arena``.

    Raises ExceedsBudget if it does not fit in the file system.
    """

    device = None

    def __init__(self, directory: Path, name: str, layout: Layout, total_pages: int, canary_slots: int) -> None:
        self._page_bytes = layout.page_bytes
        self._canaries = total_pages * layout.page_bytes
        self._access = Access()
        self._size = self._canaries + canary_slots * CANARY_SLOT_BYTES
        self._path = directory / f"{name}{_SUFFIX}"
        self._admitted: set[int] = set()
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
                space = f", with {room.free} of its {room.total} bytes free" if room else ""
                raise ExceedsBudget(
                    f"the arena of {self._size} bytes does not fit in the file system of {directory}: {error.strerror}"
                    f"{space}; free space there, or {REMEDY}",
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
        """The total size: the pages and the canaries after them."""
        return self._size

    def admit(self, owner: str) -> None:
        """Let an identity map the file. Only another user of this machine needs it: one known by another name runs as
        the daemon's user. Raises InvalidConfiguration if the file system cannot do it.
        """
        uid = Identity.parse(owner).uid if owner else None
        if uid in (None, 0, os.geteuid()) or uid in self._admitted:
            return
        try:
            acl.admit(self._path, uid)
        except OSError as error:
            raise InvalidConfiguration(
                f"{owner} cannot be let into the arena {self._path}: {error.strerror}", identity=owner
            ) from error
        self._admitted.add(uid)

    def dismiss(self, owner: str) -> None:
        """Take back what ``admit`` gave; a mapping that there is stays."""
        uid = Identity.parse(owner).uid if owner else None
        if uid in self._admitted:
            acl.dismiss(self._path, uid)
            self._admitted.discard(uid)

    def canary_offset(self, slot: int) -> int:
        """Byte offset of a canary slot."""
        return self._canaries + slot * CANARY_SLOT_BYTES

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Write a session's canary and clear its answer."""
        at = self.canary_offset(slot)
        self._map[at : at + CANARY_SLOT_BYTES] = canary + bytes(CANARY_BYTES)

    def read_answer(self, slot: int) -> bytes:
        """The answer that the engine wrote after its canary."""
        at = self.canary_offset(slot) + CANARY_BYTES
        return self._map[at : at + CANARY_BYTES]

    def checksums(self, pages: list[int]) -> list[int]:
        """The CRC-32 of each page, as zlib and PNG have it; see ``pool.Arena``."""
        return [self._checksum(page) for page in pages]

    def _checksum(self, page: int) -> int:
        start, checksum = page * self._page_bytes, 0
        for at in range(start, start + self._page_bytes, PIECE_BYTES):
            with self._access.held(), memoryview(self._map) as whole:
                with whole[at : min(at + PIECE_BYTES, start + self._page_bytes)] as piece:
                    checksum = zlib.crc32(piece, checksum)
        return checksum

    def zero(self, pages: list[int]) -> None:
        """Set pages to zero; see ``pool.Arena``. The file itself begins as zeros."""
        for page in pages:
            start = page * self._page_bytes
            for at in range(start, start + self._page_bytes, PIECE_BYTES):
                with self._access.held():
                    first = ctypes.c_char.from_buffer(self._map, at)
                    # Unlike an assignment to the map, this lets other threads run.
                    ctypes.memset(ctypes.addressof(first), 0, min(PIECE_BYTES, start + self._page_bytes - at))
                    del first  # the map could not be closed

    def close(self) -> None:
        """Remove the file. The memory stays allocated until engines that map it unmap it."""
        self._path.unlink(missing_ok=True)
        with self._access.ending():
            self._map.close()
        os.close(self._fd)


def _made_and_locked(path: Path) -> int:
    """Create a file and lock it before it takes any memory, so that a dead daemon's file can always be recognized."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # before the lock was taken, another daemon took it for a stale file and removed it


def default_directory() -> Path:
    """The default arena directory: in /dev/shm if it is writable, else in /tmp."""
    shm = Path("/dev/shm")
    return (shm if os.access(shm, os.W_OK) else Path("/tmp")) / f"rocmforge-{os.getuid()}"


def prepare_directory(directory: Path) -> list[str]:
    """Create the directory, private to the user, and remove the arenas of dead daemons. Returns the names removed.

    Files that are not this user's stay as they are. Raises InvalidConfiguration if that fails, or if other users could
    replace files in the directory.
    """
    removed: list[str] = []
    try:
        make_directory(directory, "--arena-dir", parents=True)
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            try:
                file = open_file(path)
            except OSError:
                continue  # gone meanwhile, a link, or nothing of ours
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            except (BlockingIOError, FileNotFoundError):
                continue  # its daemon lives, or another one was faster
            finally:
                os.close(file)
    except OSError as error:
        raise InvalidConfiguration(
            f"--arena-dir {directory}: {error.strerror or error}", field="--arena-dir"
        ) from error
    return removed
