"""``python -m services.kvcache doctor``: check whether this machine can run the daemon as configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.doctor import addresses, command, devices, namespaces, resources, roundtrip, stack
from services.doctor.check import Check
from services.doctor.machine import Machine
from services.kvcache.api.servicer import SERVICE
from services.kvcache.config import GPU, Config
from services.kvcache.metrics import PREFIX


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 if no check failed, 1 if one did. Raises InvalidConfiguration for invalid flags."""
    options = command.options("services.kvcache", "engine", words)
    config = Config.read(options.rest, environ)
    machine = Machine(environ)
    title = f"The KV-cache daemon with --device {config.device} --memory {config.limits.budget_bytes}:"
    return command.report(machine, title, checks(machine, config, options.peer), options.json)


def checks(machine: Machine, config: Config, peer: int | None) -> list[Check]:
    """The checks of a daemon with these settings."""
    needed, budget = config.device == GPU, config.limits.budget_bytes
    found = stack.ask(machine) if needed or devices.has_nodes(machine) else stack.NOT_ASKED
    memory: list[Check] = []
    if not needed:
        memory = [
            Check("shared memory", lambda: resources.shared_memory(machine, config.arena_dir, budget)),
            Check("shared memory, for real", lambda: roundtrip.file_round_trip(machine, config.arena_dir)),
        ]
    own = addresses.Running("KV-cache daemon", SERVICE, PREFIX, config.tls)
    metrics: list[Check] = []
    if (bound := config.metrics) is not None:
        metrics = [Check("metrics", lambda: addresses.metrics(machine, bound, own))]
    return [
        *(Check("listen", lambda at=at: addresses.listen(machine, at, own)) for at in config.listeners),  # type: ignore[misc]
        *metrics,
        Check("open files", lambda: resources.open_files(machine, config.limits.max_sessions)),
        *memory,
        Check("namespaces", lambda: namespaces.namespaces(machine, peer, needed)),
        Check("GPU device nodes", lambda: devices.device_nodes(machine, found, needed)),
        Check("GPUs that are visible", lambda: devices.visible_devices(machine, needed, peer)),
        Check("CuPy", lambda: stack.cupy(found, needed)),
        Check("GPU runtime", lambda: stack.runtime(found, needed)),
        Check("GPU memory", lambda: stack.device_memory(found, budget if needed else None, needed)),
        Check("sharing of GPU memory", lambda: devices.ipc_mode(machine, found, needed)),
        Check("GPU memory, for real", lambda: roundtrip.gpu_round_trip(machine, found, needed)),
    ]
