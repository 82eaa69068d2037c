"""The one way from the checks to the machine that they look at; tests put another in its place."""

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
from services.common.serving import Listener

_REAP_S = 5.0
_CONNECT_S = 2.0
_METRICS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """A file as ``stat`` tells it: mode with its type, owner, group."""

    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A child process that ended, or (``status`` None) was ended because its time was over."""

    status: int | None
    output: str
    errors: str


class Machine:
    """This machine, seen by this process. Nothing here raises for what is missing or refused."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.uid = os.geteuid()
        self.gids = frozenset({os.getegid(), *os.getgroups()})
        self._children: set[int] = set()
        self._lock = threading.Lock()

    def glob(self, pattern: str) -> list[str]:
        """Paths that match, sorted."""
        return sorted(glob.glob(pattern))

    def stat(self, path: str) -> Node | None:
        """What is at the path, links followed; None for nothing."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return Node(found.st_mode, found.st_uid, found.st_gid)

    def text(self, path: str) -> str | None:
        """The content of a small file; None when it cannot be read."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        """Where a symbolic link leads; None when it cannot be read."""
        try:
            return os.readlink(path)
        except OSError:
            return None

    def open_errno(self, path: str) -> int:
        """The errno of opening a device for reading and writing; 0 when it opens."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def may_write(self, path: str) -> bool:
        """Whether this process may make files in a folder."""
        return os.access(path, os.W_OK | os.X_OK)

    def space(self, path: str) -> tuple[int, int]:
        """Bytes free and in all of a file system; zeros when it has no bounds or tells none."""
        try:
            found = os.statvfs(path)
        except OSError:
            return 0, 0
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def open_files(self) -> int:
        """How many files this process may have open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def which(self, program: str) -> str | None:
        """The program's path on PATH."""
        return shutil.which(program, path=self.environ.get("PATH", os.defpath))

    def connect_errno(self, listener: Listener) -> int:
        """The errno of connecting to an address; 0 when somebody listens there."""
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
        """Whether the gRPC server that listens there has this service."""
        return healthcheck.knows(str(listener), service, _CONNECT_S)

    def certificate(self, listener: Listener) -> bytes:
        """The certificate, as DER, that a TLS server shows at a TCP address; nothing when there is none."""
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
        """The metrics that are served at a TCP address; nothing when there are none."""
        connection = http.client.HTTPConnection(listener.host, listener.port, timeout=_CONNECT_S)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read(_METRICS_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    def bind_errno(self, listener: Listener) -> int:
        """The errno of listening on a TCP address; 0 when it is free. It is given back at once."""
        found = _resolve(listener)
        if found is None:
            return errno.EADDRNOTAVAIL
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            # As servers do, so that connections which are closing are not taken for one that listens.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(found[1])
                probe.listen()
            except OSError as error:
                return error.errno or errno.EIO
        return 0

    def run(self, command: Sequence[str], limit_s: float) -> Ran:
        """Run a program and wait; after ``limit_s`` seconds it is killed with all that it started."""
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
            # One that is stuck in a driver does not even die.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=_REAP_S)
            return Ran(None, "", "")
        finally:
            with self._lock:
                self._children.discard(child.pid)

    def kill_children(self) -> None:
        """End what ``run`` started and still waits for."""
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
