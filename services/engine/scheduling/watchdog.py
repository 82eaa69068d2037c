"""Whether the engine stands still: requests run or wait, and no step is computed for them."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.engine.scheduling.scheduler import Scheduler

log = structlog.get_logger()

#: Seconds without a step that count as a stall. More than a daemon's restart takes, a lost lease of the default length
#: (10 s) included, and far more than a step; less than the default patience (60 s), after which requests fail because
#: the daemon is silent.
STALL_S = 30.0


class Watchdog:
    """Measures how long no step has ended while requests run or wait, and logs when that is long and when it is over.

    Times are seconds of ``clock``. The engine's thread calls ``look`` at the end of each round; any thread may read
    ``stalled_s``.
    """

    def __init__(self, clock: Callable[[], float], stall_s: float = STALL_S) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._since: float | None = None  # the last step, or when requests came after there were none
        self._logged = False

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step, or since requests came after there were none; 0 while none run or wait."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def look(self, scheduler: Scheduler, *, stepped: bool = False, silent_s: float = 0.0) -> None:
        """Note the state. ``stepped`` says that a step has ended since the last look; ``silent_s`` is for how many
        seconds the page source has not answered, 0 when it has.
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
