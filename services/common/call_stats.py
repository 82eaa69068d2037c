"""Remote calls, served or made: how many of each method ended how, and how long they took."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.histogram import Histogram

#: Seconds. A unary call takes a fraction of a millisecond, a stream as long as somebody listens.
CALL_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)


class CallStats:
    """Counts by method and status code, and durations in seconds by method.

    Threads may share it as long as no two make calls of one method at a time. Who looks takes a copy of a dict first.
    """

    def __init__(self, bounds: Iterable[float] = CALL_S) -> None:
        self._bounds = tuple(bounds)
        self.handled: dict[tuple[str, ...], int] = {}
        self.seconds: dict[str, Histogram] = {}

    def done(self, method: str, code: str, seconds: float) -> None:
        """A call has ended; ``code`` is gRPC's name for how."""
        self.handled[method, code] = self.handled.get((method, code), 0) + 1
        distribution = self.seconds.get(method)
        if distribution is None:
            distribution = self.seconds[method] = Histogram(self._bounds)
        distribution.observe(seconds)
