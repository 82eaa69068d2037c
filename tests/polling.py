"""Looking until something is so: with a deadline, and a pause between looks, which would otherwise take the processor
from what is looked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

PAUSE_S = 0.01

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str | Callable[[], str] = "in vain", within_s: float = 120.0) -> T:
    """Return what ``look`` returns once it is true; ``what``, or what that returns, says what was not so in time."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not (found := look()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        pause.wait(PAUSE_S)
    return found
