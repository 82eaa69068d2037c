"""Names ordered by deadline."""

from __future__ import annotations

import bisect
import math


class Deadlines:
    """A sorted list of unique names, earliest deadline first. Discarding a name frees its entry. Times in seconds."""

    def __init__(self) -> None:
        self._order: list[tuple[float, str]] = []
        self._at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def next_at(self) -> float:
        """The earliest deadline; infinite when there is none."""
        return self._order[0][0] if self._order else math.inf

    def add(self, name: str, at: float) -> None:
        """Set the deadline of ``name`` to ``at``, replacing any earlier one."""
        self.discard(name)
        self._at[name] = at
        bisect.insort(self._order, (at, name))

    def discard(self, name: str) -> None:
        """Remove a name; does nothing when it is unknown."""
        at = self._at.pop(name, None)
        if at is not None:
            del self._order[bisect.bisect_left(self._order, (at, name))]

    def take(self, now: float) -> list[str]:
        """Remove and return the names due at ``now``, earliest first."""
        due = [name for _, name in self._order[: bisect.bisect_right(self._order, now, key=lambda entry: entry[0])]]
        del self._order[: len(due)]
        for name in due:
            del self._at[name]
        return due
