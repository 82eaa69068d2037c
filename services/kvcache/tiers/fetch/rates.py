"""How fast a tier is, as measured lately."""

from __future__ import annotations

import math

#: Weight of the newest measurement.
_NEWEST = 0.3

#: Seconds in which a measurement comes to count e times less: a tier that was slow once is tried again.
_FORGOTTEN_S = 60.0


class Rate:
    """The latency of a tier in seconds, and its bytes per second, queueing included.

    What was ``assumed`` at first is what it returns to while nothing is measured.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._assumed = (latency_s, bytes_per_s)
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._measured_at = -math.inf

    def measured(self, latency_s: float, size: int, seconds: float, now: float) -> None:
        """A run took ``latency_s`` until its first page was there, and ``seconds`` from then on for ``size`` bytes."""
        before = self.latency(now), self.bandwidth(now)
        self._latency_s = before[0] + _NEWEST * (latency_s - before[0])
        self._bytes_per_s = before[1]
        if size and seconds > 0:
            self._bytes_per_s += _NEWEST * (size / seconds - before[1])
        self._measured_at = now

    def latency(self, now: float) -> float:
        """Seconds until the first byte is there."""
        return self._blend(self._latency_s, self._assumed[0], now)

    def bandwidth(self, now: float) -> float:
        """Bytes per second."""
        return self._blend(self._bytes_per_s, self._assumed[1], now)

    def _blend(self, measured: float, assumed: float, now: float) -> float:
        weight = math.exp(-max(0.0, now - self._measured_at) / _FORGOTTEN_S)
        return assumed + weight * (measured - assumed)
