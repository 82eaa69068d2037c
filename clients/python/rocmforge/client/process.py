"""Who this process is to the kernel: by that the daemon knows whether an engine still runs."""

from __future__ import annotations

import os
from pathlib import Path


def process_identity(proc: Path = Path("/proc/self")) -> tuple[int, int, str] | None:
    """Returns pid, start time in clock ticks since boot, and pid namespace of this process; None when unavailable."""
    try:
        # The fields after the command, which may contain spaces and parentheses: state is the 3rd, start time the 22nd.
        start_time = int((proc / "stat").read_text().rpartition(")")[2].split()[19])
        return os.getpid(), start_time, os.readlink(proc / "ns" / "pid")
    except (OSError, ValueError, IndexError):
        return None
