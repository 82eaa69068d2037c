"""What a kernel's machine code takes of AMD's GPUs, for the stand-in's occupancy query: ``resources.py GPU FILE``.

The file has the compiler's options, one a line, an empty line, and the source. Prints a line a kernel: its name, VGPRs
(with AGPRs, where they share registers) and bytes of LDS. Ends with 1 if clang does not compile it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main(gpu: str, file: str) -> int:
    """Run the command line; return the exit status."""
    from tests.kernels.device.amdgcn import CompileError, Toolchain

    options, _, source = Path(file).read_text(encoding="utf-8").partition("\n\n")
    given = (line.removeprefix("-D").partition("=") for line in options.splitlines() if line.startswith("-D"))
    defines = {name: value for name, _, value in given if name != "RF_WAVE"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            kernels = Toolchain(Path(folder)).compile(source, defines, gpu)
    except (CompileError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for kernel in kernels:
        print(kernel.name, kernel.vector_registers, kernel.shared_bytes)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(*sys.argv[1:]))
