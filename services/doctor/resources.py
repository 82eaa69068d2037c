"""Checks of host memory for the arenas, and of file descriptors for the connections."""

from __future__ import annotations

from pathlib import Path

from services.doctor.check import Finding, failed, ok, warning
from services.doctor.machine import Machine
from services.doctor.stack import nearest

#: File descriptors that a service needs besides its connections.
_OWN_FILES = 64


def shared_memory(machine: Machine, folder: Path, budget: int) -> Finding:
    """Whether arenas of ``budget`` bytes fit in the file system of ``folder``."""
    existing = nearest(machine, folder)
    if not machine.may_write(str(existing)):
        return failed(
            f"--arena-dir {folder}: uid {machine.uid} may not write to {existing}",
            "choose another --arena-dir, or give this user write access",
        )
    free, total = machine.space(str(existing))
    if not total:
        return ok(f"{folder}: its file system reports no size; --memory is {budget >> 20} MiB")
    summary = f"{folder}: {free >> 20} MiB free of {total >> 20}, --memory is {budget >> 20} MiB"
    if budget > total:
        return failed(
            summary,
            "lower --memory, or enlarge the file system: `shm_size` or a tmpfs volume's `size=` in docker compose, "
            "`mount -o remount,size=...` on a host",
        )
    if budget > free:
        return warning(summary, "lower --memory, or free space; ignore this if the space is a running daemon's arena")
    return ok(summary)


def open_files(machine: Machine, connections: int) -> Finding:
    """Whether ``connections`` can be open at a time."""
    soft, wanted = machine.open_files(), connections + _OWN_FILES
    if soft < wanted:
        return warning(
            f"the limit is {soft} open files; {connections} connections need {wanted}", f"ulimit -n {wanted}"
        )
    return ok(f"the limit is {soft} open files")
