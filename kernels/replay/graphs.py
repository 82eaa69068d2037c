"""Recurring steps replayed as graphs: the host queues one launch instead of hundreds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

from kernels.device.workspace import SLAB, Workspace
from kernels.replay import driver
from kernels.replay.base import KEPT, Replays


class Graphs(Replays):
    """Graphs by key, captured from one stream. The computation must neither synchronize nor copy from or to the host.

    A computation that cannot be captured is queued as it is, and ``refused`` is called once with the reason; from then
    on no graph is captured, and those that exist are replayed. ``slab``: the least bytes that are allocated for results
    at a time. Raises ValueError for a runtime without graphs; `run` raises GraphError when one cannot be launched.
    """

    def __init__(self, kept: int = KEPT, slab: int = SLAB, refused: Callable[[str], None] | None = None) -> None:
        import cupy

        super().__init__(kept)
        self._driver = driver.of_device()
        self._refused = refused
        self._captures = True
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._workspace = Workspace(slab)

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """See `Replays.run`."""
        if not self._captures and key not in self._recordings:
            return compute()
        try:
            return super().run(key, compute)
        except driver.CaptureError as error:
            reason = str(error)
        # Nothing of it was queued. What also fails like this was no matter of the capture.
        result = compute()
        self._captures = False
        if self._refused is not None:
            self._refused(reason)
        return result

    def _record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        import cupy

        stream = self._stream.ptr
        with cupy.cuda.using_allocator(self._workspace.malloc), self._stream:
            self._driver.begin(stream)
            try:
                result = compute()
            except Exception as error:
                self._abandon(stream)
                raise driver.CaptureError(f"captured: {type(error).__name__}: {error}") from error
            except BaseException:
                self._abandon(stream)
                raise
            graph = self._driver.end(stream)
        executable = self._driver.instantiate(graph)
        self._driver.destroy(graph)
        self._replay(executable)  # a capture runs nothing
        return executable, result

    def _abandon(self, stream: int) -> None:
        """End a capture whose graph nobody wants: without that, the stream could not be used again."""
        with contextlib.suppress(driver.CaptureError):
            self._driver.destroy(self._driver.end(stream))

    def _replay(self, recording: Any) -> None:
        import cupy

        self._driver.launch(recording, cupy.cuda.get_current_stream().ptr)

    def _forget(self, recording: Any) -> None:
        import cupy

        # It may still run.
        cupy.cuda.get_current_stream().synchronize()
        self._driver.destroy_executable(recording)
