"""How often callers are told of what is generated, when there are many of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

#: Seconds that news wait for their turn, at most. People who read along do not notice them.
MOST_S = 0.1
#: Seconds between two looks at who waits.
TICK_S = 0.005
#: Turns that may come at once where none was taken for a while, as seconds' worth of them.
BURST_S = 0.02


class Pace:
    """So many messages a second, over all who read: a message costs the same whether it has one token or four, and what
    it costs is time of the interpreter, which the engine's thread needs to start steps.

    Whoever has news has its turn at once as long as there are few of them; else after those that came before. What
    comes meanwhile is told in the same turn. Used on the event loop alone; ``clock`` is monotonic, ``later`` the loop's
    ``call_later``, both in seconds.
    """

    def __init__(
        self,
        messages_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self._messages_per_s = messages_per_s
        self._clock = clock
        self._later = later or (lambda delay_s, then: asyncio.get_running_loop().call_later(delay_s, then))
        self._most = max(1.0, messages_per_s * BURST_S)
        self._left = self._most
        self._left_at = clock()
        self._waiting: deque[tuple[float, Bell]] = deque()

    def turn(self, bell: Bell) -> None:
        """Sound the bell in its turn."""
        now = self._clock()
        self._refill(now)
        if not self._waiting and self._left >= 1.0:
            self._left -= 1.0
            bell.sound()
            return
        if not self._waiting:
            self._later(TICK_S, self._tick)
        self._waiting.append((now + MOST_S, bell))

    def _tick(self) -> None:
        now = self._clock()
        self._refill(now)
        while self._waiting and (self._left >= 1.0 or self._waiting[0][0] <= now):
            _, bell = self._waiting.popleft()
            if bell.waits:  # it has not been sounded out of turn
                self._left = max(0.0, self._left - 1.0)
                bell.sound()
        if self._waiting:
            self._later(TICK_S, self._tick)

    def _refill(self, now: float) -> None:
        self._left = min(self._most, self._left + (now - self._left_at) * self._messages_per_s)
        self._left_at = now


class Bell:
    """Tells one reader that there is news: it sounds in its turn, and not again before the news are taken.

    Without a ``pace`` it is always its turn.
    """

    __slots__ = ("_pace", "_sound", "_sounded", "waits")

    def __init__(self, sound: Callable[[], None], pace: Pace | None = None) -> None:
        self._sound = sound
        self._pace = pace
        self._sounded = False
        self.waits = False

    def ring(self, at_once: bool = False) -> None:
        """There is something new; ``at_once`` when nothing more will come."""
        if self._sounded or (self.waits and not at_once):
            return
        if self._pace is None or at_once:
            self.sound()
        else:
            self.waits = True
            self._pace.turn(self)

    def sound(self) -> None:
        """Have the reader look."""
        self.waits, self._sounded = False, True
        self._sound()

    def hush(self) -> None:
        """All news were taken."""
        self._sounded = False
