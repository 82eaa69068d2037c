"""The addresses that a service listens on, and the one that it calls."""

from __future__ import annotations

import errno
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.serving import Listener, Tls
from services.doctor.check import Finding, failed, ok, warning
from services.doctor.machine import Machine


@dataclass(frozen=True, slots=True)
class Running:
    """How the service that is looked at is known when it runs already: its gRPC name, what its metrics begin with and
    the certificate that it shows. ``title`` is what a reader calls it.
    """

    title: str
    service: str
    metrics: str
    tls: Tls | None = None


def listen(machine: Machine, listener: Listener, own: Running) -> Finding:
    """Whether the service can listen there and nobody else can take its place, or listens there by now."""
    if listener.path is not None:
        return _unix(machine, listener, listener.path, own)
    return _tcp(machine, listener, "--listen", lambda: _serves(machine, listener, own), own)


def metrics(machine: Machine, listener: Listener, own: Running) -> Finding:
    """The same for the address of its metrics."""
    found = f"# HELP {own.metrics}"
    return _tcp(machine, listener, "--metrics", lambda: found in machine.metrics(listener), own)


def _tcp(machine: Machine, listener: Listener, flag: str, is_own: Callable[[], bool], own: Running) -> Finding:
    number = machine.bind_errno(listener)
    if number == errno.EADDRINUSE:
        return _in_use(listener, flag, is_own(), own)
    if number == errno.EADDRNOTAVAIL:
        return failed(f"{listener} is no address of this host", f"choose an address that `ip addr` lists, for {flag}")
    if number:
        return failed(f"{listener}: {os.strerror(number)}", f"choose another {flag}, with a port from 1024 on")
    return ok(f"{listener} is free")


def _in_use(listener: Listener, flag: str, is_own: bool, own: Running) -> Finding:
    if is_own:
        return ok(f"{listener} is in use by the running {own.title}")
    return failed(f"{listener} is in use", f"stop what listens there, or choose another {flag}")


def _serves(machine: Machine, listener: Listener, own: Running) -> bool:
    if listener.path is None and own.tls is not None:
        # A call takes a certificate that clients alone have; but whoever listens shows its own to everybody.
        try:
            shown = ssl.PEM_cert_to_DER_cert(_first_certificate(own.tls.cert.read_text()))
        except (OSError, ValueError):
            return False
        return machine.certificate(listener) == shown
    return machine.serves(listener, own.service)


def _first_certificate(pem: str) -> str:
    return pem[pem.find(ssl.PEM_HEADER) :].partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER


def _unix(machine: Machine, listener: Listener, path: Path, own: Running) -> Finding:
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
        return _in_use(listener, "--listen", _serves(machine, listener, own), own)
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
