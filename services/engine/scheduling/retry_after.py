"""How fast places in the queue become free: what a caller who was refused is told to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

#: Ends of requests that the estimate looks back on, and what is said, in seconds, when there is nothing to go by.
MARKS = 64
UNKNOWN_S = 1.0
LEAST_S, MOST_S = 0.1, 60.0


class RetryAfter:
    """Counts requests that end while others wait; those that end while nobody does say nothing about a full engine.

    The rate is that of the present backlog, over its last ``MARKS`` ends and up to now, so that an engine that stands
    still promises ever less. Until two ends of a backlog are known, it is the rate of the one before.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[float] = deque(maxlen=MARKS)  # the first is where counting begins
        self._before = 0.0

    def begin(self) -> None:
        """Somebody waits, and nobody did before."""
        if self._marks:  # nothing is known of what came after the last end of that backlog
            self._before = self._rate(self._marks[-1]) or self._before
        self._marks.clear()
        self._marks.append(self._clock())

    def ended(self) -> None:
        """A request ended while somebody waited."""
        self._marks.append(self._clock())

    def wait_for(self, places: float) -> float:
        """Seconds until so many places will have become free, from ``LEAST_S`` to ``MOST_S``."""
        rate = self._rate(self._clock()) or self._before
        return min(MOST_S, max(LEAST_S, places / rate)) if rate else UNKNOWN_S

    def _rate(self, until: float) -> float:
        """Ends per second; 0 when there are too few to tell."""
        if len(self._marks) <= 2:
            return 0.0
        return (len(self._marks) - 1) / max(until - self._marks[0], 1e-6)
