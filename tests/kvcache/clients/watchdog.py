"""Notices workers that make no progress, and says where everybody stands."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable


class Watchdog:
    """While it watches, every worker has to call ``beat`` at least every ``stall_s`` seconds until it is ``done``.

    When one does not, the stacks of all threads go into ``report``, and the process ``pid`` gets SIGABRT: one that was
    started with PYTHONFAULTHANDLER=1 writes its own stacks then, and the calls that hang on it end.
    """

    def __init__(self, stall_s: float, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.report = ""
        self._stall_s = stall_s
        self._pid = pid
        self._clock = clock
        self._beats: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, worker: str) -> None:
        """The worker is getting on."""
        self._beats[worker] = self._clock()

    def done(self, worker: str) -> None:
        """The worker has nothing to do any more."""
        self._beats.pop(worker, None)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(0.5, self._stall_s / 4)):
            late = self._clock() - self._stall_s
            stuck = sorted(worker for worker, beat in self._beats.copy().items() if beat < late)
            if stuck:
                self.report = f"no progress of {', '.join(stuck)} for {self._stall_s:g} s\n{stacks()}"
                os.kill(self._pid, signal.SIGABRT)
                os.kill(self._pid, signal.SIGCONT)  # one that is stopped takes no other signal
                return


def stacks() -> str:
    """Where every thread of this process is."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
