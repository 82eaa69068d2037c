"""AMD's GPUs simulated from their machine code: see README.md."""

from __future__ import annotations

import shutil

from tests.simulators.amdgpu.device import GPUS, Amd, Module
from tests.simulators.amdgpu.disassembly import OBJDUMP
from tests.simulators.amdgpu.library import COMPILER, Fault

__all__ = ["GPUS", "Amd", "Fault", "Module", "missing"]


def missing() -> str | None:
    """Say what is not installed, besides clang, or None."""
    for tool in (OBJDUMP, COMPILER):
        if not shutil.which(tool):
            return f"{tool} is not on PATH"
    return None
