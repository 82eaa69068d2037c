"""The lease of a session, by this process's clock, and the thread that renews it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rocmforge.client.errors import ServiceError, SessionExpired
from rocmforge.client.events import LOGGED, EventLog

#: The fence: an engine stops launching steps this fraction of the TTL after it *sent* its last successful call. The
#: daemon counts the whole TTL from that call's arrival, so no page is reassigned before the engine has stopped.
LEASE_SHARE = 0.8
IDLE_S = 0.5


@dataclass(slots=True)
class Lease:
    """The lease of one session. No step may be launched on its pages after ``deadline``, in seconds of the clock.

    Two threads renew it without a lock. An older renewal may overwrite a newer one, which only shortens the lease.
    """

    epoch: int
    ttl_s: float
    renewed_at: float
    expired: bool = False
    silent_since: float | None = None  # when the first renewal was sent that failed, since one succeeded

    @property
    def deadline(self) -> float:
        """The latest time at which a step on its pages may be launched."""
        return self.renewed_at + LEASE_SHARE * self.ttl_s

    def renewed(self, sent_at: float, epoch: int) -> None:
        """Renew from a reply to a call sent at ``sent_at``. Raises SessionExpired when the daemon's epoch changed."""
        if epoch != self.epoch:
            self.expired = True
            raise SessionExpired("the daemon was restarted: its epoch changed")
        self.renewed_at = max(self.renewed_at, sent_at)
        self.silent_since = None


class LeaseKeeper:
    """Renews the lease when no other call has done so for a third of its TTL.

    ``current`` returns the lease, if any. ``renew`` makes the call and raises its error.
    """

    def __init__(
        self,
        current: Callable[[], Lease | None],
        renew: Callable[[Lease], None],
        clock: Callable[[], float],
        log: EventLog = LOGGED,
    ) -> None:
        self._log = log
        self._current = current
        self._renew = renew
        self._clock = clock
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the renewal thread, also after one that an error has ended. Idempotent."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kvcache-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait for a call in flight."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        wait = 0.0
        while not self._closed.wait(max(0.0, wait)):
            lease = self._current()
            if lease is None or lease.expired:
                wait = IDLE_S
                continue
            wait = lease.renewed_at + lease.ttl_s / 3 - self._clock()
            if wait > 0:
                continue
            wait = lease.ttl_s / 10  # until an attempt succeeds
            sent_at = self._clock()
            try:
                self._renew(lease)
            except SessionExpired:
                lease.expired = True
            except ServiceError as error:
                if lease.silent_since is None:
                    lease.silent_since = sent_at
                    self._log.warning("lease_not_renewed", reason=error.reason, detail=error.message)
