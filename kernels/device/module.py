"""Kernels on a GPU: compiles the HIP sources with CuPy for the current device, and launches them.

It uses only CuPy's RawModule, which is HIPRTC on ROCm and NVRTC on CUDA. Importing this module does not import CuPy.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from kernels.device import source
from kernels.device.recording import writing

Extent: TypeAlias = int | tuple[int, ...]

#: Lines of the compiler's log included in an error.
LOG_LINES = 20

_NULL = np.intp(0)

_loaded: dict[tuple[object, ...], Module] = {}
_lock = threading.Lock()


class KernelError(Exception):
    """A kernel failed to compile on this machine."""


class Launches(Protocol):
    """A compiled source: a `Module`, or what stands in for one."""

    def launch(self, name: str, grid: Any, block: Any, args: Sequence[Any], shared: int = 0) -> None:
        """Queue kernel ``name``."""


class Module:
    """One compiled source: its kernels by name, for the device that was current when it was loaded."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._functions: dict[str, Any] = {}

    def launch(
        self, name: str, grid: Extent, block: Extent, args: Sequence[Any], shared: int = 0, stream: Any = None
    ) -> None:
        """Launch kernel ``name`` on ``stream``, by default the current one, without waiting for it.

        ``args`` are CuPy arrays, None for a null pointer, or NumPy scalars of exactly the kernel's types: on a GPU,
        nothing checks them. ``shared`` is the dynamic shared memory in bytes. Raises ValueError for an empty grid or
        block, which CuPy would treat as 1.
        """
        function = self._function(name)
        grid = grid if isinstance(grid, tuple) else (grid,)
        block = block if isinstance(block, tuple) else (block,)
        if min(*grid, *block) < 1:
            raise ValueError(f"a grid of {grid} and a block of {block}: each extent must be at least 1")
        function(grid, block, tuple([_NULL if one is None else one for one in args]), shared_mem=shared, stream=stream)
        if writing.tape is not None:
            writing.tape.kernel(function, grid, block, args, shared, _stream_of(stream))

    def function(self, name: str) -> int:
        """Return the driver's handle of kernel ``name``."""
        return int(self._function(name).ptr)

    def _function(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._raw.get_function(name).kernel
        return function


def load(name: str, defines: Mapping[str, str | int] | None = None) -> Module:
    """Return ``name``.hip compiled with ``defines`` for the current device; compiled once per process.

    Raises ValueError for an unknown name or an undeclared define, KernelError if it does not compile.
    """
    import cupy

    text = source.read(name)
    given = source.checked(text, defines or {}, f"{name}.hip")
    device = cupy.cuda.Device().id
    key = (device, name, *given.items())
    with _lock:
        if key not in _loaded:
            _loaded[key] = _compile(cupy, text, f"{name}.hip", {"RF_WAVE": str(wave(device)), **given})
        return _loaded[key]


def wave(device: int) -> int:
    """Return the wave size of CuPy's ``device``: 32 or 64 lanes."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceProperties(device)["warpSize"])


def _stream_of(stream: Any) -> int:
    import cupy

    return int((stream or cupy.cuda.get_current_stream()).ptr)


def _compile(cupy: Any, text: str, file: str, defines: Mapping[str, str]) -> Module:
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in defines.items()))
    raw = cupy.RawModule(code=text, options=options)
    try:
        raw.compile()
    except Exception as error:  # CuPy's own, RuntimeError or OSError, depending on what is missing
        hint = ""
        if cupy.cuda.runtime.is_hip and not shutil.which("hipcc"):
            hint = "hipcc is not on PATH, and CuPy asks it for its include folders whenever it compiles\n"
        log = "\n".join(str(error).splitlines()[:LOG_LINES])
        raise KernelError(f"{file} does not compile with {' '.join(options)}:\n{hint}{log}") from error
    return Module(raw)
