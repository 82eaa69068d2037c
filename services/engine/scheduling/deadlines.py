"""Names by the time at which something is due for them."""

from __future__ import annotations

import bisect
import math


class Deadlines:
    """Each name once, earliest first. A name that is discarded leaves nothing behind. Times in seconds."""

    def __init__(self) -> None:
        self._order: list[tuple[float, str]] = []
        self._at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def next_at(self) -> float:
        """When the first is due; infinite when there is none."""
        return self._order[0][0] if self._order else math.inf

    def add(self, name: str, at: float) -> None:
        """Have ``name`` due at ``at``, whatever was said of it before."""
        self.discard(name)
        self._at[name] = at
        bisect.insort(self._order, (at, name))

    def discard(self, name: str) -> None:
        """Forget a name, known or not."""
        at = self._at.pop(name, None)
        if at is not None:
            del self._order[bisect.bisect_left(self._order, (at, name))]

    def take(self, now: float) -> list[str]:
        """Remove and return what is due, earliest first."""
        due = [name for _, name in self._order[: bisect.bisect_right(self._order, now, key=lambda entry: entry[0])]]
        del self._order[: len(due)]
        for name in due:
            del self._at[name]
        return due
