"""Compile the source on standard input with HIPRTC, as CuPy does on ROCm: ``hiprtc.py GPU OPTIONS...``.

A process of its own for each source, because HIPRTC ends the process where it does not know a GPU. Ends with 0, or with
1 and the log on standard error; with 2 if there is no HIPRTC.
"""

from __future__ import annotations

import ctypes
import sys

#: The first is ROCm's since version 6; before, HIP's own library had the functions.
LIBRARIES = ["libhiprtc.so", "libamdhip64.so"]


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
    if not failed and (hiprtc.hiprtcGetCodeSize(program, ctypes.byref(size)) or not size.value):
        failed = 1
    print(log.value.decode(errors="replace"), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
