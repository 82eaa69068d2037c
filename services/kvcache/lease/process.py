"""Checks whether an engine's process is still alive, as far as the daemon can see."""

from __future__ import annotations

import os
from pathlib import Path

from services.kvcache.lease.sessions import Process


class ProcessTable:
    """Reads ``/proc``. Only processes in the daemon's own pid namespace can be proven gone."""

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
            status = (self._proc / str(process.pid) / "status").read_text(errors="replace")
        except OSError:
            return None
        # Real, effective, saved and file system uid.
        found = next((line.split() for line in status.splitlines() if line.startswith("Uid:")), None)
        return int(found[2]) if found is not None else None

    def alive(self, process: Process) -> bool | None:
        """True: alive. False: proven gone, its pid unused or reused. None: not visible from here."""
        if not self._namespace or process.pid_namespace != self._namespace:
            return None
        try:
            stat = (self._proc / str(process.pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None if _hidden(process.pid) else False
        except OSError:
            return None
        # Fields 3, 20 and 22, counted after the command, which may contain spaces and parentheses.
        fields = stat.rpartition(")")[2].split()
        state, threads, start_time = fields[0], int(fields[17]), int(fields[19])
        # A zombie has no memory left and cannot write. A process whose main thread exited before the others looks like
        # a zombie too, but has other threads.
        return start_time == process.start_time and (state not in ("Z", "X") or threads > 1)


def _hidden(pid: int) -> bool:
    """Whether a process without an entry in /proc is alive anyway: `hidepid` hides other users' processes."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
