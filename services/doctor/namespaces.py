"""Checks whether both services share the container namespaces through which processes and memory are found."""

from __future__ import annotations

from services.doctor.check import Finding, failed, ok, skipped, warning
from services.doctor.machine import Machine

#: The namespaces that sharing GPU memory depends on with ROCm: the importer looks up the exporter by process id, and
#: fetches the memory from a socket in the abstract namespace, which belongs to the network namespace.
KINDS = ("ipc", "pid", "net")

_COMPOSE = (
    'share them, as in docker compose: `ipc: "service:kvcache"`, `pid: "service:kvcache"`, '
    '`network_mode: "service:kvcache"` on the engine and `ipc: shareable` on the daemon; or run both in one container'
)


def namespaces(machine: Machine, peer: int | None, needs_gpu: bool) -> Finding:
    """Compare this process's namespaces with those of process ``peer``."""
    if peer is None:
        return skipped("no --peer PID of the other service was given")
    if machine.stat(f"/proc/{peer}") is None:
        return failed(
            f"there is no process {peer} here",
            "give the other service's process id in this pid namespace; if it has none here, it is in another "
            f"namespace: {_COMPOSE}",
        )
    own = {kind: machine.link(f"/proc/self/ns/{kind}") for kind in KINDS}
    other = {kind: machine.link(f"/proc/{peer}/ns/{kind}") for kind in KINDS}
    hidden = [kind for kind in KINDS if other[kind] is None]
    if hidden:
        return failed(
            f"/proc/{peer}/ns/{hidden[0]} cannot be read",
            "run this as the user that the other service runs as, or root",
        )
    apart = [kind for kind in KINDS if own[kind] != other[kind]]
    if not apart:
        return ok(f"process {peer} shares {', '.join(KINDS)}")
    difference = "; ".join(f"{kind}: {own[kind]} here, {other[kind]} there" for kind in apart)
    if needs_gpu:
        return failed(difference, _COMPOSE)
    if "pid" in apart:
        return warning(
            difference,
            "share the pid namespace: otherwise the daemon cannot see that an engine was killed, and keeps its "
            "incomplete pages in quarantine until somebody releases them",
        )
    return ok(f"{difference}; sharing host memory does not depend on them")
