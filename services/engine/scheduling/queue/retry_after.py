"""Estimates how soon queue slots become free, for the retry delay of a rejected request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

#: Completions that the estimate covers, and the delay in seconds when there is nothing to estimate from.
MARKS = 64
UNKNOWN_S = 1.0
LEAST_S, MOST_S = 0.1, 60.0


class RetryAfter:
    """Measures the completion rate while requests wait; completions with an empty queue say nothing about a full one.
    The rate covers the last ``MARKS`` completions of the current backlog up to now, so it falls while the engine
    stalls. Until the current backlog has two completions, the previous backlog's rate applies.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[float] = deque(maxlen=MARKS)  # the first is when counting began
        self._before = 0.0

    def begin(self) -> None:
        """Start a backlog: a request waits in a queue that was empty."""
        if self._marks:  # the previous backlog's rate counts up to its last completion
            self._before = self._rate(self._marks[-1]) or self._before
        self._marks.clear()
        self._marks.append(self._clock())

    def ended(self) -> None:
        """Count a request that ended while others waited."""
        self._marks.append(self._clock())

    def wait_for(self, places: float) -> float:
        """Returns the estimated seconds until ``places`` queue slots are free, from ``LEAST_S`` to ``MOST_S``."""
        rate = self._rate(self._clock()) or self._before
        return min(MOST_S, max(LEAST_S, places / rate)) if rate else UNKNOWN_S

    def _rate(self, until: float) -> float:
        """Returns completions per second; 0 with fewer than two."""
        if len(self._marks) <= 2:
            return 0.0
        return (len(self._marks) - 1) / max(until - self._marks[0], 1e-6)
