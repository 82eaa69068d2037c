"""Whether an engine's process is still there, as far as it can be seen from here."""

from __future__ import annotations

import os
from pathlib import Path

from services.kvcache.lease.sessions import Process


class ProcessTable:
    """Looks into ``/proc``. Only processes of this daemon's own pid namespace can be told dead."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        try:
            self._namespace = os.readlink(proc / "self" / "ns" / "pid")
        except OSError:
            self._namespace = ""

    def alive(self, process: Process) -> bool | None:
        """True: it lives. False: proven gone, the pid unused or another's now. None: not to be seen from here."""
        if not self._namespace or process.pid_namespace != self._namespace:
            return None
        try:
            stat = (self._proc / str(process.pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None if _hidden(process.pid) else False
        except OSError:
            return None
        # Behind the command, which may hold spaces and parentheses: the 3rd field, the 20th and the 22nd.
        fields = stat.rpartition(")")[2].split()
        state, threads, start_time = fields[0], int(fields[17]), int(fields[19])
        # The last thread of a zombie has no memory left and can write nothing. A first thread that ended before the
        # others looks like a zombie too.
        return start_time == process.start_time and (state not in ("Z", "X") or threads > 1)


def _hidden(pid: int) -> bool:
    """Whether a process without an entry in /proc lives all the same: `hidepid` hides other users' processes."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
