"""A CPU that runs the HIP sources as a GPU does: g++ compiles them, and every GPU thread of a block is a fiber.

`Cpu` is a device; see cpu/gpu.h for what a kernel finds there, cpu/worker.cpp for the process that runs it.
Barriers, shuffles and ballots behave as on a GPU whose waves have ``wave`` lanes, and what a GPU leaves undefined is an
error: a barrier or an operation of a wave that not all threads reach, memory out of bounds, more than 48 KB of shared
memory. Shared memory is NaN when a block begins. ``permuted`` takes threads, waves and blocks in another order each
time, which shows a barrier that is missing. ``sanitised`` compiles with ASan and UBSan, ``optimised`` as far as a GPU's
compiler would, which shows what the language leaves undefined: locals are not poisoned then. ``gfx11`` has the rows of
a product in the order of RDNA 3.

A kernel whose macros make its entry points must still spell each as ``RF_KERNEL name(``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kernels.device import source

FOLDER = Path(__file__).parent / "source"
BUILD = Path(__file__).parents[3] / "build" / "kernels"
COMPILER = os.environ.get("CXX", "g++")
PLAIN = ["-O1", "-ftrivial-auto-var-init=pattern"]
OPTIMISED = ["-O2"]
SANITISED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
#: Kernels are compiled without these, so that no value depends on them.
COMMON = ["-std=c++17", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
#: Written as one type and read as another is undefined, and may or may not be right. The level comes behind the error,
#: which has one of its own.
ALIASING = ["-fstrict-aliasing", "-Werror=strict-aliasing", "-Wstrict-aliasing=2"]

_KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\(\(executor_kernel\)\)\s+void\s+')
_BOUNDS = "__attribute__((executor_launch_bounds("

Extent: TypeAlias = int | tuple[int, ...]


def poisoned(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of NaN, or of bytes 0xCD for integers."""
    shape, kind = (shape,) if isinstance(shape, int) else shape, np.dtype(dtype)
    if kind.kind == "f" or kind == ml_dtypes.bfloat16:
        return np.full(shape, np.nan, kind)
    return np.full(math.prod(shape) * kind.itemsize, 0xCD, np.uint8).view(kind).reshape(shape)


class KernelError(Exception):
    """A kernel that does not compile, cannot be launched, or did what a GPU does not allow."""


