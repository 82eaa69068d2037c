"""The addresses that a service listens on, and the one that it calls."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from services.common.serving import Listener
from services.doctor.check import Finding, failed, ok, warning
from services.doctor.machine import Machine


def listen(machine: Machine, listener: Listener, flag: str = "--listen") -> Finding:
    """Whether a service can listen there, as ``flag`` says, and nobody else can take its place."""
    if listener.path is not None:
        return _unix(machine, listener, listener.path)
    number = machine.bind_errno(listener)
    if number == errno.EADDRINUSE:
        return failed(f"{listener} is in use", _taken(flag))
    if number == errno.EADDRNOTAVAIL:
        return failed(f"{listener} is no address of this host", f"choose an address that `ip addr` lists, for {flag}")
    if number:
        return failed(f"{listener}: {os.strerror(number)}", f"choose another {flag}, with a port from 1024 on")
    return ok(f"{listener} is free")


def _taken(flag: str) -> str:
    return (
        f"stop what listens there, or choose another {flag}; if it is the service that you are looking at, all is well"
    )


def _unix(machine: Machine, listener: Listener, path: Path) -> Finding:
    folder = machine.stat(str(path.parent))
    if folder is None:
        # The service makes this one folder, and none above it.
        if machine.stat(str(path.parent.parent)) is None or not machine.may_write(str(path.parent.parent)):
            return failed(f"{listener}: {path.parent} does not exist and cannot be made", f"mkdir -p {path.parent}")
        return ok(f"{listener} is free; its folder will be made")
    if not machine.may_write(str(path.parent)):
        return failed(
            f"{listener}: uid {machine.uid} may not write in {path.parent}, which is uid {folder.uid}'s",
            f"choose another --listen, or `chown {machine.uid} {path.parent}`",
        )
    node = machine.stat(str(path))
    if node and not stat.S_ISSOCK(node.mode):
        return failed(f"{listener} is there and is no socket", "move it away, or choose another --listen")
    if node and machine.connect_errno(listener) not in (errno.ECONNREFUSED, errno.ENOENT):
        return failed(f"{listener} is in use", _taken("--listen"))
    shared = folder.mode & (stat.S_IWGRP | stat.S_IWOTH) and not folder.mode & stat.S_ISVTX
    if folder.uid not in (0, machine.uid) or shared:
        return warning(
            f"{listener}: other users may replace what is in {path.parent} (uid {folder.uid}, mode "
            f"{stat.S_IMODE(folder.mode):04o})",
            f"chmod 700 {path.parent}, owned by the user that the service runs as",
        )
    return ok(f"{listener} is free{'; what is there is left over' if node else ''}")


def call(machine: Machine, listener: Listener, flag: str, start: str) -> Finding:
    """Whether somebody listens at the address that ``flag`` names; ``start`` says how to start it."""
    number = machine.connect_errno(listener)
    if number in (errno.EACCES, errno.EPERM):
        return failed(
            f"{listener}: uid {machine.uid} may not connect",
            "run both services as one user: the socket is private to it",
        )
    if number:
        return failed(f"{listener}: {os.strerror(number)}", f"{start}, or correct {flag}")
    return ok(f"{listener} answers")
