"""A progress line on the terminal for long commands."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import TextIO

_EVERY_S = 0.1


class Progress:
    """Draws on ``file`` if it is a terminal, at most ten times a second; ``total`` is None if it is unknown.

    Items begin, produce tokens while they run, and end. Every method is safe to call from any thread.
    """

    def __init__(self, file: TextIO, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._shown = file.isatty()
        self._total = total
        self._clock = clock
        self._began = clock()
        self._drawn_at = float("-inf")
        self._lock = threading.RLock()
        self.running = self.done = self.failed = self.tokens = 0

    def begin(self, items: int = 1) -> None:
        """Count ``items`` more as running."""
        with self._lock:
            self.running += items
            self.draw()

    def more(self, tokens: int) -> None:
        """Add tokens of running items; negative to take back those of a failed attempt."""
        with self._lock:
            self.tokens += tokens
            self.draw()

    def add(self, *, failed: bool, tokens: int = 0, running: bool = False) -> None:
        """Count one more item as done or failed, with tokens not yet added by ``more``; ``running`` if it had begun."""
        with self._lock:
            self.running -= running
            self.done += 1
            self.failed += failed
            self.tokens += tokens
            self.draw()

    def draw(self) -> None:
        """Draw the line, unless it was drawn less than 0.1 s ago."""
        with self._lock:
            now = self._clock()
            if self._shown and (now - self._drawn_at >= _EVERY_S or self.done == self._total):
                self._drawn_at = now
                self._file.write(f"\r{self.line()}\x1b[K")
                self._file.flush()

    def line(self) -> str:
        """The line, cut to the width of the terminal."""
        elapsed = max(self._clock() - self._began, 1e-9)
        text = f"{self.done}" if self._total is None else f"{self.done}/{self._total}"
        text += f"  {self.running} running" if self.running else ""
        text += f"  {self.failed} failed" if self.failed else ""
        width = shutil.get_terminal_size().columns - 1
        if not self.done:  # no estimate yet: show tokens and elapsed time
            text += f"  {self.tokens} tokens  {_minutes(elapsed)}"
        else:
            text += f"  {self.tokens / elapsed:.0f} tokens/s"
        if self.done and self._total is not None:
            text += f"  {_minutes((self._total - self.done) * elapsed / self.done)} left"
        if self._total is None:
            return text[:width]
        room = min(40, width - len(text) - 4)
        filled = room * self.done // max(self._total, 1)
        bar = f"[{'#' * filled}{'.' * (room - filled)}]  " if room >= 8 else ""
        return f"{bar}{text}"[:width]

    def close(self) -> None:
        """End the line."""
        with self._lock:
            if self._shown and self._drawn_at > float("-inf"):
                self._file.write("\n")
                self._file.flush()


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"
