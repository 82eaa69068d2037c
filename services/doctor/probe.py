"""``python -m services.doctor.probe``: print what CuPy and its runtime report, as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rocmforge.client.arena.gpu_ipc import Runtime
from services.common.errors import GpuError, InvalidConfiguration
from services.doctor.stack import GpuFacts, Stack


def look() -> Stack:
    """Import CuPy and query every GPU."""
    try:
        runtime = Runtime.load()
    except InvalidConfiguration as error:
        return Stack(error=error.message)
    import cupy

    api = runtime.api
    stack = Stack(cupy=cupy.__version__, is_hip=runtime.is_hip, build=int(cupy.cuda.driver.get_build_version()))
    try:
        stack = dataclasses.replace(stack, runtime=int(api.runtimeGetVersion()), driver=int(api.driverGetVersion()))
        gpus = tuple(_facts(runtime, ordinal) for ordinal in range(runtime.count()))
    except (InvalidConfiguration, GpuError) as error:
        return dataclasses.replace(stack, gpu_error=error.message)
    except api.CUDARuntimeError as error:
        return dataclasses.replace(stack, gpu_error=str(error).splitlines()[0])
    return dataclasses.replace(stack, gpus=gpus)


def _facts(runtime: Runtime, ordinal: int) -> GpuFacts:
    gpu = runtime.gpu(ordinal)
    properties: dict[str, Any] = runtime.api.getDeviceProperties(ordinal)
    free, total = gpu.memory()
    arch = _text(properties.get("gcnArchName", b"")) or f"sm_{properties['major']}{properties['minor']}"
    return GpuFacts(ordinal, gpu.id, _text(properties["name"]), arch.partition(":")[0], free, total)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(look())))
