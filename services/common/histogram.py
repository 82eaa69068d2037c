"""A histogram: bucket counts and a sum, independent of how it is exported."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable


class Histogram:
    """Buckets with inclusive upper ``bounds``, and one without a bound. One thread observes; any thread may read."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        """Raises ValueError unless the bounds are strictly increasing."""
        self.bounds = tuple(bounds)
        if not self.bounds or any(low >= high for low, high in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds must be strictly increasing: {self.bounds}")
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Record a value that occurred ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """The number of values observed."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound, the last infinite, with the number of values less than or equal to it."""
        counts, below, rows = self._counts.copy(), 0, list[tuple[float, int]]()
        for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows
