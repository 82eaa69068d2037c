"""Checks of the GPU device nodes, and of the environment variables that change which GPUs a process sees."""

from __future__ import annotations

import errno
import os
import stat

from services.doctor.check import Finding, failed, fault, ok, skipped, warning
from services.doctor.machine import Machine
from services.doctor.stack import Stack

KFD = "/dev/kfd"
RENDER = "/dev/dri/renderD*"
NVIDIA = "/dev/nvidia[0-9]*"

#: Each of these hides GPUs from the process, or reorders them.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")

NO_GPU = "no GPU here, and none is requested"


def has_nodes(machine: Machine) -> bool:
    """Whether there is any sign of a GPU."""
    return machine.stat(KFD) is not None or bool(machine.glob(NVIDIA))


def device_nodes(machine: Machine, stack: Stack, needed: bool) -> Finding:
    """Whether the device nodes exist and this user may open them."""
    if not has_nodes(machine) and stack.gpus:
        return ok(f"neither {KFD} nor /dev/nvidia0 exists, but the runtime finds GPUs")
    if not has_nodes(machine):
        if not needed:
            return skipped(f"no GPU: neither {KFD} nor /dev/nvidia0")
        return failed(
            f"neither {KFD} nor /dev/nvidia0 exists",
            "load the driver (amdgpu) on the host; in a container, pass them in: `devices: [/dev/kfd, /dev/dri]`",
        )
    if machine.stat(KFD) is None:
        nodes = machine.glob(NVIDIA)
        return _first_refused(machine, nodes, needed) or ok(f"NVIDIA: {', '.join(nodes)}{_driver(machine)}")
    renders = machine.glob(RENDER)
    if not renders:
        return fault(
            needed,
            f"{KFD} exists, but no {RENDER}",
            "in a container, pass /dev/dri in as well: `devices: [/dev/dri]`",
        )
    usable = [path for path in renders if not machine.open_errno(path)]
    refused = _first_refused(machine, [KFD], needed) or _first_refused(machine, renders, needed and not usable)
    return refused or ok(f"AMD: {KFD}, {', '.join(usable)}{_driver(machine)}")


def _first_refused(machine: Machine, paths: list[str], needed: bool) -> Finding | None:
    for path in paths:
        number, node = machine.open_errno(path), machine.stat(path)
        if number == errno.EACCES and node:
            groups = " ".join(map(str, sorted(machine.gids)))
            return fault(
                needed,
                f"uid {machine.uid} may not open {path}: it belongs to group {node.gid}, mode "
                f"{stat.S_IMODE(node.mode):04o}, and this process is in groups {groups}",
                f"add the user to group {node.gid} (often `render` or `video`); in a container by number, since the "
                f'image may not define the name: `group_add: ["{node.gid}"]`',
            )
        if number == errno.EPERM:
            return fault(
                needed,
                f"{path} exists but may not be used: {os.strerror(number)}",
                "list it under `devices:`: a container may not use a device that is only mounted",
            )
        if number:
            return fault(
                needed,
                f"{path} cannot be opened: {os.strerror(number)}",
                "look in the kernel log (dmesg) for the reason",
            )
    return None


def _driver(machine: Machine) -> str:
    amd = machine.text("/sys/module/amdgpu/version")
    nvidia = machine.text("/proc/driver/nvidia/version")
    if machine.stat(KFD) is not None:
        return f"; driver amdgpu {amd.strip()}" if amd else ""
    return f"; {nvidia.splitlines()[0].removeprefix('NVRM version:').strip()}" if nvidia else ""


def visible_devices(machine: Machine, needed: bool, peer: int | None) -> Finding:
    """Whether variables hide every GPU, or number them differently than in the peer process."""
    if not needed and not has_nodes(machine):
        return skipped(NO_GPU)
    own = {name: machine.environ[name] for name in VISIBLE if name in machine.environ}
    for name, value in own.items():
        if value.strip() in ("", "-1"):
            return fault(needed, f"{name} is {value!r}: it hides every GPU", f"unset {name}, or name a GPU")
    environ = machine.text(f"/proc/{peer}/environ") if peer is not None else None
    if environ is not None:
        pairs = dict(pair.partition("=")[::2] for pair in environ.split("\0"))
        other = {name: pairs[name] for name in VISIBLE if name in pairs}
        if own != other:
            return fault(
                needed,
                f"here {_listed(own)}; in process {peer} {_listed(other)}",
                "start both with the same values: a handle names its GPU by its ordinal in the exporting process",
            )
    if "ROCR_VISIBLE_DEVICES" in own and "HIP_VISIBLE_DEVICES" in own:
        return warning(
            f"{_listed(own)}: the second selects among the GPUs that the first leaves",
            "set one of the two, for both services",
        )
    return ok(_listed(own))


def _listed(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items()) or "no variable hides a GPU"


def ipc_mode(machine: Machine, stack: Stack, needed: bool) -> Finding:
    """Whether ROCm's legacy IPC mode is forced, which newer GPUs do not support."""
    if stack.gpus and not stack.is_hip:
        return skipped("not ROCm")
    if not needed and not has_nodes(machine):
        return skipped(NO_GPU)
    value = machine.environ.get("HSA_ENABLE_IPC_MODE_LEGACY", "")
    if value in ("", "0"):
        return ok(f"HSA_ENABLE_IPC_MODE_LEGACY is {value or 'unset'}")
    archs = {gpu.arch for gpu in stack.gpus}
    summary, change = f"HSA_ENABLE_IPC_MODE_LEGACY is {value}", "unset HSA_ENABLE_IPC_MODE_LEGACY, or set it to 0"
    if any(arch.startswith(("gfx11", "gfx12")) for arch in archs):
        return fault(needed, f"{summary}, and {', '.join(sorted(archs))} cannot share memory that way", change)
    return warning(f"{summary}: RDNA3 and RDNA4 cannot share memory that way", change)
