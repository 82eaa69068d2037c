"""The first step: the doctor's own checks of the GPU, and what the machine is."""

from __future__ import annotations

import os
import platform
import sys

from services.doctor import check, devices, roundtrip, stack
from services.doctor.check import Check, Status
from services.doctor.firstlight import step
from services.doctor.machine import Machine


def body(report: step.Report, asked: step.Asked) -> None:
    """Look."""
    machine = Machine(os.environ)
    report.begin("importing CuPy and counting GPUs")
    found = stack.ask(machine)
    checks = [
        Check("GPU device nodes", lambda: devices.device_nodes(machine, found, True)),
        Check("GPUs that are visible", lambda: devices.visible_devices(machine, True, None)),
        Check("CuPy", lambda: stack.cupy(found, True)),
        Check("GPU runtime", lambda: stack.runtime(found, True, asked.gpu)),
        Check("kernel compiler", lambda: stack.compiler(machine, found, True)),
        Check("kernel cache", lambda: stack.kernel_cache(machine, found, True)),
        Check("GPU memory", lambda: stack.device_memory(found, None, True)),
        Check("sharing of GPU memory", lambda: devices.ipc_mode(machine, found, True)),
        Check("GPU memory, for real", lambda: roundtrip.gpu_round_trip(machine, found, True, asked.gpu)),
    ]
    try:
        for name, finding in check.run(checks):
            report.begin(name)
            sentence = f"{name}: {finding.found}" + (f" -> {finding.change}" if finding.change else "")
            if finding.status is Status.FAILED:
                report.failed(sentence)
            elif finding.status is Status.SKIPPED:
                report.skipped(sentence)
            else:
                report.passed(sentence)
    finally:
        machine.kill_children()
    gpu = next((gpu for gpu in found.gpus if gpu.ordinal == asked.gpu), None)
    report.facts(
        gpu=gpu.name if gpu else "",
        architecture=gpu.arch if gpu else "",
        memory_MiB=gpu.total >> 20 if gpu else 0,
        gpus=len(found.gpus),
        runtime="HIP" if found.is_hip else "CUDA",
        runtime_version=found.runtime,
        driver_version=found.driver,
        kernel_driver=_driver(machine),
        rocm=_rocm(machine),
        cupy=found.cupy,
        python=platform.python_version(),
        kernel=platform.release(),
    )


def _driver(machine: Machine) -> str:
    version = machine.text("/sys/module/amdgpu/version") or machine.text("/sys/module/nvidia/version") or ""
    return version.strip()


def _rocm(machine: Machine) -> str:
    return (machine.text("/opt/rocm/.info/version") or "").strip()


if __name__ == "__main__":
    sys.exit(step.run(body))
