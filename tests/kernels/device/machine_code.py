"""Faults of a kernel's machine code, whatever it computes."""

from __future__ import annotations

from pathlib import Path

from tests.simulators.amdgpu import GPUS, loops
from tests.simulators.amdgpu.code import disassembly, mnemonics, objectfile
from tests.simulators.amdgpu.code.disassembly import Instruction
from tests.simulators.amdgpu.code.objectfile import Kernel

#: Waves that a SIMD must have registers for, by source: on CDNA (of 8) and on RDNA (of 16).
WAVES_PER_SIMD: dict[str, tuple[int, int]] = {
    "activation": (8, 16),
    "attention_combine": (7, 16),
    "attention_decode": (2, 6),
    "attention_prefill": (1, 6),
    "checksum": (8, 16),
    "embedding": (8, 16),
    "gemv": (3, 10),
    "norm": (7, 16),
    "pages": (8, 16),
    "rope": (7, 16),
    "sampling": (8, 16),
}


#: Registers that may be spilled, by source and GPU. RDNA 2 has 64 for each thread of a block of 1024.
SPILLED = {("norm", "gfx1030"): 1}


def waves_per_simd(kernel: Kernel, gpu: str) -> int:
    """Return how many waves of a kernel fit in a SIMD's registers."""
    if kernel.lanes == 64:
        return min(8, 512 // (kernel.vectors + kernel.accumulators))
    if gpu == "gfx1030":
        return min(16, 1024 // (-(-kernel.vectors // 8) * 8))
    return min(16, 1536 // (-(-kernel.vectors // 24) * 24))


def faults(source: str, path: Path) -> list[str]:
    """Say what is wrong with the code object at ``path``, made of kernels/``source``.hip for one of `GPUS`."""
    code = objectfile.read(path.read_bytes())
    found = []
    for kernel in code.kernels.values():
        most = SPILLED.get((source, code.gpu), 0)
        if kernel.spilled > most or kernel.private_bytes > 8 * most:
            found.append(
                f"{kernel.name}: {kernel.spilled} registers spilled, {kernel.private_bytes} bytes of private memory"
            )
        least = WAVES_PER_SIMD[source][0 if kernel.lanes == 64 else 1]
        if code.gpu == "gfx1030":  # two thirds of the later ones' registers
            least = least * 2 // 3
        waves = waves_per_simd(kernel, code.gpu)
        if waves < least:
            found.append(
                f"{kernel.name}: {kernel.vectors} VGPRs and {kernel.accumulators} AGPRs leave room for "
                f"{waves} waves per SIMD, of {least}"
            )
    return [*of_instructions(path), *(f"{code.gpu}: {one}" for one in found)]


def of_instructions(path: Path) -> list[str]:
    """Say what is wrong with the instructions of a code object, whatever registers they take."""
    code = objectfile.read(path.read_bytes())
    instructions = disassembly.disassembled(path)
    unlisted = {name for name in mnemonics.of(instructions) if code.gpu not in mnemonics.listed().get(name, ())}
    found = [f"{name} is not in mnemonics.txt, so that no test has it" for name in sorted(unlisted)]
    for kernel in code.kernels.values():
        own = [one for one in instructions if kernel.entry <= one.pc < kernel.entry + kernel.size]
        found += [f"{kernel.name}: {fault}" for fault in [*loops.faults(own), *_flat(own)]]
    return [f"{code.gpu}: {one}" for one in found]


def _flat(own: list[Instruction]) -> list[str]:
    """Loads and stores by an address of which the compiler cannot say that it is global memory's wait for LDS, too."""
    return [f"0x{one.pc:x}: {one.text}: a flat instruction" for one in own if one.mnemonic.startswith("flat_")]


__all__ = ["GPUS", "faults", "of_instructions", "waves_per_simd"]
