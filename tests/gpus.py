"""GPUs for tests: real ones where there are any, otherwise those of the stand-in for ROCm in tests/rocm.

With ROCMFORGE_TEST_GPU set only real ones count, and a run that finds none fails: see tests/conftest.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from services.common.errors import InvalidConfiguration
from tests import tools

ROOT = Path(__file__).parents[1]
STANDIN_BYTES = 64 << 20


@dataclass(frozen=True)
class Host:
    """A machine with ``devices`` GPUs; a process that shall use them inherits ``environment``."""

    environment: Mapping[str, str]
    devices: int
    is_real: bool


@functools.cache
def _found() -> Runtime | str:
    try:
        runtime = Runtime.load()
        runtime.count()
    except InvalidConfiguration as error:
        return error.message
    return runtime


def gpu_or_skip() -> Gpu:
    """A GPU that this process may use itself; skips the test when there is none."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(f"no GPU: {found}")
    return found.gpu(0)


def host(devices: int) -> Host:
    """A machine for processes of their own; skips the test when real GPUs are required, or too few are there."""
    found = _found()
    if isinstance(found, Runtime):
        if found.count() < devices:
            pytest.skip(f"no GPU {devices - 1}: there are {found.count()}")
        return Host(environment(os.environ), found.count(), True)
    if os.environ.get("ROCMFORGE_TEST_GPU"):
        pytest.skip(f"no GPU: {found}")
    from tests.simulators.rocm import standin

    tools.need("g++")
    try:
        machine = standin.environment(devices=devices, memory=STANDIN_BYTES)
    except standin.Unavailable as error:
        pytest.skip(f"no stand-in for a GPU: {error}")
    return Host(environment(machine), devices, False)


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The same, for a process that imports this project from its source tree."""
    roots = (ROOT, ROOT / "protos", ROOT / "clients" / "python")
    path = os.pathsep.join(filter(None, [base.get("PYTHONPATH"), *map(str, roots)]))
    return {**base, "PYTHONPATH": path}
