"""One wave's state, for instructions by themselves: assembled by LLVM, run from given registers, read back whole."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.simulators.amdgpu.code import disassembly, encoding
from tests.simulators.amdgpu.code.disassembly import Instruction
from tests.simulators.amdgpu.device import Memory
from tests.simulators.amdgpu.library import checked, executor

ASSEMBLER = "llvm-mc-19"
VCC, TRAP, M0, EXEC = 106, 108, 124, 126
ACCUMULATORS = 256


#: Where `State.memory` is.
ADDRESS = 1 << 34
MEMORY_BYTES = 8192


class State:
    """What a wave has: scalars [128], vectors [512 registers, 64 lanes], SCC, LDS, private bytes [lanes, bytes].

    And an array of memory, at `ADDRESS`.
    """

    def __init__(self, shared_bytes: int = 0, private_bytes: int = 0, lanes: int = 64) -> None:
        self.s = np.zeros(128, np.uint32)
        self.v = np.zeros((512, 64), np.uint32)
        self.scc = np.zeros(1, np.uint8)
        self.shared = np.zeros(shared_bytes, np.uint8)
        self.private = np.zeros((lanes, private_bytes), np.uint8)
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)

    def copy(self) -> State:
        """Return the same state, of its own."""
        other = State()
        for name in ("s", "v", "scc", "shared", "private", "memory"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def scalar64(self, index: int) -> int:
        """Return a pair of scalars as one number."""
        return int(self.s[index]) | int(self.s[index + 1]) << 32

    def set_scalar64(self, index: int, value: int) -> None:
        """Set a pair of scalars."""
        self.s[index], self.s[index + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF

    def active(self, lanes: int) -> NDArray[np.bool_]:
        """Return which lanes EXEC has, [64]."""
        exec_ = self.scalar64(EXEC) & ((1 << lanes) - 1)
        return np.array([exec_ >> lane & 1 for lane in range(64)], bool)


class Snippets:
    """Pieces of assembly for one GPU, after each of which the wave ends."""

    def __init__(self, gpu: str, pieces: Sequence[str]) -> None:
        self.lanes = 64 if gpu.startswith("gfx9") else 32
        text = "".join(f"{piece}\ns_endpgm\n" for piece in pieces)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pieces.o"
            assemble(text, gpu, path)
            self.instructions = disassembly.disassembled(path)
        self._memory, self._library = Memory(), executor()
        if self._memory.add(bytes(MEMORY_BYTES), "the state's memory") != ADDRESS:
            raise RuntimeError("the first array is not where tests have it")
        program = ctypes.c_void_p()
        encoded = encoding.encoded(self.instructions, gpu)
        checked(self._library.executor_program(encoded.encode(), 0, ctypes.byref(program)))
        self._program = program
        self.pieces = list(_pieces(self.instructions))

    def __del__(self) -> None:
        if hasattr(self, "_program"):
            self._library.executor_program_end(self._program)

    def run(self, number: int, state: State) -> State:
        """Return the state after piece ``number``; raises Fault."""
        after = state.copy()
        self._memory.write(ADDRESS, state.memory.tobytes())
        pointers = [one.ctypes.data for one in (after.s, after.v, after.scc, after.shared)]
        checked(
            self._library.executor_wave(
                self._program, self._memory.handle, self.pieces[number][0].pc, self.lanes, *pointers, len(after.shared),
                after.private.ctypes.data, after.private.shape[1],
            )
        )  # fmt: skip
        after.memory = np.frombuffer(self._memory.read(ADDRESS, MEMORY_BYTES), np.uint8).copy()
        return after


def assemble(text: str, gpu: str, path: Path) -> None:
    """Write an object file of assembly; ValueError, with the assembler's words, if there is an error."""
    command = [ASSEMBLER, "-triple=amdgcn-amd-amdhsa", f"-mcpu={gpu}", "-filetype=obj", "-o", str(path)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{gpu}: {done.stderr[:2000]}")


def _pieces(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    found: list[list[Instruction]] = [[]]
    for one in instructions:
        found[-1].append(one)
        if one.mnemonic == "s_endpgm":
            found.append([])
    return found[:-1]
