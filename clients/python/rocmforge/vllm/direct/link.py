"""Calls to the daemon beside vLLM's steps: one at a time, made by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rocmforge.client.demands import Demand, Grant
from rocmforge.client.errors import Internal, KvCacheDown, ServiceError, SessionExpired
from rocmforge.client.events import LOGGED, EventLog
from rocmforge.vllm import worker
from rocmforge.vllm.worker import BACKOFF_S, MAX_BACKOFF_S

#: How often a wait looks whether the lease may be over.
_LOOK_S = 0.05


class Session(worker.Session, Protocol):
    """What is used of `rocmforge.client.KvCache`."""

    @property
    def available_pages(self) -> int | None:
        """Pages of the whole pool that are free or evictable."""


class Link:
    """A session, and at most one call in progress. All methods are vLLM's thread's."""

    def __init__(self, session: Session, log: EventLog = LOGGED, clock: Callable[[], float] = time.monotonic) -> None:
        self.session, self._log, self._clock = session, log, clock
        self._changed = threading.Condition()
        self._call: tuple[Sequence[Demand], Sequence[str]] | None = None
        self._answer: list[Grant] | ServiceError | None = None
        self._opens = self._opened = self._closed = False
        self._refused_with = ""
        self._thread = threading.Thread(target=self._run, name="rocmforge-vllm", daemon=True)

    def open(self) -> None:
        """Open the first session, and start the thread, which opens it if the daemon is not there or says to come back.

        Raises the ServiceError that it refuses this pool with otherwise: nothing that is tried later helps.
        """
        refused = self._open()
        if refused is not None and not isinstance(refused, KvCacheDown) and refused.retry_after_s is None:
            self.session.close()
            raise refused
        self._opens = refused is not None
        self._thread.start()

    def reopen(self) -> None:
        """Open another session, as soon as one can be opened. Nothing writes the pages of the last one any more."""
        with self._changed:
            self._call = self._answer = None
            self._opens, self._opened = True, False
            self._changed.notify_all()

    def take_opened(self) -> bool:
        """Whether a session was opened since this was asked last."""
        with self._changed:
            opened, self._opened = self._opened, False
            return opened

    @property
    def busy(self) -> bool:
        """Whether a call is in progress, or its answer not taken."""
        return self._call is not None or self._answer is not None

    def send(self, demands: Sequence[Demand], removed: Sequence[str]) -> None:
        """Start a call; none is in progress."""
        with self._changed:
            self._call = demands, removed
            self._changed.notify_all()

    def receive(self, *, wait: bool) -> list[Grant] | None:
        """The answer of the call in progress; None if there is none yet, and with ``wait`` never while the lease lasts.

        Raises ServiceError when the session is over.
        """
        with self._changed:
            while wait and self._answer is None:
                if not self.session.may_write():
                    raise SessionExpired("the lease may be over")
                self._changed.wait(_LOOK_S)
            answer, self._answer = self._answer, None
        if isinstance(answer, ServiceError):
            raise answer
        return answer

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an answer or a session to take, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._opened, timeout_s)

    def close(self) -> None:
        """End the session. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.session.close()

    def _run(self) -> None:
        backoff = BACKOFF_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._opens or self._call is not None)
                if self._closed:
                    return
                opens, call = self._opens, self._call
            if not opens and call is not None:
                self._make(call)
            elif self._open() is None:
                backoff = BACKOFF_S
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)

    def _open(self) -> ServiceError | None:
        try:
            self.session.reopen()
        except ServiceError as error:
            if error.reason != self._refused_with:
                self._log.warning("kvcache_unavailable", reason=error.reason, detail=error.message)
            self._refused_with = error.reason
            return error
        self._refused_with = ""
        with self._changed:
            self._opens, self._opened = False, True
            self._changed.notify_all()
        return None

    def _make(self, call: tuple[Sequence[Demand], Sequence[str]]) -> None:
        answer = self._answered(*call)
        with self._changed:
            if self._call is call:  # else the session was given up meanwhile
                self._call, self._answer = None, answer
            self._changed.notify_all()

    def _answered(self, demands: Sequence[Demand], removed: Sequence[str]) -> list[Grant] | ServiceError:
        while True:
            try:
                return self.session.step(demands, removed)
            except KvCacheDown as error:
                if not self.session.may_write() or self._closed:
                    return error
                time.sleep(_LOOK_S)  # nobody answered, the lease lasts: the same call again
            except ServiceError as error:
                return error
            except Exception as error:  # whatever it is, nobody may wait for this thread
                self._log.error("kvcache_connector_failed", error=repr(error))
                return Internal(repr(error))