class Array:
    """Memory of a device, freed with this object."""

    def __init__(self, worker: _Worker, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._worker = worker
        self.number = number
        self.shape = shape
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __del__(self) -> None:
        self._worker.freed.append(self.number)


class Module:
    """One compiled source."""

    def __init__(self, device: Cpu, library: Path, file: str) -> None:
        self._device = device
        self._library = library
        self._file = file

    def launch(self, name: str, grid: Extent, block: Extent, args: Sequence[Any], shared: int = 0) -> None:
        """Run kernel ``name`` and wait for it.

        ``args`` are arrays, None for a null pointer, or NumPy scalars of exactly the kernel's widths; ``shared`` is the
        bytes of dynamic shared memory. Raises KernelError.
        """
        words = [name, *_three(grid), *_three(block), shared, self._device.next_seed()]
        self._device.launch(self._library, [*words, *map(self._word, args)], f"{self._file}: {name}")

    def _word(self, argument: Any) -> str:
        if argument is None:
            return "p0"
        if isinstance(argument, Array):
            return f"p{self._device.number(argument)}"
        if isinstance(argument, np.floating | np.integer):
            return ("f" if isinstance(argument, np.floating) else "i") + argument.tobytes().hex()
        raise TypeError(f"{argument!r}: a kernel's argument is an array of the device, None or a NumPy scalar")


class Cpu:
    """A device: compiles sources, holds arrays, launches kernels."""

    def __init__(
        self,
        wave: int,
        *,
        permuted: bool = False,
        sanitised: bool = False,
        optimised: bool = False,
        gfx11: bool = False,
        ucontext: bool = False,
        seed: int = 1,
    ) -> None:
        if sanitised and optimised:
            raise ValueError("sanitised and optimised: one of them at a time")
        if gfx11 and wave != 32:
            raise ValueError(f"wave={wave}: must be 32 for gfx11")
        self.wave = wave
        self.sanitised = sanitised
        self._permuted = permuted
        self._seed = seed
        level = SANITISED if sanitised else OPTIMISED if optimised else PLAIN
        self._flags = [*level, *(["-DRF_CPU_GFX11"] if gfx11 else [])]
        self._worker_flags = [*(SANITISED if sanitised else OPTIMISED), *(["-DEXECUTOR_UCONTEXT"] if ucontext else [])]
        self._running: _Worker | None = None

    def compile(self, name: str, defines: Mapping[str, str | int] | None = None) -> Module:
        """Compile kernels/``name``.hip; KernelError with the compiler's first lines if it will not."""
        return self.compile_text(source.read(name), defines, f"{name}.hip")

    def compile_text(self, text: str, defines: Mapping[str, str | int] | None = None, file: str = "test.hip") -> Module:
        """Compile a text that has its common.h already (`source.inlined`)."""
        words = [f"-D{name}={value}" for name, value in source.checked(text, defines or {}, file).items()]
        words = [*COMMON, *ALIASING, *self._flags, f"-DRF_WAVE={self.wave}", *words]
        return Module(self, _library(text, tuple(words)), file)

    def array(self, values: ArrayLike) -> Array:
        """Copy ``values`` to the device."""
        return self._new(np.asarray(values))

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return memory that holds NaN, or the byte 0xCD for integers."""
        return self._new(poisoned(shape, dtype))

    def get(self, array: Array) -> NDArray[Any]:
        """Copy an array to the host."""
        self.number(array)
        data = self._worker.request("read", array.number, answer_bytes=array.nbytes)[1]
        return np.frombuffer(data, array.dtype).reshape(array.shape).copy()

    def close(self) -> None:
        """End the process; its arrays are gone."""
        if self._running:
            self._running.close()
            self._running = None

    def launch(self, library: Path, words: Sequence[object], what: str) -> None:
        """Launch from a compiled ``library``; `Module.launch` is the way to call this."""
        try:
            self._worker.request("launch", self._worker.load(library), *words)
        except KernelError as error:
            raise KernelError(f"{what}: {error}") from None

    def next_seed(self) -> int:
        """Return the number that the next launch's order comes of; 0 is no permutation."""
        if not self._permuted:
            return 0
        self._seed += 1
        return self._seed

    def number(self, array: Array) -> int:
        """Return the worker's number of ``array``; KernelError if it is not there, or no longer."""
        if array._worker is not self._running or array._worker.ended:
            raise KernelError("an array of another device, or of this one before a kernel's fault ended its process")
        return array.number

    def _new(self, values: NDArray[Any]) -> Array:
        answer, _ = self._worker.request("new", values.nbytes, 16)
        array = Array(self._worker, int(answer), values.shape, values.dtype)
        data = np.ascontiguousarray(values).tobytes()
        self._worker.request("write", array.number, array.nbytes, data=data)
        return array

    @property
    def _worker(self) -> _Worker:
        if not self._running or self._running.ended:
            self._running = _Worker(_worker_program(tuple(self._worker_flags)))
        return self._running


class _Worker:
    """The process, and the talk with it."""

    def __init__(self, program: Path) -> None:
        self.freed: list[int] = []
        self.ended = False
        self._loaded: dict[Path, int] = {}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0"},
        )
        self._to, self._from = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def load(self, library: Path) -> int:
        if library not in self._loaded:
            self._loaded[library] = int(self.request("load", library, *_shared_variables(library))[0])
        return self._loaded[library]

    def request(self, *words: object, data: bytes = b"", answer_bytes: int = 0) -> tuple[str, bytes]:
        """Send a request and return its answer: the rest of the line, and the bytes after it."""
        while self.freed and words[0] != "free":
            self.request("free", self.freed.pop())
        try:
            self._to.write(" ".join(map(str, words)).encode() + b"\n" + data)
            self._to.flush()
            kind, _, rest = self._from.readline().decode().strip().partition(" ")
            body = self._from.read(int(rest) if kind == "error" else answer_bytes)
        except BrokenPipeError:
            kind = ""
        except BaseException:  # interrupted: it may run for ever, and what it answers nobody reads
            self._process.kill()
            self.close()
            raise
        if not kind:
            self.close()
            raise KernelError(self._last_words())
        if kind == "error":
            raise KernelError(body.decode())
        return rest, body

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._process.wait()
        self._from.close()

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if line.strip("= ")]
        return "\n".join(lines[:12]) or f"the worker ended with {self._process.returncode}"


