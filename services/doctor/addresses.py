"""Checks of the addresses that a service listens on and connects to."""

from __future__ import annotations

import errno
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.edge.listener import Listener
from services.common.edge.tls import Tls
from services.doctor.check import Finding, failed, ok
from services.doctor.machine import Machine


@dataclass(frozen=True, slots=True)
class Running:
    """Identifies an already running instance of the service being checked: by its gRPC service name, the prefix of its
    metrics, and the certificate that it presents. ``title`` is its name in messages.
    """

    title: str
    service: str
    metrics: str
    tls: Tls | None = None


def listen(machine: Machine, listener: Listener, own: Running) -> Finding:
    """Whether the service can listen there, safe from other users, or already does."""
    if listener.path is not None:
        return _unix(machine, listener, listener.path, own)
    return _tcp(machine, listener, "--listen", lambda: _serves(machine, listener, own), own)


def metrics(machine: Machine, listener: Listener, own: Running) -> Finding:
    """The same for the metrics address."""
    found = f"# HELP {own.metrics}"
    return _tcp(machine, listener, "--metrics", lambda: found in machine.metrics(listener), own)


def _tcp(machine: Machine, listener: Listener, flag: str, is_own: Callable[[], bool], own: Running) -> Finding:
    number = machine.bind_errno(listener)
    if number == errno.EADDRINUSE:
        return _in_use(listener, flag, is_own(), own)
    if number == errno.EADDRNOTAVAIL:
        return failed(f"{listener} is not an address of this host", f"give {flag} an address that `ip addr` lists")
    if number:
        return failed(f"{listener}: {os.strerror(number)}", f"choose another {flag}, with a port of 1024 or higher")
    return ok(f"{listener} is free")


def _in_use(listener: Listener, flag: str, is_own: bool, own: Running) -> Finding:
    if is_own:
        return ok(f"{listener} is in use by the running {own.title}")
    return failed(f"{listener} is in use", f"stop the process listening there, or choose another {flag}")


def _serves(machine: Machine, listener: Listener, own: Running) -> bool:
    if listener.path is None and own.tls is not None:
        # A call would require a client certificate, but the server presents its own to anyone who connects.
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
        # The service creates this directory, but none above it.
        if machine.stat(str(path.parent.parent)) is None or not machine.may_write(str(path.parent.parent)):
            return failed(f"{listener}: {path.parent} does not exist and cannot be created", f"mkdir -p {path.parent}")
        return ok(f"{listener} is free; its directory will be created")
    if not machine.may_write(str(path.parent)):
        return failed(
            f"{listener}: uid {machine.uid} may not write to {path.parent}, which belongs to uid {folder.uid}",
            f"choose another --listen, or `chown {machine.uid} {path.parent}`",
        )
    node = machine.stat(str(path))
    if node and not stat.S_ISSOCK(node.mode):
        return failed(f"{listener} exists and is not a socket", "move it away, or choose another --listen")
    if node and machine.connect_errno(listener) not in (errno.ECONNREFUSED, errno.ENOENT):
        return _in_use(listener, "--listen", _serves(machine, listener, own), own)
    if folder.uid not in (0, machine.uid) or folder.mode & (stat.S_IWGRP | stat.S_IWOTH):
        return failed(
            f"{listener}: other users may replace files in {path.parent} (uid {folder.uid}, mode "
            f"{stat.S_IMODE(folder.mode):04o})",
            f"make {path.parent} owned by the user that the service runs as, and chmod 700 {path.parent}",
        )
    return ok(f"{listener} is free{'; a stale socket is left over there' if node else ''}")


def call(machine: Machine, listener: Listener, flag: str, start: str) -> Finding:
    """Whether a server is listening at the address of ``flag``; ``start`` says how to start it."""
    number = machine.connect_errno(listener)
    if number in (errno.EACCES, errno.EPERM):
        return failed(
            f"{listener}: uid {machine.uid} may not connect",
            "run both services as one user: the socket is private to its user",
        )
    if number:
        return failed(f"{listener}: {os.strerror(number)}", f"{start}, or correct {flag}")
    return ok(f"{listener} answers")
