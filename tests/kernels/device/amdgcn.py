"""AMD machine code without an AMD GPU: clang compiles the HIP sources for any, and reports each kernel's resources.

It takes `TOOLS`. Debian's device libraries are older than some GPUs; all they lack is a constant each, made here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NOTES = Path(__file__).parents[3] / "build" / "kernels" / "notes"
CODE = Path(__file__).parents[3] / "build" / "kernels" / "code"
CLANG, ASSEMBLER, READELF = "clang++-19", "llvm-as-19", "llvm-readelf-19"
#: Names of scripts/tools.txt.
TOOLS = ("clang", "lld", "llvm", "device-libs", "hip")

#: The GPUs that sources are compiled for, and the lanes of their waves: CDNA 2 and 3, RDNA 2, 3 and 4.
WAVES = {"gfx90a": 64, "gfx942": 64, "gfx1030": 32, "gfx1100": 32, "gfx1201": 32}
_ISA_VERSIONS = {"gfx942": ("942", 9402), "gfx1100": ("1100", 11000), "gfx1201": ("1201", 12001)}

#: As HIPRTC compiles; -mcumode too is what it passes.
OPTIONS = ["--cuda-device-only", "--no-gpu-bundle-output", "-mcumode", "-std=c++17", "-O3", "-Wno-linker-warnings"]


class CompileError(Exception):
    """A source that does not compile for a GPU."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's resources in its code object: bytes per block and thread, registers, spilled registers."""

    name: str
    wave: int
    shared_bytes: int
    private_bytes: int
    vector_registers: int
    spilled: int


class Toolchain:
    """clang with device libraries for every GPU of `WAVES`, in a new ``folder``.

    What was compiled before, by any process, is read from `NOTES` and `CODE`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries = folder / "bitcode"
        self._libraries.mkdir()
        for path in _bitcode():
            (self._libraries / path.name).symlink_to(path)
        for number, version in _ISA_VERSIONS.values():
            path = self._libraries / f"oclc_isa_version_{number}.bc"
            if not path.exists():
                _run([ASSEMBLER, "-o", str(path), "-"], _ISA_CONSTANT.format(version))
        (folder / "prefix.h").write_text("#include <hip/hip_runtime.h>\n")
        self._version = _run([CLANG, "--version"])
        self._locks = {gpu: threading.Lock() for gpu in WAVES}

    def compile(self, text: str, defines: Mapping[str, str], gpu: str) -> list[Kernel]:
        """Compile a source for ``gpu``; raises CompileError."""
        known = NOTES / self._key(text, defines, gpu)
        if not known.exists():
            keep(known, _run([READELF, "--notes", str(self.code(text, defines, gpu))]).encode())
        return read_notes(known.read_text())

    def code(self, text: str, defines: Mapping[str, str], gpu: str) -> Path:
        """Return the code object of a source for ``gpu``; raises CompileError."""
        known = CODE / self._key(text, defines, gpu)
        if not known.exists():
            header = ["-Xclang", "-include-pch", "-Xclang", str(self._header(gpu))]
            code = self._folder / known.name
            _run([*self._command(gpu), *_options(defines, gpu), *header, "-", "-o", str(code)], text)
            keep(known, code.read_bytes())
        return known

    def _key(self, text: str, defines: Mapping[str, str], gpu: str) -> str:
        return hashlib.sha256("\0".join([self._version, gpu, *_options(defines, gpu), text]).encode()).hexdigest()[:24]

    def _command(self, gpu: str) -> list[str]:
        libraries = ["--rocm-path=/usr", f"--rocm-device-lib-path={self._libraries}"]
        return [CLANG, "-x", "hip", f"--offload-arch={gpu}", *libraries]

    def _header(self, gpu: str) -> Path:
        """HIP's header, which takes longer to read than a source to compile: read once."""
        path = self._folder / f"{gpu}.pch"
        with self._locks[gpu]:
            if not path.exists():
                # The driver makes no precompiled header of a device's side, but the compiler proper does.
                prefix = str(self._folder / "prefix.h")
                told = _run([*self._command(gpu), *OPTIONS, "-###", prefix, "-o", str(path)], told=True)
                command = next(shlex.split(line) for line in told.splitlines() if '"-cc1"' in line)
                command[command.index("-emit-obj")] = "-emit-pch"
                command[command.index("-o") + 1] = str(path)
                _run(command)
        return path


_ISA_CONSTANT = (
    'target triple = "amdgcn-amd-amdhsa"\n'
    "@__oclc_ISA_version = linkonce_odr protected local_unnamed_addr addrspace(4) constant i32 {}, align 4\n"
)


def read_notes(notes: str) -> list[Kernel]:
    """Return the kernels of a code object from the output of ``llvm-readelf --notes``."""
    kernels = []
    # The list of arguments comes first in a kernel's entry and has names, too, deeper by four columns.
    for entry in re.split(r"^  - (?=\.)", notes.partition("amdhsa.kernels:")[2], flags=re.MULTILINE)[1:]:
        found = dict(re.findall(r"^(?:    )?\.(\w+): +(\S+)$", entry, flags=re.MULTILINE))
        kernels.append(
            Kernel(
                name=found["name"],
                wave=int(found["wavefront_size"]),
                shared_bytes=int(found["group_segment_fixed_size"]),
                private_bytes=int(found["private_segment_fixed_size"]),
                vector_registers=int(found["vgpr_count"]),
                spilled=int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"]),
            )
        )
    return kernels


def _options(defines: Mapping[str, str], gpu: str) -> list[str]:
    return [*OPTIONS, f"-DRF_WAVE={WAVES[gpu]}", *(f"-D{key}={value}" for key, value in defines.items())]


def keep(path: Path, data: bytes) -> None:
    """Whole, or not at all: another process may look for it now, and what is cut off would be found for ever."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".new-", delete=False) as new:
        new.write(data)
    os.replace(new.name, path)


def _bitcode() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*/amdgcn/bitcode/*.bc"))


def _run(command: Sequence[str], text: str = "", told: bool = False) -> str:
    """Return what a command prints, or with ``told`` its standard error."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}:\n" + "\n".join(done.stderr.splitlines()[:20]))
    return done.stderr if told else done.stdout
