"""Room for the pages in memory of the host, and files for the connections."""

from __future__ import annotations

from pathlib import Path

from services.doctor.check import Finding, failed, ok, warning
from services.doctor.machine import Machine
from services.doctor.stack import nearest

#: Files that a service has open besides its connections.
_OWN_FILES = 64


def shared_memory(machine: Machine, folder: Path, budget: int) -> Finding:
    """Whether arenas of ``budget`` bytes fit where they shall lie."""
    existing = nearest(machine, folder)
    if not machine.may_write(str(existing)):
        return failed(
            f"--arena-dir {folder}: uid {machine.uid} may not write in {existing}",
            "choose another --arena-dir, or give this user that folder",
        )
    free, total = machine.space(str(existing))
    if not total:
        return ok(f"{folder}: its file system tells no size; --memory is {budget >> 20} MiB")
    told = f"{folder}: {free >> 20} MiB free of {total >> 20}, --memory is {budget >> 20} MiB"
    if budget > total:
        return failed(
            told,
            "lower --memory, or make the file system larger: `shm_size` or a tmpfs volume's `size=` in docker compose, "
            "`mount -o remount,size=...` on a host",
        )
    if budget > free:
        return warning(told, "lower --memory, or make room; a daemon that runs already has its own")
    return ok(told)


def open_files(machine: Machine, connections: int) -> Finding:
    """Whether so many connections can be open."""
    soft, wanted = machine.open_files(), connections + _OWN_FILES
    if soft < wanted:
        return warning(f"{soft} files may be open, {connections} connections want {wanted}", f"ulimit -n {wanted}")
    return ok(f"{soft} may be open")
