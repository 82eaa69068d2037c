"""Recurring steps replayed as CUDA graphs: the host queues one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.device.workspace import Workspace
from kernels.replay.base import KEPT, Replays


class Graphs(Replays):
    """Graphs by key. The computation must neither synchronize nor copy from or to the host.

    Raises ValueError on ROCm, where CuPy does not support graphs.
    """

    def __init__(self, kept: int = KEPT) -> None:
        import cupy

        if cupy.cuda.runtime.is_hip:
            raise ValueError("graphs: CuPy supports CUDA graphs on NVIDIA GPUs only, not on ROCm")
        super().__init__(kept)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._workspace = Workspace()

    def _record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        import cupy

        with cupy.cuda.using_allocator(self._workspace.malloc), self._stream:
            self._stream.begin_capture()
            try:
                result = compute()
            except BaseException:
                self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        self._replay(graph)  # a capture runs nothing
        return graph, result

    def _replay(self, recording: Any) -> None:
        import cupy

        recording.launch(cupy.cuda.get_current_stream())
