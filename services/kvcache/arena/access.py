"""Access to an arena's pages by a thread other than the loop's, which may close the arena at any time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Access:
    """One piece of work at a time; the end waits for the piece in progress, and lets no other begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The arena stays open meanwhile. Raises ValueError if it is closed, or about to be."""
        # Asked before the lock is: a thread that takes it over and over would keep the end waiting.
        if self._ended:
            raise ValueError("the arena is closed")
        with self._lock:
            if self._ended:
                raise ValueError("the arena is closed")
            yield

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Nobody has access any more."""
        self._ended = True
        with self._lock:
            yield
