"""Checks of CuPy, its runtime and compiler. A child process queries them, since a broken driver may hang."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services import launch
from services.doctor.check import Finding, failed, fault, ok, skipped, warning
from services.doctor.machine import Machine

PROBE_S = 40.0

#: HIP packs its version as major * 10^7 + minor * 10^5 + patch, CUDA as major * 1000 + minor * 10.
_HIP = (10_000_000, 100_000)
_CUDA = (1000, 10)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as the runtime reports it; memory in bytes."""

    ordinal: int
    id: str
    name: str
    arch: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The output of `services.doctor.probe`. ``error`` says why CuPy is unusable, ``gpu_error`` why no GPU is usable.

    ``build`` is the runtime version that CuPy was built for; ``runtime`` and ``driver`` are the versions in use.
    """

    cupy: str = ""
    error: str = ""
    is_hip: bool = False
    build: int = 0
    runtime: int = 0
    driver: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    gpu_error: str = ""
    asked: bool = True


#: If there is no GPU and none is requested, CuPy is not even imported.
NOT_ASKED = Stack(asked=False)


def ask(machine: Machine, limit_s: float = PROBE_S) -> Stack:
    """Run the probe."""
    ran = machine.run(launch.python("services.doctor.probe"), limit_s)
    if ran.status is None:
        return Stack(error=f"importing CuPy and counting GPUs took longer than {limit_s:g} s; the driver may hang")
    try:
        facts: dict[str, Any] = json.loads(ran.output)
        return Stack(**{**facts, "gpus": tuple(GpuFacts(**gpu) for gpu in facts.get("gpus", ()))})
    except (ValueError, TypeError):
        last = (ran.errors.strip().splitlines() or ["no output"])[-1]
        return Stack(error=f"a process that imports CuPy and counts GPUs exited with status {ran.status}: {last}")


def cupy(stack: Stack, needed: bool) -> Finding:
    """Whether CuPy can be imported."""
    if not stack.asked:
        return skipped("no GPU here, and none is requested")
    if stack.error:
        return fault(
            needed,
            stack.error,
            "install CuPy in the checkout: `pip install -c constraints.txt -e '.[rocm]'` for ROCm 7, `-e '.[cuda]'` "
            "for CUDA 13; the runtime's libraries must be where the loader finds them "
            "(LD_LIBRARY_PATH=/opt/rocm/lib)",
        )
    return ok(f"CuPy {stack.cupy} for {'ROCm' if stack.is_hip else 'CUDA'}, built for {_version(stack, stack.build)}")


def runtime(stack: Stack, needed: bool, only: int | None = None) -> Finding:
    """Whether runtime, driver and CuPy are compatible and find a GPU, the one with ordinal ``only`` if given."""
    if not stack.asked or stack.error:
        return skipped("no CuPy")
    name = "HIP" if stack.is_hip else "CUDA"
    build, found, driver = (_version(stack, packed) for packed in (stack.build, stack.runtime, stack.driver))
    if stack.is_hip and stack.runtime // _HIP[0] != stack.build // _HIP[0]:
        return fault(
            needed,
            f"the runtime is HIP {found}, but CuPy was built for {build}",
            f"install ROCm {stack.build // _HIP[0]}.x, or the CuPy wheel for ROCm {stack.runtime // _HIP[0]}",
        )
    if not stack.is_hip and stack.driver // _CUDA[0] < stack.runtime // _CUDA[0]:
        return fault(
            needed,
            f"the driver supports CUDA {driver}, but the runtime is {found}",
            "install a newer NVIDIA driver, or a CuPy wheel for an older CUDA",
        )
    if not stack.gpus:
        return fault(
            needed,
            stack.gpu_error or "the runtime finds no GPU",
            "see the checks of the device nodes and of the variables that hide GPUs",
        )
    if only is not None and only >= len(stack.gpus):
        return fault(
            needed,
            f"--gpu {only}: out of range; the runtime has {len(stack.gpus)}, numbered from 0",
            "choose another --gpu, or see the check of the variables that hide GPUs",
        )
    listed = "; ".join(f"{gpu.ordinal}: {gpu.name} {gpu.arch} at {gpu.id}".replace("  ", " ") for gpu in stack.gpus)
    return ok(f"{name} {found}, driver {driver}; {listed}")


def _version(stack: Stack, packed: int) -> str:
    major, minor = _HIP if stack.is_hip else _CUDA
    return f"{packed // major}.{packed % major // minor}"


def compiler(machine: Machine, stack: Stack, needed: bool) -> Finding:
    """Whether CuPy can compile: on ROCm it asks hipcc for its include directories before every compilation."""
    if not stack.asked or stack.error:
        return skipped("no CuPy")
    if not stack.is_hip:
        return ok("not needed: CuPy compiles with NVRTC")
    path = machine.which("hipcc")
    if path is None:
        return fault(
            needed,
            "hipcc is not on PATH, but CuPy runs it before it compiles a kernel",
            "put /opt/rocm/bin on PATH; an image with only ROCm's runtime lacks hipcc: use a development image, or "
            "install hipcc and rocthrust in it",
        )
    return ok(path)


def kernel_cache(machine: Machine, stack: Stack, needed: bool) -> Finding:
    """Whether compiled kernels can be cached on disk."""
    if not stack.asked or stack.error:
        return skipped("no CuPy")
    home = machine.environ.get("HOME", "/")
    folder = Path(machine.environ.get("CUPY_CACHE_DIR") or f"{home}/.cupy/kernel_cache")
    existing = nearest(machine, folder)
    if not machine.may_write(str(existing)):
        return fault(
            needed,
            f"{folder} is not writable (at {existing})",
            "set CUPY_CACHE_DIR to a writable directory, in a container on a volume: compiled kernels are kept there",
        )
    return ok(str(folder))


def nearest(machine: Machine, path: Path) -> Path:
    """The path, or its nearest existing ancestor."""
    while machine.stat(str(path)) is None and path != path.parent:
        path = path.parent
    return path


def device_memory(stack: Stack, budget: int | None, needed: bool) -> Finding:
    """Whether each GPU has room for a budget in bytes; without a budget, reports the memory."""
    if not stack.gpus:
        return skipped("no GPU")
    summary = "; ".join(f"GPU {gpu.ordinal}: {gpu.free >> 20} MiB free of {gpu.total >> 20}" for gpu in stack.gpus)
    if budget is None or not needed:
        return ok(summary)
    wanted = f"--memory is {budget >> 20} MiB on each; {summary}"
    if any(budget > gpu.total for gpu in stack.gpus):
        return failed(wanted, "lower --memory: weights and activations need room on the GPU too")
    if any(budget > gpu.free for gpu in stack.gpus):
        return warning(
            wanted,
            "lower --memory, or stop what uses the GPU's memory; ignore this if it is a running daemon's arena",
        )
    return ok(wanted)
