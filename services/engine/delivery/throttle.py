"""Rate-limits streamed messages."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

#: Most seconds that a message is delayed. Too short for a person reading along to notice.
MOST_S = 0.1
#: Seconds between two passes over the waiting readers.
TICK_S = 0.005
#: The burst size, in seconds' worth of messages.
BURST_S = 0.02


class Throttle:
    """A token bucket of ``messages_per_s`` messages, shared by all readers. A message costs the same with one token or
    with four: time under the GIL, which the engine's thread needs to launch steps.

    Below the limit a message is sent at once; above it, readers queue in FIFO order, and tokens that arrive meanwhile
    join the same message. First tokens and outcomes bypass the queue, but count. No message is delayed longer than
    `MOST_S`, so with more than ``messages_per_s * MOST_S`` active readers the actual rate exceeds the limit. Used on
    the event loop only; ``clock`` is monotonic, ``later`` is the loop's ``call_later``, both in seconds.
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
        """Sound the bell when the rate allows."""
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
        """Sound the bell now, and count it."""
        self._refill(self._clock())
        self._left = max(0.0, self._left - 1.0)
        bell.sound()

    def _tick(self) -> None:
        now = self._clock()
        self._refill(now)
        # Spread readers that arrived together over MOST_S: each tick serves a share of them.
        self._share += len(self._waiting) * TICK_S / MOST_S
        while self._waiting and (self._left >= 1.0 or self._share >= 1.0 or self._waiting[0][0] <= now):
            self._share = max(0.0, self._share - 1.0)
            _, bell = self._waiting.popleft()
            if bell.waits:  # not sounded out of turn meanwhile
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
    """Signals news to the reader of one sample. It sounds when the throttle allows, and only once until ``hush``.

    Without a ``throttle`` it sounds at once. Created as ``sounded``, it lets the first read proceed at once.
    """

    __slots__ = ("_sound", "_throttle", "sounded", "waits")

    def __init__(self, sound: Callable[[], None], throttle: Throttle | None = None, sounded: bool = False) -> None:
        self._sound = sound
        self._throttle = throttle
        self.sounded = sounded
        self.waits = False

    def ring(self, at_once: bool = False) -> None:
        """Signal news; ``at_once`` for a first token or an outcome."""
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
        """Wake the reader."""
        self.waits, self.sounded = False, True
        self._sound()

    def hush(self) -> None:
        """Reset: all news was read."""
        self.sounded = False
