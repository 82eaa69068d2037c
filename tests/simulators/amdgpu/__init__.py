"""AMD's GPUs simulated from their machine code: see README.md."""

from __future__ import annotations

from tests.simulators.amdgpu.device import GPUS, Amd, Module, hiprtc
from tests.simulators.amdgpu.library import Fault

__all__ = ["GPUS", "Amd", "Fault", "Module", "hiprtc"]
