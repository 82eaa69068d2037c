"""Private memory of the mover, within a limit: copies of pages that are to be stored, and values on their way."""

from __future__ import annotations

import threading


class Staging:
    """Buffers of at most ``most_bytes`` together, those that wait to be used again included. Any thread may call."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._idle: dict[int, list[bytearray]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> bytearray | None:
        """A buffer of exactly that size, with any bytes in it; None if the limit is reached."""
        with self._lock:
            if waiting := self._idle.get(size):
                return waiting.pop()
            if self._bytes + size > self._most_bytes:
                # Those of other sizes make room: layouts change with the models.
                self._bytes -= sum(other * len(buffers) for other, buffers in self._idle.items())
                self._idle.clear()
                if self._bytes + size > self._most_bytes:
                    return None
            self._bytes += size
        return bytearray(size)

    def give(self, *buffers: bytearray) -> None:
        """Take buffers back."""
        with self._lock:
            for buffer in buffers:
                self._idle.setdefault(len(buffer), []).append(buffer)
