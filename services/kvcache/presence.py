"""The time that the daemon's event loop was there, and how long something held it.

A lease is a promise to answer in time, and a daemon that was stopped, starved of its core or busy could not be asked.
So the clock of leases and of everything else in the cache stands still while the loop is away: nobody's session runs
out by the daemon's own absence. Both it and the engines' own clocks are CLOCK_MONOTONIC, which also stands still while
the machine is suspended. A lease only ever lasts longer for that, so an engine's earlier deadline stays the earlier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from services.common.call_stats import CallStats
from services.common.histogram import Histogram

log = structlog.get_logger()

#: The loop looks at the clock this often.
PULSE_S = 0.02

#: A loop that has not looked at the clock for so long was away. Less is the machine's, and part of every lease.
AWAY_S = 0.1

#: The loop should never be held for longer.
HELD_S = 0.05

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class PresentClock:
    """Seconds of a monotonic ``clock``, without those between two looks at it that are more than ``AWAY_S`` apart.

    Whoever runs first after an absence, a call or the sweep, finds it in the reading itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.away_s = 0.0

    def __call__(self) -> float:
        """Now."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap > AWAY_S:
            self.away_s += gap
        return now - self.away_s


class LoopWatch:
    """Looks at the clock every ``PULSE_S`` seconds, and measures by how much it came too late: the loop was held.

    ``longest_s`` is the longest so far.
    """

    def __init__(
        self, look: Callable[[], float], calls: CallStats, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``look`` is the cache's clock, ``calls`` knows which calls ended meanwhile."""
        self._look = look
        self._calls = calls
        self._clock = clock
        self.held = Histogram(_BOUNDS)
        self.longest_s = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            began = self._clock()
            self._calls.take_slowest()
            await asyncio.sleep(PULSE_S)
            self.late(self._clock() - began - PULSE_S)

    def late(self, seconds: float) -> None:
        """The loop came back so much later than it was to."""
        self._look()
        held = max(0.0, seconds)
        self.held.observe(held)
        self.longest_s = max(self.longest_s, held)
        if held > HELD_S:
            method, took = self._calls.take_slowest()
            log.warning("loop_held", seconds=round(held, 3), method=method, call_seconds=round(took, 3))
