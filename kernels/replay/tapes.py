"""Recurring steps replayed from tapes, where the runtime has no graphs or they are not wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kernels.device.recording import Tape, writing
from kernels.device.workspace import Workspace
from kernels.linear import gemm
from kernels.replay.base import KEPT, Replays

#: Minimum allocation of the workspace in bytes: small, since larger blocks get their own allocation.
SLAB = 1 << 18


class Tapes(Replays):
    """Tapes by key. The computation must be queued only by `module.Module.launch` and `gemm.linear`."""

    def __init__(self, kept: int = KEPT, slab: int = SLAB) -> None:
        super().__init__(kept)
        self._workspace = Workspace(slab)

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """See `Replays.run`. A tape is only valid for the stream and the library handle that it was recorded with."""
        import cupy

        return super().run((key, cupy.cuda.get_current_stream().ptr, gemm.handle()), compute)

    def _record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        import cupy

        tape = Tape()
        with cupy.cuda.using_allocator(self._workspace.malloc):
            writing.tape = tape
            try:
                return tape, compute()
            finally:
                writing.tape = None

    def _replay(self, recording: Any) -> None:
        if status := recording.play():
            raise gemm.GemmError(f"a product that was queued before: status {status}")
