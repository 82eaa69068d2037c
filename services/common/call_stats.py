"""Statistics of RPCs, served or made: counts by method and status code, and durations."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.histogram import Histogram

#: Bucket bounds in seconds. A unary call takes a fraction of a millisecond; a stream lasts as long as its reader.
CALL_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)


class CallStats:
    """Counts by method and status code, and durations in seconds by method.

    Threads may share an instance as long as calls of any one method end on one thread at a time. Readers on other
    threads copy a dict before iterating over it.
    """

    def __init__(self, bounds: Iterable[float] = CALL_S) -> None:
        self._bounds = tuple(bounds)
        self.handled: dict[tuple[str, ...], int] = {}
        self.seconds: dict[str, Histogram] = {}
        self._slowest = ("", 0.0)

    def take_slowest(self) -> tuple[str, float]:
        """The method and the duration of the longest call that ended since this was last read; none is ("", 0)."""
        slowest, self._slowest = self._slowest, ("", 0.0)
        return slowest

    def done(self, method: str, code: str, seconds: float) -> None:
        """Record a call that has ended; ``code`` is the name of its gRPC status code."""
        self.handled[method, code] = self.handled.get((method, code), 0) + 1
        distribution = self.seconds.get(method)
        if distribution is None:
            distribution = self.seconds[method] = Histogram(self._bounds)
        distribution.observe(seconds)
        if seconds > self._slowest[1]:
            self._slowest = (method, seconds)