# --- builds ----------------------------------------------------------------------------------------------------------


@functools.cache
def _version() -> str:
    return subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout


def _run(command: Sequence[str | Path], text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise KernelError(f"{COMPILER} is not installed: the CPU executor compiles kernels with it") from None
    if done.returncode:
        raise KernelError("does not compile:\n" + "\n".join(done.stderr.splitlines()[:20]))
    return done.stdout


def _built(stem: str, suffix: str, parts: Sequence[str], build: Any) -> Path:
    """Return the file made by ``build(path)`` of ``parts``, from an earlier run if there is one."""
    key = hashlib.sha256("\0".join([_version(), *parts]).encode()).hexdigest()[:24]
    path = BUILD / f"{stem}-{key}{suffix}"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            new = Path(folder) / path.name
            build(new)
            os.replace(new, path)
    return path


def _header(*names: str) -> list[str]:
    return [(FOLDER / name).read_text(encoding="utf-8") for name in names]


@functools.cache
def _worker_program(flags: tuple[str, ...]) -> Path:
    parts = ["fiber.cpp", "block.cpp", "worker.cpp"]
    texts = _header("calls.h", "fiber.h", "block.h", *parts)

    def build(path: Path) -> None:
        _run([COMPILER, *COMMON, *flags, "-rdynamic", *(FOLDER / part for part in parts), "-ldl", "-o", path])

    return _built("worker", "", [*flags, *texts], build)


def _library(text: str, flags: tuple[str, ...]) -> Path:
    def build(path: Path) -> None:
        # Twice, because only the preprocessor knows which kernels are there.
        include = ["-include", str(FOLDER / "gpu.h")]
        expanded = _run([COMPILER, *flags, "-E", "-x", "c++", *include, "-"], text)
        link = ["-shared", "-fvisibility=hidden", "-fno-gnu-unique"]
        _run([COMPILER, *flags, *link, "-x", "c++-cpp-output", "-", "-o", path], _with_entries(expanded))

    return _built("kernel", ".so", [*flags, text, *_header("gpu.h", "calls.h")], build)


def _with_entries(expanded: str) -> str:
    """Take our own attributes out of a preprocessed source, and append the table of the kernels that they marked."""
    entries = []
    while match := _KERNEL.search(expanded):
        after, most = expanded[match.end() :], "1024"
        if after.startswith(_BOUNDS):
            depth, at = 3, len(_BOUNDS)
            while depth:
                depth += {"(": 1, ")": -1}.get(after[at], 0)
                at += 1
            most = after[len(_BOUNDS) : at - 3].split(",")[0]
            after = after[at:]
        name = cast(re.Match[str], re.match(r"\s*(\w+)", after))[1]
        entries.append(
            f'{{"{name}", executor::Caller<&{name}>::call, executor::Caller<&{name}>::parameters, '
            f"executor::Caller<&{name}>::count, {most}}},\n"
        )
        expanded = f'{expanded[: match.start()]}extern "C" void {after}'
    return f"""{expanded}
extern "C" __attribute__((visibility("default"), used)) const executor::Entry executor_entries[] = {{
{"".join(entries)}{{nullptr, nullptr, nullptr, 0, 0}}}};
"""


def _shared_variables(library: Path) -> list[str]:
    """Return "offset,bytes" of each variable inside a function: the kernels' static shared memory."""
    found = []
    for line in _run(["nm", "--format=sysv", "--defined-only", library]).splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 7 and fields[6] == ".bss" and fields[0].startswith("_ZZ"):
            found.append(f"{int(fields[1], 16)},{int(fields[4], 16)}")
    return found


def _three(extent: Extent) -> tuple[int, int, int]:
    x, y, z = (*(extent if isinstance(extent, tuple) else (extent,)), 1, 1)[:3]
    return int(x), int(y), int(z)
