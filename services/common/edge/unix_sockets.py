"""Unix sockets as paths: bound where nobody else can replace them, one beside another for each further user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc

from services.common.access.acl import admit
from services.common.edge.paths import make_directory
from services.common.errors import InvalidConfiguration


def guest_socket(path: Path, uid: int) -> Path:
    """The socket beside ``path`` where another user comes in: ``kvcache.1000.sock`` beside ``kvcache.sock``."""
    return path.with_name(f"{path.stem}.{uid}{path.suffix}")


def bind(server: grpc.aio.Server, path: Path, guest: int | None = None) -> int:
    """Bind a server to a path, where only this user may connect, or only ``guest``; the inode of the socket.

    Raises InvalidConfiguration, also when another server is listening there.
    """
    try:
        make_directory(path.parent, "--listen")
        with _alone_in(path.parent):
            _check_ours(path)
            if _answers(path):
                raise InvalidConfiguration(f"--listen unix:{path}: another server is listening there", field="--listen")
            return _bind_and_move(server, path, guest)
    except (OSError, RuntimeError) as error:
        raise InvalidConfiguration(f"--listen unix:{path}: cannot bind: {error}", field="--listen") from error


def unlink(path: Path, inode: int) -> None:
    """Remove a socket, unless another server has bound the path since."""
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _bind_and_move(server: grpc.aio.Server, path: Path, guest: int | None) -> int:
    # gRPC unlinks whatever is at its path, when it binds and again when it stops, even the socket of a server that has
    # taken over the path in between. So bind to a unique path, then rename.
    unnamed = path.with_name(f".{secrets.token_hex(4)}")
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{unnamed}")
    finally:
        os.umask(previous)
    inode = unnamed.lstat().st_ino
    if guest is not None:
        admit(unnamed, guest)
    unnamed.rename(path)
    return inode


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory, so that one server at a time checks and binds sockets in it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_ours(path: Path) -> None:
    """Raise InvalidConfiguration unless nothing is at the path, or a socket of this user, which may be replaced."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode):
            raise InvalidConfiguration(f"--listen unix:{path}: exists and is not a socket", field="--listen")
        if found.st_uid != os.geteuid():
            raise InvalidConfiguration(
                f"--listen unix:{path}: there is a socket of uid {found.st_uid}", field="--listen"
            )


def _answers(path: Path) -> bool:
    """Whether a server is listening at the path. Raises OSError if that cannot be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True  # its backlog is full
    return True
