"""Records recurring steps on their second occurrence and then replays them, with `graphs.Graphs` or `tapes.Tapes`.

Recordings contain addresses: inputs are staged at the same addresses every time (`staging.Staging`), and results go to
a `workspace.Workspace` shared by all recordings of one stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

#: Maximum numbers of recordings, and of keys seen once; the least recently used go first.
KEPT, CAME_ONCE = 256, 4096


class Replays(ABC):
    """Recordings by key, for one stream at a time.

    The first occurrence of a key is not recorded, so that a step that never recurs costs nothing extra and displaces no
    recording.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._recordings: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self.recorded = self.replayed = 0

    def run(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the result of ``compute``: an array, which the next call of `run` may overwrite.

        ``compute`` queues work on the current stream, on data whose addresses and shapes ``key`` determines.
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
            self._forget(self._recordings.popitem(last=False)[1][0])
        return result

    @abstractmethod
    def _record(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        """Queue the work. Returns a recording for `_replay`, and the result of ``compute``."""

    @abstractmethod
    def _replay(self, recording: Any) -> None:
        """Queue the recorded work again."""

    def _forget(self, recording: Any) -> None:  # noqa: B027 - most recordings are memory
        """Free what a recording holds of the runtime; it was the least recently used."""
