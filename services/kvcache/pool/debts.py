"""What ended sequences hold still: it is given up in slices, when the daemon has time or somebody needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.kvcache.slices import Work


class Debts:
    """Work that is owed, oldest first. Nobody who ended a sequence waits for it, and nobody is refused what it would
    free: before that it is paid.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """``wake`` is called when something is owed."""
        self._wake = wake
        self._works: deque[Work[None]] = deque()
        self._owed = self._paid = 0

    def __len__(self) -> int:
        return len(self._works)

    def owe(self, work: Work[None]) -> None:
        """Do the first slice at once, and owe the rest."""
        for _ in work:
            self._works.append(work)
            self._owed += 1
            self._wake()
            return

    def pay(self, now: float) -> None:
        """Do one slice of what is owed."""
        try:
            self._works[0].send(now)
        except BaseException as end:
            self._works.popleft()
            self._paid += 1
            if not isinstance(end, StopIteration):
                raise

    def paying(self) -> Work[None]:
        """Pay all that is owed now, in slices."""
        owed = self._owed
        now = yield None
        while self._paid < owed:
            self.pay(now)
            now = yield None
