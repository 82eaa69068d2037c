"""Code objects by AMD's own HIPRTC, as CuPy compiles on ROCm: Debian's, of HIP 5.2.

``python hiprtc.py GPU OPTIONS...`` compiles the source on standard input and writes the code object to standard output.
It is a process of its own, because HIPRTC ends the process where it does not know a GPU. Ends with 0, or with 1 and the
log on standard error; with 2 if there is no HIPRTC.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: The first is ROCm's since version 6; before, HIP's own library had the functions.
LIBRARIES = ["libhiprtc.so", "libamdhip64.so"]
#: The GPUs that HIPRTC 5.2 knows, of those that the kernels are for.
GPUS = ("gfx90a", "gfx1030")


def library() -> ctypes.CDLL | None:
    """Return the library that has HIPRTC, or None."""
    for name in LIBRARIES:
        try:
            found = ctypes.CDLL(name)
            found.hiprtcCreateProgram  # noqa: B018 - looked up
        except (OSError, AttributeError):
            continue
        return found
    return None


class Hiprtc:
    """A compiler as `amdgcn.Toolchain` is one. What was compiled before, by any process, is read from ``code``."""

    def __init__(self, code: Path) -> None:
        self._code = code
        path = _path(library())
        self._version = f"{path} {os.stat(path).st_size}"

    def code(self, text: str, defines: Mapping[str, str], gpu: str) -> Path:
        """Return the code object of a source for ``gpu``; raises `amdgcn.CompileError`."""
        from tests.kernels.device import amdgcn

        options = [f"-DRF_WAVE={amdgcn.WAVES[gpu]}", *(f"-D{key}={value}" for key, value in defines.items())]
        key = hashlib.sha256("\0".join([self._version, gpu, *options, text]).encode()).hexdigest()[:24]
        known = self._code / key
        if not known.exists():
            done = run(text, gpu, *options)
            if done.returncode:
                raise amdgcn.CompileError(f"HIPRTC for {gpu}: {done.stderr.decode(errors='replace')[:4000]}")
            amdgcn.keep(known, done.stdout)
        return known


def run(text: str, gpu: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Compile in a process of its own, with the options that kernels/device/module.py gives CuPy."""
    command = [sys.executable, str(Path(__file__)), gpu, "-std=c++17", *options]
    return subprocess.run(command, input=text.encode(), capture_output=True)


def _path(loaded: ctypes.CDLL | None) -> str:
    """Where a library that is loaded lies."""
    if loaded is None:
        raise OSError(f"none of {', '.join(LIBRARIES)} has HIPRTC")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names = (line.split()[-1] for line in maps)
        return next(name for name in names if Path(name).name.startswith(tuple(LIBRARIES)))


def main() -> int:
    """Run the command line; return the exit status."""
    hiprtc = library()
    if hiprtc is None:
        print(f"none of {', '.join(LIBRARIES)} has HIPRTC", file=sys.stderr)
        return 2
    gpu, *words = sys.argv[1:]
    program = ctypes.c_void_p()
    if hiprtc.hiprtcCreateProgram(ctypes.byref(program), sys.stdin.buffer.read(), b"kernel.hip", 0, None, None):
        print("hiprtcCreateProgram failed", file=sys.stderr)
        return 1
    options = [f"--offload-arch={gpu}".encode(), *(word.encode() for word in words)]
    failed = hiprtc.hiprtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    hiprtc.hiprtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    hiprtc.hiprtcGetProgramLog(program, log)
    print(log.value.decode(errors="replace"), file=sys.stderr)
    if failed or hiprtc.hiprtcGetCodeSize(program, ctypes.byref(size)) or not size.value:
        return 1
    code = ctypes.create_string_buffer(size.value)
    if hiprtc.hiprtcGetCode(program, code):
        return 1
    sys.stdout.buffer.write(code.raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
