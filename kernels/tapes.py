"""Steps that come again, queued again from tapes: where CuPy has no graphs, and where none are asked for.

Addresses are part of a tape, as of a graph: inputs are put at the same place every time (`staging.Staging`), and what
is computed goes to memory of a `workspace.Workspace`, the same for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from kernels import gemm
from kernels.tape import Tape, writing
from kernels.workspace import Workspace

#: Tapes that are kept; the one unused for longest goes first.
KEPT = 128
#: Bytes that their workspace takes from the device at a time, at least: few, since what is larger gets its own.
SLAB = 1 << 18


class Tapes:
    """Tapes by keys, for one stream at a time."""

    def __init__(self, kept: int = KEPT, slab: int = SLAB) -> None:
        self._kept = kept
        self._workspace = Workspace(slab)
        self._tapes: OrderedDict[Hashable, tuple[Tape, Any]] = OrderedDict()
        self.writes = self.plays = 0

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns: an array, which the next call of `run` may write to.

        ``compute`` queues work on the current stream by `module.Module.launch` and `gemm.linear` alone, on data whose
        places and shapes ``key`` determines. It is called, and written down, the first time.
        """
        import cupy

        key = (key, cupy.cuda.get_current_stream().ptr, gemm.handle())
        found = self._tapes.get(key)
        if found is None:
            found = self._tapes[key] = self._write(compute)
            self.writes += 1
            if len(self._tapes) > self._kept:
                self._tapes.popitem(last=False)
        else:
            self._tapes.move_to_end(key)
            if status := found[0].play():
                raise gemm.GemmError(f"a product that was queued before: status {status}")
            self.plays += 1
        return found[1]

    def _write(self, compute: Callable[[], Any]) -> tuple[Tape, Any]:
        import cupy

        tape = Tape()
        with cupy.cuda.using_allocator(self._workspace.malloc):
            writing.tape = tape
            try:
                return tape, compute()
            finally:
                writing.tape = None
