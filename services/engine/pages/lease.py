"""The lease on a session, counted by this process's clock, and the thread that keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.common.errors import ServiceError, SessionExpired

log = structlog.get_logger()

#: The engine stops launching this much of the ttl after it *sent* its last successful call, so before the daemon,
#: which counts the whole ttl from when that call arrived, could give the pages to anybody else.
LEASE_SHARE = 0.8
IDLE_S = 0.5


@dataclass(slots=True)
class Lease:
    """One session's. ``deadline``, in seconds of the clock, is when its pages may no longer be touched.

    Renewed by two threads without a lock: the older of two renewals may win, which only ends the lease earlier.
    """

    epoch: int
    ttl_s: float
    renewed_at: float
    expired: bool = False

    @property
    def deadline(self) -> float:
        """When the last step on its pages may be launched."""
        return self.renewed_at + LEASE_SHARE * self.ttl_s

    def renewed(self, sent_at: float, epoch: int) -> None:
        """Take a reply to a call sent at that time. Raises SessionExpired when another run of the daemon gave it."""
        if epoch != self.epoch:
            self.expired = True
            raise SessionExpired("the daemon was restarted: its epoch changed")
        self.renewed_at = max(self.renewed_at, sent_at)


class LeaseKeeper:
    """Renews a lease when no other call has done so for a third of its ttl.

    ``current`` says which lease there is, if any; ``renew`` makes the call for it, and raises what it is answered.
    """

    def __init__(
        self, current: Callable[[], Lease | None], renew: Callable[[Lease], None], clock: Callable[[], float]
    ) -> None:
        self._current = current
        self._renew = renew
        self._clock = clock
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Keep leases from now on; starting again changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvcache-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, and wait until no call is under way."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        wait, silent = 0.0, False
        while not self._closed.wait(max(0.0, wait)):
            lease = self._current()
            if lease is None or lease.expired:
                wait = IDLE_S
                continue
            wait = lease.renewed_at + lease.ttl_s / 3 - self._clock()
            if wait > 0:
                continue
            wait = lease.ttl_s / 10  # until an attempt succeeds
            try:
                self._renew(lease)
                silent = False
            except SessionExpired:
                lease.expired = True
            except ServiceError as error:
                if not silent:
                    log.warning("lease_not_renewed", reason=error.reason, detail=error.message)
                silent = True
