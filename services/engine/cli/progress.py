"""A line on the terminal that tells how far a long command is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

_EVERY_S = 0.1


class Progress:
    """Draws on ``file`` if that is a terminal, at most ten times a second; ``total`` None when nobody knows it."""

    def __init__(self, file: TextIO, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._shown = file.isatty()
        self._total = total
        self._clock = clock
        self._began = clock()
        self._drawn_at = float("-inf")
        self.done = self.failed = self.tokens = 0

    def add(self, *, failed: bool, tokens: int) -> None:
        """One more is done, or failed, with so many tokens."""
        self.done += 1
        self.failed += failed
        self.tokens += tokens
        now = self._clock()
        if self._shown and (now - self._drawn_at >= _EVERY_S or self.done == self._total):
            self._drawn_at = now
            self._file.write(f"\r{self.line()}\x1b[K")
            self._file.flush()

    def line(self) -> str:
        """The line, no longer than the terminal is wide."""
        elapsed = max(self._clock() - self._began, 1e-9)
        told = f"{self.done}" if self._total is None else f"{self.done}/{self._total}"
        told += f"  {self.failed} failed" if self.failed else ""
        told += f"  {self.tokens / elapsed:.0f} tokens/s"
        width = shutil.get_terminal_size().columns - 1
        if self._total is None:
            return told[:width]
        left = round((self._total - self.done) * elapsed / self.done) if self.done else 0
        told += f"  {left // 60}:{left % 60:02} left"
        room = min(40, width - len(told) - 4)
        filled = room * self.done // max(self._total, 1)
        bar = f"[{'#' * filled}{'.' * (room - filled)}]  " if room >= 8 else ""
        return f"{bar}{told}"[:width]

    def close(self) -> None:
        """End the line."""
        if self._shown and self.done:
            self._file.write("\n")
            self._file.flush()
