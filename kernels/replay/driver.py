"""Stream capture and graphs by the runtime's own functions: HIP's, which CuPy does not offer, and CUDA's.

Streams, graphs and executable graphs are handles, as integers.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.device import libraries

#: Allocating on other threads, and on this one, does not end a capture.
RELAXED = 2
_POINTER, _RESULT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
#: A function's arguments, and its name in HIP and in CUDA's driver.
FUNCTIONS: dict[str, tuple[list[Any], tuple[str, str]]] = {
    "begin": ([_POINTER, ctypes.c_int], ("hipStreamBeginCapture", "cuStreamBeginCapture_v2")),
    "end": ([_POINTER, _RESULT], ("hipStreamEndCapture", "cuStreamEndCapture")),
    "instantiate": (
        [_RESULT, _POINTER, ctypes.c_ulonglong],
        ("hipGraphInstantiateWithFlags", "cuGraphInstantiateWithFlags"),
    ),
    "launch": ([_POINTER, _POINTER], ("hipGraphLaunch", "cuGraphLaunch")),
    "destroy": ([_POINTER], ("hipGraphDestroy", "cuGraphDestroy")),
    "destroy_executable": ([_POINTER], ("hipGraphExecDestroy", "cuGraphExecDestroy")),
}


class GraphError(Exception):
    """A function of the runtime failed; the message names it, with its status."""


class CaptureError(GraphError):
    """Work was not captured. None of it was queued."""


class Driver:
    """The functions of ``library``. Raises ValueError if it lacks one of them."""

    def __init__(self, library: Any, hip: bool) -> None:
        self._calls: dict[str, Any] = {}
        self._names = {what: names[0 if hip else 1] for what, (_, names) in FUNCTIONS.items()}
        for what, name in self._names.items():
            try:
                call = getattr(library, name)
            except AttributeError as error:
                raise ValueError(f"graphs: the runtime has no {name}") from error
            call.argtypes, call.restype = FUNCTIONS[what][0], ctypes.c_int
            self._calls[what] = call

    def begin(self, stream: int) -> None:
        """Capture what is queued on ``stream`` from here on, instead of running it. Raises CaptureError."""
        self._checked(CaptureError, "begin", stream, RELAXED)

    def end(self, stream: int) -> int:
        """End the capture; returns the graph. Raises CaptureError, also if something queued could not be captured."""
        graph = _POINTER()
        self._checked(CaptureError, "end", stream, ctypes.byref(graph))
        if not graph.value:
            raise CaptureError(f"{self._names['end']}: no graph")
        return graph.value

    def instantiate(self, graph: int) -> int:
        """Return an executable graph, which no longer needs ``graph``. Raises CaptureError."""
        executable = _POINTER()
        self._checked(CaptureError, "instantiate", ctypes.byref(executable), graph, 0)
        return int(executable.value or 0)

    def launch(self, executable: int, stream: int) -> None:
        """Queue a graph's work. Raises GraphError."""
        self._checked(GraphError, "launch", executable, stream)

    def destroy(self, graph: int) -> None:
        """Free a graph. Raises CaptureError."""
        self._checked(CaptureError, "destroy", graph)

    def destroy_executable(self, executable: int) -> None:
        """Free an executable graph that does not run. Raises GraphError."""
        self._checked(GraphError, "destroy_executable", executable)

    def _checked(self, kind: type[GraphError], what: str, *arguments: Any) -> None:
        if status := self._calls[what](*arguments):
            raise kind(f"{self._names[what]}: status {status}")


def of_device() -> Driver:
    """Return the functions of the runtime that CuPy uses. Raises ValueError if it lacks one."""
    import cupy

    hip = bool(cupy.cuda.runtime.is_hip)
    try:
        library = libraries.loaded("libamdhip64.so" if hip else "libcuda.so")
    except libraries.LibraryError as error:
        raise ValueError(f"graphs: {error}") from error
    return Driver(library, hip)
