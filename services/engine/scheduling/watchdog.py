"""Detects stalls: requests run or wait, and no step completes."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.engine.scheduling.scheduler import Scheduler

log = structlog.get_logger()

#: Seconds without a step that count as a stall. Longer than a daemon restart including a lost lease of the default
#: length (10 s), and much longer than a step; shorter than the default patience (60 s), after which requests fail
#: because the daemon does not answer.
STALL_S = 30.0


class Watchdog:
    """Measures the time since the last step while requests run or wait, and logs the start and end of each stall.

    Times are seconds of ``clock``. The engine's thread calls ``look`` at the end of each round; any thread may read
    ``stalled_s``.
    """

    def __init__(self, clock: Callable[[], float], stall_s: float = STALL_S) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._since: float | None = None  # the last step, or the end of idleness
        self._logged = False

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step, or since the engine was last idle; 0 while no request runs or waits."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def look(self, scheduler: Scheduler, *, stepped: bool = False, silent_s: float = 0.0) -> None:
        """Check for a stall. ``stepped``: a step has ended since the last call. ``silent_s``: seconds for which the
        page source has not answered, 0 when it answers.
        """
        head = next(iter(scheduler.waiting), None) or next(iter(scheduler.running), None)
        stalled_s = self.stalled_s
        if self._logged and (stepped or head is None):
            log.info("engine_stall_over", stalled_s=round(stalled_s, 3), stepped=stepped)
            self._logged = False
        if head is None:
            self._since = None
        elif stepped or self._since is None:
            self._since = self._clock()
        elif stalled_s > self._stall_s and not self._logged:
            self._logged = True
            log.error(
                "engine_stalled",
                stalled_s=round(stalled_s, 3),
                request_id=head.id,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                leaving=len(scheduler.leaving),
                held_pages=scheduler.held_pages,
                total_pages=scheduler.total_pages,
                kvcache_silent_s=round(silent_s, 3),
            )
