"""When the outer tier is left alone because it keeps failing."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Consecutive failures after which it is left alone, at first for `FIRST_S`, doubling to `LONGEST_S`.
FAILURES = 3
FIRST_S, LONGEST_S = 0.5, 30.0


class Breaker:
    """Closed while operations succeed. Open, it allows one operation, the probe, whenever the wait is over.

    Operations that began before it opened may still end, and count: a success closes it. Any thread may call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._wait = 0.0
        self._retry_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether operations are refused, but for a probe."""
        return self._wait > 0

    def allows(self) -> bool:
        """Whether an operation may begin; if so, it must end in `succeeded` or `failed`."""
        with self._lock:
            if not self._wait:
                return True
            if self._probing or self._clock() < self._retry_at:
                return False
            self._probing = True
            return True

    def succeeded(self) -> bool:
        """An operation was answered. Returns whether this closed the breaker."""
        with self._lock:
            closed = self._wait > 0
            self._failures, self._wait, self._probing = 0, 0.0, False
            return closed

    def failed(self) -> bool:
        """An operation failed. Returns whether this opened the breaker."""
        with self._lock:
            if self._wait:
                # Of the operations that were under way when it opened, none may double the wait: only the probe.
                if self._probing:
                    self._wait = min(2 * self._wait, LONGEST_S)
                    self._retry_at = self._clock() + self._wait
                    self._probing = False
                return False
            self._failures += 1
            if self._failures < FAILURES:
                return False
            self._wait = FIRST_S
            self._retry_at = self._clock() + self._wait
            return True
