"""The checks' only access to the machine; tests substitute a fake."""

from __future__ import annotations

import contextlib
import errno
import glob
import http.client
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services import healthcheck
from services.common.edge.listener import Listener

_REAP_S = 5.0
_CONNECT_S = 2.0
_METRICS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """The result of ``stat``: mode including the file type, owner, group."""

    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A child process that exited, or that was killed after its time limit (``status`` is None)."""

    status: int | None
    output: str
    errors: str


class Machine:
    """This machine, as this process sees it. No method raises if something is missing or denied."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.uid = os.geteuid()
        self.gids = frozenset({os.getegid(), *os.getgroups()})
        self._children: set[int] = set()
        self._lock = threading.Lock()

    def glob(self, pattern: str) -> list[str]:
        """Matching paths, sorted."""
        return sorted(glob.glob(pattern))

    def stat(self, path: str) -> Node | None:
        """The file at the path, following links; None if there is none."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return Node(found.st_mode, found.st_uid, found.st_gid)

    def text(self, path: str) -> str | None:
        """The content of a small file; None if it cannot be read."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        """The target of a symbolic link; None if it cannot be read."""
        try:
            return os.readlink(path)
        except OSError:
            return None

    def open_errno(self, path: str) -> int:
        """The errno of opening a device for reading and writing; 0 if it succeeds."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def may_write(self, path: str) -> bool:
        """Whether this process may create files in a directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def space(self, path: str) -> tuple[int, int]:
        """Free and total bytes of a file system; zeros if it has no limit or reports none."""
        try:
            found = os.statvfs(path)
        except OSError:
            return 0, 0
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def open_files(self) -> int:
        """The limit on open files of this process."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def which(self, program: str) -> str | None:
        """The program's path on PATH."""
        return shutil.which(program, path=self.environ.get("PATH", os.defpath))

    def connect_errno(self, listener: Listener) -> int:
        """The errno of connecting to an address; 0 if a server is listening there."""
        if listener.path is not None:
            return self._connect(socket.AF_UNIX, str(listener.path))
        found = _resolve(listener)
        return self._connect(*found) if found else errno.EADDRNOTAVAIL

    def _connect(self, family: int, address: str | tuple[str, int]) -> int:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_S)
            try:
                probe.connect(address)
            except TimeoutError:
                return errno.ETIMEDOUT
            except OSError as error:
                return error.errno or errno.EIO
        return 0

    def serves(self, listener: Listener, service: str) -> bool:
        """Whether the gRPC server listening there serves ``service``."""
        return healthcheck.knows(str(listener), service, _CONNECT_S)

    def certificate(self, listener: Listener) -> bytes:
        """The certificate, as DER, that a TLS server presents at a TCP address; empty if there is none."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError):
            with (
                socket.create_connection((listener.host, listener.port), _CONNECT_S) as plain,
                context.wrap_socket(plain) as wrapped,
            ):
                return wrapped.getpeercert(binary_form=True) or b""
        return b""

    def metrics(self, listener: Listener) -> str:
        """The metrics served at a TCP address; empty if there are none."""
        connection = http.client.HTTPConnection(listener.host, listener.port, timeout=_CONNECT_S)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read(_METRICS_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    def bind_errno(self, listener: Listener) -> int:
        """The errno of listening on a TCP address, which is released at once; 0 if it is free."""
        found = _resolve(listener)
        if found is None:
            return errno.EADDRNOTAVAIL
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            # As servers do, so that connections in TIME_WAIT are not taken for a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(found[1])
                probe.listen()
            except OSError as error:
                return error.errno or errno.EIO
        return 0

    def run(self, command: Sequence[str], limit_s: float) -> Ran:
        """Run a program to completion; after ``limit_s`` seconds, kill it and its process group."""
        try:
            child = subprocess.Popen(
                list(command),
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return Ran(127, "", f"{command[0]}: {error.strerror}")
        with self._lock:
            self._children.add(child.pid)
        try:
            output, errors = child.communicate(timeout=limit_s)
            return Ran(child.returncode, output, errors)
        except subprocess.TimeoutExpired:
            _kill_group(child.pid)
            # A process stuck in a driver does not die even then.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=_REAP_S)
            return Ran(None, "", "")
        finally:
            with self._lock:
                self._children.discard(child.pid)

    def kill_children(self) -> None:
        """Kill the children that ``run`` is still waiting for."""
        with self._lock:
            for pid in self._children:
                _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _resolve(listener: Listener) -> tuple[int, tuple[str, int]] | None:
    try:
        family, *_, address = socket.getaddrinfo(
            listener.host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        return None
    return family, (str(address[0]), int(address[1]))
