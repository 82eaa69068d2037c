"""Whether an engine's process is still there, as far as it can be seen from here."""

from __future__ import annotations

import os
from pathlib import Path

from services.kvcache.sessions import Process


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
            stat = (self._proc / str(process.pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return None
        # Fields behind the command, which may hold spaces and parentheses: state is the 3rd, the start time the 22nd.
        fields = stat.rpartition(")")[2].split()
        # A zombie has no threads and no memory left: it can write nothing.
        return fields[0] not in ("Z", "X") and int(fields[19]) == process.start_time
