"""The mnemonics that the project's code objects contain, by GPU: mnemonics.txt, which tests hold complete.

``python -m tests.simulators.amdgpu.code.mnemonics`` adds those of what has been compiled so far.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from tests.kernels.device.amdgcn import CODE
from tests.simulators.amdgpu.code import disassembly, objectfile
from tests.simulators.amdgpu.code.disassembly import Instruction

LIST = Path(__file__).with_suffix(".txt")


@functools.cache
def listed() -> dict[str, frozenset[str]]:
    """Return the GPUs of each mnemonic that is listed."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {name: frozenset(gpus) for name, *gpus in (line.split() for line in lines if line)}


def of(instructions: Iterable[Instruction]) -> set[str]:
    """Return the mnemonics of some instructions; a dual one has two."""
    return {half.mnemonic for one in instructions for half in (one, one.second) if half}


def main() -> None:
    """Add to the list what the code objects that were compiled contain."""
    known = {name: set(gpus) for name, gpus in listed().items()}
    for path in sorted(CODE.iterdir()):
        gpu = objectfile.read(path.read_bytes()).gpu
        for name in of(disassembly.disassembled(path)):
            known.setdefault(name, set()).add(gpu)
    LIST.write_text("".join(f"{name} {' '.join(sorted(gpus))}\n" for name, gpus in sorted(known.items())))


if __name__ == "__main__":
    main()
