"""Steps that come again, replayed as CUDA graphs: the host queues one launch instead of hundreds.

A graph holds addresses. What its kernels read is put at the same place every time (`staging.Staging`); what they write
is memory of a `workspace.Workspace`, which gives none of it back as long as it lives and serves nothing but captures.
Replays follow each other on one stream, so all graphs may use the same of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from kernels.workspace import Workspace

#: Graphs that are kept; the one unused for longest goes first.
KEPT = 128


class Graphs:
    """Graphs by keys. Raises ValueError on ROCm, where CuPy has none."""

    def __init__(self, kept: int = KEPT) -> None:
        import cupy

        if cupy.cuda.runtime.is_hip:
            raise ValueError("graphs: CuPy supports CUDA graphs on NVIDIA GPUs only, not on ROCm")
        self._kept = kept
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._workspace = Workspace()
        self._seen: OrderedDict[Hashable, tuple[Any, Any] | None] = OrderedDict()
        self.captures = self.replays = 0

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns: an array, which the next call of `run` may write to.

        ``compute`` queues work on the current stream, on data whose places and shapes ``key`` determines, and neither
        waits nor copies from or to the host. The first time it is called; the second time it is captured, which does
        not pay for what never comes again; from then on that is replayed.
        """
        import cupy

        if key not in self._seen:
            self._remember(key, None)
            return compute()
        self._seen.move_to_end(key)
        found = self._seen[key]
        if found is None:
            found = self._seen[key] = self._capture(compute)
            self.captures += 1
        else:
            self.replays += 1
        graph, result = found
        graph.launch(cupy.cuda.get_current_stream())
        return result

    def _remember(self, key: Hashable, value: tuple[Any, Any] | None) -> None:
        self._seen[key] = value
        if len(self._seen) > self._kept:
            self._seen.popitem(last=False)

    def _capture(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        import cupy

        with cupy.cuda.using_allocator(self._workspace.malloc), self._stream:
            self._stream.begin_capture()
            try:
                result = compute()
            except BaseException:
                self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        return graph, result
