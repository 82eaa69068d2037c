"""How values are distributed: how many fell into each of a few ranges, and their sum. Data, whoever shows it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable


class Histogram:
    """Ranges end at ``bounds``, which belong to them; the last has no end. One thread observes, any may look."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        """Raises ValueError unless the bounds rise."""
        self.bounds = tuple(bounds)
        if not self.bounds or any(low >= high for low, high in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds must rise: {self.bounds}")
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that came so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound, the last infinite, and how many values are not above it."""
        counts, below, rows = self._counts.copy(), 0, list[tuple[float, int]]()
        for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows
