"""Processes as the daemon's kernel knows them: a descriptor of each engine's, which no reuse of its pid can fool."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from services.kvcache.lease.witness import Process


class ProcessTable:
    """Observes processes in the daemon's own pid namespace; those of others cannot be seen.

    ``pidfd_open`` opens a descriptor that becomes readable once all threads of the process have ended, which they do
    after they let go of their memory and their files.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        try:
            self._namespace = os.readlink(proc / "self" / "ns" / "pid")
        except OSError:
            self._namespace = ""

    def owner(self, process: Process) -> int | None:
        """The uid that a process runs as; None if it is not visible from here."""
        if not self._namespace or process.pid_namespace != self._namespace:
            return None
        try:
            return _user_of(self._proc, process.pid)
        except (OSError, ValueError):
            return None

    def observe(self, process: Process) -> ProcessWitness | None:
        """A witness of the process; None if it cannot be seen. One that is gone already has a witness of that."""
        if not self._namespace or process.pid_namespace != self._namespace:
            return None
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return self._gone(process)
        except (OSError, OverflowError):
            descriptor = None  # no descriptor is left, or the kernel has no pidfd: /proc proves an end as well
        # Read after the opening: a start time that is right now was right before, so the descriptor is of no other.
        try:
            if _start_time(self._proc, process.pid) == process.start_time:
                return ProcessWitness(self._proc, process, _user_of(self._proc, process.pid), descriptor)
        except (FileNotFoundError, ProcessLookupError):
            if _exists(process.pid):  # `hidepid` hides when it started: perhaps it is another
                _close(descriptor)
                return None
        except (OSError, ValueError, IndexError):
            _close(descriptor)
            return None
        _close(descriptor)
        return self._gone(process)

    def _gone(self, process: Process) -> ProcessWitness:
        return ProcessWitness(self._proc, process, uid=-1, descriptor=None, gone=True)


class ProcessWitness:
    """A witness that holds a pidfd; without one it looks into /proc, and cannot kill. See ``witness.Witness``."""

    def __init__(self, proc: Path, process: Process, uid: int, descriptor: int | None, *, gone: bool = False) -> None:
        self._proc = proc
        self._process = process
        self._uid = uid
        self._descriptor = descriptor
        self._gone = gone
        self._poll = select.poll()
        if descriptor is not None:
            self._poll.register(descriptor, select.POLLIN)

    @property
    def uid(self) -> int:
        """The user that the process ran as when it was first seen; -1 if it was gone."""
        return self._uid

    @property
    def own(self) -> bool:
        """Whether that is the daemon's own user."""
        return self._uid == os.geteuid()

    def gone(self) -> bool:
        """Whether the process is proven gone."""
        if not self._gone:
            self._gone = bool(self._poll.poll(0)) if self._descriptor is not None else self._is_over()
        return self._gone

    def _is_over(self) -> bool:
        pid = self._process.pid
        try:
            return _start_time(self._proc, pid) != self._process.start_time
        except (FileNotFoundError, ProcessLookupError):
            return not _exists(pid)
        except (OSError, ValueError, IndexError):
            return False

    def kill(self) -> bool:
        """Send SIGKILL through the descriptor: never to a pid, which another process may have by now."""
        if self._descriptor is None or self._process.pid == os.getpid():
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor. Idempotent; it is known still whether the process was gone."""
        descriptor, self._descriptor = self._descriptor, None
        _close(descriptor)


def _start_time(proc: Path, pid: int) -> int | None:
    """When a process that can still write started, in clock ticks since boot; None for one that has ended."""
    stat = (proc / str(pid) / "stat").read_text(errors="replace")
    # Fields 3, 20 and 22, counted after the command, which may contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    state, threads = fields[0], int(fields[17])
    # A zombie has no memory left and cannot write. A process whose main thread exited before the others looks like
    # a zombie too, but has other threads.
    return None if state in ("Z", "X") and threads <= 1 else int(fields[19])


def _user_of(proc: Path, pid: int) -> int:
    """The effective uid of a process. Raises ValueError for the id of a thread, which ends before its process."""
    lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if fields.get("Tgid") != [str(pid)] or "Uid" not in fields:
        raise ValueError(f"{pid} is no process")
    return int(fields["Uid"][1])


def _exists(pid: int) -> bool:
    """Whether a process without an entry in /proc lives anyway: `hidepid` hides other users' processes."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
