"""The executor proper, in C++: built when its sources change, and called by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent / "cpp"
BUILD = Path(__file__).parents[3] / "build" / "amdgpu"
COMPILER = os.environ.get("CXX", "g++")
#: No product is contracted with a sum but by an instruction that does. Registers are read as numbers of any type.
FLAGS = [
    "-std=c++20", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fPIC", "-Wall", "-Wextra",
]  # fmt: skip

_u64, _u32, _pointer = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p


class Fault(Exception):
    """What a kernel does that a GPU would not allow, or an instruction that the executor lacks."""


class Launch(ctypes.Structure):
    """A launch as launch.cpp takes it."""

    _fields_ = [
        ("arguments", _u64), ("packet", _u64), ("bound", _u64), ("entry", _u32), ("grid", _u32 * 3),
        ("block", _u32 * 3),
        ("shared_bytes", _u32), ("private_bytes", _u32), ("lanes", _u32), ("vectors", _u32), ("accumulators", _u32),
        ("properties", _u32), ("user_scalars", _u32), ("ids", _u32), ("private_offset", _u32), ("ids_in_traps", _u32),
        ("threads_apart", _u32), ("seed", _u32), ("whole_barriers", _u32),
    ]  # fmt: skip


@functools.cache
def executor() -> ctypes.CDLL:
    """Return the library, built if need be; raises CalledProcessError if it does not compile."""
    library = ctypes.CDLL(str(_built()))
    for name, result, arguments in [
        ("error", ctypes.c_char_p, []),
        ("memory", _pointer, []),
        ("memory_end", None, [_pointer]),
        ("new", ctypes.c_int, [_pointer, _u64, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_u64)]),
        ("free", None, [_pointer, _u64]),
        ("data", _pointer, [_pointer, _u64]),
        ("program", ctypes.c_int, [ctypes.c_char_p, _u64, ctypes.POINTER(_pointer)]),
        ("program_end", None, [_pointer]),
        ("counts", None, [_pointer, ctypes.POINTER(_u64)]),
        ("launch", ctypes.c_int, [_pointer, _pointer, ctypes.POINTER(Launch)]),
        ("wave", ctypes.c_int, [_pointer, _pointer, _u32, _u32, *[_pointer] * 4, _u32, _pointer, _u32]),
        ("has", ctypes.c_int, [ctypes.c_char_p]),
    ]:
        function = getattr(library, f"executor_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def checked(failed: int) -> None:
    """Raise Fault with the executor's words if ``failed`` is not 0."""
    if failed:
        raise Fault(executor().executor_error().decode(errors="replace"))


def _built() -> Path:
    """Return the shared library, from an earlier run if the sources and the processor are the same."""
    sources = sorted(FOLDER.glob("*.cpp"))
    parts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())]
    target = _run([COMPILER, "-march=native", "-Q", "--help=target"])
    key = hashlib.sha256("\0".join([_run([COMPILER, "--version"]), target, *FLAGS, *parts]).encode()).hexdigest()[:24]
    path = BUILD / f"executor-{key}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
            commands = [
                [COMPILER, *FLAGS, "-c", str(source), "-o", target]
                for source, target in zip(sources, objects, strict=True)
            ]
            list(threads.map(_run, commands))
            new = Path(folder) / path.name
            _run([COMPILER, "-shared", *objects, "-o", str(new)])
            os.replace(new, path)
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
