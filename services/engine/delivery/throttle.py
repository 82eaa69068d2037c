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


class Throttle:
    """So many messages a second, over all who read: a message costs the same whether it has one token or four, and what
    it costs is time of the interpreter, which the engine's thread needs to start steps.

    Whoever has news has its turn at once as long as there are few of them; else after those that came before. What
    comes meanwhile is told in the same turn. First tokens and ends are told out of turn, and count; and nobody waits
    longer than `MOST_S`, so more than a tenth as many readers have more messages than that. Used on the event loop
    alone; ``clock`` is monotonic, ``later`` the loop's ``call_later``, both in seconds.
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
        self._share = 0.0
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

    def out_of_turn(self, bell: Bell) -> None:
        """Sound the bell now."""
        self._refill(self._clock())
        self._left = max(0.0, self._left - 1.0)
        bell.sound()

    def _tick(self) -> None:
        now = self._clock()
        self._refill(now)
        # Those that came together shall not fall due together: from the first tick on a share of them has its turn.
        self._share += len(self._waiting) * TICK_S / MOST_S
        while self._waiting and (self._left >= 1.0 or self._share >= 1.0 or self._waiting[0][0] <= now):
            self._share = max(0.0, self._share - 1.0)
            _, bell = self._waiting.popleft()
            if bell.waits:  # it has not been sounded out of turn
                self._left = max(0.0, self._left - 1.0)
                bell.sound()
        if self._waiting:
            self._later(TICK_S, self._tick)
        else:
            self._share = 0.0

    def _refill(self, now: float) -> None:
        self._left = min(self._most, self._left + (now - self._left_at) * self._messages_per_s)
        self._left_at = now


class Bell:
    """Tells the reader of one sample that there is news: it sounds in its turn, and not again before they are taken.

    Without a ``throttle`` it is always its turn. One made as ``sounded`` is that of a reader who is about to look.
    """

    __slots__ = ("_sound", "_throttle", "sounded", "waits")

    def __init__(self, sound: Callable[[], None], throttle: Throttle | None = None, sounded: bool = False) -> None:
        self._sound = sound
        self._throttle = throttle
        self.sounded = sounded
        self.waits = False

    def ring(self, at_once: bool = False) -> None:
        """There is something new; ``at_once`` when it is the first or the last that comes."""
        if self.sounded or (self.waits and not at_once):
            return
        if self._throttle is None:
            self.sound()
        elif at_once:
            self._throttle.out_of_turn(self)
        else:
            self.waits = True
            self._throttle.turn(self)

    def sound(self) -> None:
        """Have the reader look."""
        self.waits, self.sounded = False, True
        self._sound()

    def hush(self) -> None:
        """All news were taken."""
        self.sounded = False
