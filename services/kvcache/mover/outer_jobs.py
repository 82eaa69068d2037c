"""Jobs that take the outer tier, on threads of their own, from and to private buffers.

A value is checked in a private buffer before any of it reaches a page.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from services.common.errors import InvalidConfiguration, ServiceError
from services.kvcache.mover.copies import BufferEnd, Copies, PageEnd
from services.kvcache.mover.memory import MemoryFault
from services.kvcache.mover.orders import (
    FAILED,
    FILLED,
    MISSING,
    REFUSED,
    Chain,
    Filled,
    FillFromOuter,
    Forget,
    Found,
    Health,
    Lookup,
    OuterTier,
    Reply,
    Stored,
)
from services.kvcache.mover.staging import Staging
from services.kvcache.outer.connection import OuterError
from services.kvcache.outer.secret import read_key
from services.kvcache.outer.settings import missing_libraries
from services.kvcache.outer.store import OuterStore
from services.kvcache.outer.value import Codec, InvalidValue

log = structlog.get_logger()

#: The outer tier is tried this often while it is not reached, as far as its breaker allows.
PROBE_S = 0.25


class OuterJobs:
    """At most ``settings.connections`` stores and fills at a time, and a lookup beside them.

    Raises InvalidConfiguration if the key cannot be read, or without the libraries. ``say`` is called on any thread.
    """

    def __init__(
        self,
        settings: OuterTier,
        job_seconds: float,
        staging: Staging,
        copies: Copies,
        say: Callable[[Reply], None],
        clock: Callable[[], float],
    ) -> None:
        if missing := missing_libraries():
            raise InvalidConfiguration(
                f"{', '.join(missing)} not installed: pip install -c constraints.txt -e '.[tiers]'"
            )
        key = read_key(Path(settings.key_file), "--outer-key") if settings.key_file else None
        self._codec = Codec(key)
        # One more than there are threads of these jobs: lookups and probes wait for no page.
        self._store = OuterStore(settings, self._codec, self._report, more_connections=2)
        self._job_seconds = job_seconds
        self._staging = staging
        self._copies = copies
        self._say = say
        self._clock = clock
        self._pool = ThreadPoolExecutor(settings.connections, thread_name_prefix="outer")
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="lookup")
        threading.Thread(target=self._probe, name="probe", daemon=True).start()

    def body_bytes(self, page_bytes: int, chain: Chain) -> int:
        """The size of the private copy of a page."""
        return self._codec.body_bytes(page_bytes, chain)

    def store(self, job: int, chain: Chain, body: bytearray) -> None:
        """Store a page whose bytes begin ``body``, which goes back to the staging memory afterwards."""
        self._pool.submit(self._put, job, chain, body, self._clock())

    def fill(self, order: FillFromOuter, target: PageEnd) -> None:
        """Fill a page, whose memory is held until that is done."""
        self._copies.hold(order.memory)
        self._pool.submit(self._get, order, target, self._clock())

    def lookup(self, order: Lookup) -> None:
        """See `Lookup`."""
        self._lookups.submit(self._find, order, self._clock())

    def forget(self, order: Forget) -> None:
        """See `Forget`."""
        self._pool.submit(self._delete, order)

    def _report(self, up: bool, detail: str) -> None:
        if up:
            log.info("outer_tier_reached")
        else:
            log.warning("outer_tier_lost", detail=detail)
        self._say(Health(up, detail))

    def _probe(self) -> None:
        """Find out when the outer tier is reached, whether or not anybody wants something of it."""
        while True:
            if not self._store.is_up:
                with contextlib.suppress(OuterError):
                    self._store.check()
            time.sleep(PROBE_S)

    def _put(self, job: int, chain: Chain, body: bytearray, begun: float) -> None:
        detail, buffers = "", [body]
        size = self._codec.value_bytes(len(body) - len(chain.tokens), chain)
        try:
            self._check_age(begun)
            buffers.append(value := self._take(size))
            self._codec.seal(memoryview(body), chain, memoryview(value))
            self._store.store(chain.digest, memoryview(value))
        except Exception as error:
            detail = self._explain("store_failed", job, error)
        self._staging.give(*buffers)
        self._say(Stored(job, not detail, 0 if detail else size, self._clock() - begun, detail))

    def _get(self, order: FillFromOuter, target: PageEnd, begun: float) -> None:
        outcome, detail, chain = FAILED, "", order.chain
        buffers: list[bytearray] = []
        try:
            self._check_age(begun)
            buffers.append(value := self._take(self._codec.value_bytes(target.size, chain)))
            buffers.append(body := self._take(self._codec.body_bytes(target.size, chain)))
            if self._store.fetch(chain, memoryview(value), memoryview(body)):
                self._copies.copy(target, BufferEnd(body, target.size))
                outcome = FILLED
            else:
                outcome = MISSING
        except InvalidValue as error:
            outcome, detail = REFUSED, short(error)
            log.warning("outer_value_refused", job=order.job, digest=chain.digest.hex(), detail=detail)
        except Exception as error:
            detail = self._explain("fill_failed", order.job, error)
        self._staging.give(*buffers)
        moved = target.size if outcome == FILLED else 0
        self._say(Filled(order.job, outcome, moved, self._clock() - begun, detail))
        self._copies.release(order.memory)

    def _find(self, order: Lookup, begun: float) -> None:
        count, detail = 0, ""
        try:
            self._check_age(begun)
            count = self._store.lookup(order.keys)
        except Exception as error:
            detail = self._explain("lookup_failed", order.job, error)
        self._say(Found(order.job, count, self._clock() - begun, detail))

    def _delete(self, order: Forget) -> None:
        try:
            self._store.forget(order.digests)
        except OuterError as error:
            log.info("not_forgotten", keys=len(order.digests), detail=str(error))

    def _take(self, size: int) -> bytearray:
        if (buffer := self._staging.take(size)) is None:
            raise MemoryFault("no private memory was left")
        return buffer

    def _check_age(self, begun: float) -> None:
        """Raise MemoryFault for a job that waited so long that nobody waits for it."""
        if self._clock() - begun > self._job_seconds:
            raise MemoryFault(f"it waited for more than {self._job_seconds:g} s")

    def _explain(self, event: str, job: int, error: Exception) -> str:
        """The error for the reply; whatever it is, the job is answered."""
        if not isinstance(error, OuterError | MemoryFault):
            log.error(event, job=job, exc_info=error)
        return short(error)


def outer_jobs(
    settings: OuterTier,
    job_seconds: float,
    staging: Staging,
    copies: Copies,
    say: Callable[[Reply], None],
    clock: Callable[[], float],
) -> OuterJobs | None:
    """None if they cannot be had, of which the daemon hears as of a tier that is not reached."""
    try:
        return OuterJobs(settings, job_seconds, staging, copies, say, clock)
    except ServiceError as error:
        log.error("outer_tier_unusable", detail=short(error))
        say(Health(False, short(error)))
        return None


def short(error: BaseException) -> str:
    """One line for a reply."""
    return (" ".join(str(error).split()) or type(error).__name__)[:500]
