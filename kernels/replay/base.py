"""Steps that come again, recorded when they do, and from then on replayed: by `graphs.Graphs` or `tapes.Tapes`.

Addresses are part of a recording: inputs are put at the same place every time (`staging.Staging`), and what is computed
goes to memory of a `workspace.Workspace`, the same for all recordings of one stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

#: Recordings that are kept, and keys that came once; of each the one unused for longest goes first.
KEPT, CAME_ONCE = 256, 4096


class Replays(ABC):
    """Recordings by keys, for one stream at a time.

    The first time a key comes nothing is recorded, so that what never comes again costs no more than it would, and puts
    no recording out.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._recordings: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self.recorded = self.replayed = 0

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns: an array, which the next call of `run` may write to.

        ``compute`` queues work on the current stream, on data whose places and shapes ``key`` determines.
        """
        found = self._recordings.get(key)
        if found is not None:
            self._recordings.move_to_end(key)
            recording, result = found
            self._replay(recording)
            self.replayed += 1
            return result
        if key not in self._once:
            self._once[key] = None
            if len(self._once) > CAME_ONCE:
                self._once.popitem(last=False)
            return compute()
        recording, result = self._recordings[key] = self._record(compute)
        del self._once[key]
        self.recorded += 1
        if len(self._recordings) > self._kept:
            self._recordings.popitem(last=False)
        return result

    @abstractmethod
    def _record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        """Queue the work; return what `_replay` queues it again from, and what ``compute`` returned."""

    @abstractmethod
    def _replay(self, recording: Any) -> None:
        """Queue it again."""
