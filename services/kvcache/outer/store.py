"""Pages in the outer tier: looked up, stored, fetched and forgotten by the digests of their chains.

Every operation ends within the limit of the settings, connecting and a round trip each; while a breaker is open it
ends at once. Nothing is tried twice: what failed is computed again or not stored, and the next operation finds out.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from services.kvcache.outer.breaker import Breaker
from services.kvcache.outer.connection import Connection, OuterError, WrongValue
from services.kvcache.outer.page_chain import Chain
from services.kvcache.outer.settings import OuterTier
from services.kvcache.outer.value import Codec, InvalidValue

#: Before the digest: what the value of a key is, and its version.
PREFIX = b"rocmforge:page:1:"


class OuterConnection(Protocol):
    """See `connection.Connection`, the only one that is not a test's."""

    def set(self, key: bytes, value: memoryview, ttl_seconds: int) -> None:
        """Write a value that expires."""

    def get(self, key: bytes, into: memoryview) -> int | None:
        """Read a value; its length, None if there is none."""

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys there are."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete keys."""

    def close(self) -> None:
        """Idempotent."""


#: Whether the outer tier is reached, with what was wrong last; called on the thread of the operation that noticed.
OnHealth = Callable[[bool, str], None]


class OuterStore:
    """At most ``settings.connections`` + ``more_connections`` operations at a time, each on a connection of its own.
    Others wait for one.

    Any thread may call. Every operation raises OuterError if it could not be done.
    """

    def __init__(
        self,
        settings: OuterTier,
        codec: Codec,
        on_health: OnHealth,
        *,
        more_connections: int = 0,
        connect: Callable[[OuterTier], OuterConnection] = Connection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.codec = codec
        self._settings = settings
        self._connect = connect
        self._reads, self._writes = Breaker(clock), Breaker(clock)
        self._on_health = on_health
        self._up: bool | None = None
        self._health_lock = threading.Lock()
        self._detail = ""
        # Last in, first out: connections that are not needed stay idle. None: to be made.
        self._idle: queue.LifoQueue[OuterConnection | None] = queue.LifoQueue()
        for _ in range(settings.connections + more_connections):
            self._idle.put(None)

    @property
    def is_up(self) -> bool:
        """Whether it is reached, as far as is known."""
        return bool(self._up)

    def check(self) -> None:
        """Connect and ask for a key: whether the outer tier is reached."""
        with self._connection() as connection:
            connection.exist([PREFIX])

    def lookup(self, digests: Sequence[bytes]) -> int:
        """How many of the pages of a chain, from the first, are there without a gap."""
        with self._connection() as connection:
            there = connection.exist([PREFIX + digest for digest in digests])
        return next((at for at, found in enumerate(there) if not found), len(there))

    def store(self, digest: bytes, value: memoryview) -> None:
        """Write a sealed value. It expires."""
        with self._connection(writes=True) as connection:
            connection.set(PREFIX + digest, value, self._settings.ttl_seconds)

    def fetch(self, chain: Chain, value: memoryview, body: memoryview) -> bool:
        """Read a page into ``body``, by way of ``value``; see `Codec` for their sizes. False if there is none.

        Raises InvalidValue if what is there is not this page; it is deleted then, and ``body`` must not be used.
        """
        key = PREFIX + chain.digest
        try:
            with self._connection() as connection:
                size = connection.get(key, value)
            if size is None:
                return False
            self.codec.open(value[:size], chain, body)
            return True
        except (InvalidValue, WrongValue) as error:
            with contextlib.suppress(OuterError):
                self.forget([chain.digest])
            raise InvalidValue(str(error)) from error

    def forget(self, digests: Sequence[bytes]) -> None:
        """Delete pages."""
        with self._connection(writes=True) as connection:
            connection.delete([PREFIX + digest for digest in digests])

    def close(self) -> None:
        """Close the connections that no operation uses."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (connection := self._idle.get_nowait()) is not None:
                    connection.close()

    @contextlib.contextmanager
    def _connection(self, *, writes: bool = False) -> Iterator[OuterConnection]:
        """A connection for one operation, whose outcome the breakers learn."""
        breaker = self._writes if writes else self._reads
        if not breaker.allows():
            raise OuterError(f"left alone after failures: {self._detail}")
        connection = self._idle.get()
        try:
            connection = connection or self._connect(self._settings)
            yield connection
        except WrongValue:
            self._succeeded(writes)
            raise
        except BaseException as error:
            lost = error.lost if isinstance(error, OuterError) else True
            if lost and connection is not None:
                connection.close()
                connection = None
            self._failed(str(error) or type(error).__name__, writes, lost)
            raise
        else:
            self._succeeded(writes)
        finally:
            self._idle.put(connection)

    def _succeeded(self, writes: bool) -> None:
        self._reads.succeeded()
        if writes:
            self._writes.succeeded()
        self._report(True, "")

    def _failed(self, detail: str, writes: bool, lost: bool) -> None:
        """A server that is full, or cannot save, refuses to write but can be read."""
        self._detail = detail
        if writes:
            self._writes.failed()
        if (lost or not writes) and (self._reads.failed() or self._up is None):
            self._report(False, detail)

    def _report(self, up: bool, detail: str) -> None:
        with self._health_lock:
            if self._up is up:
                return
            self._up = up
            self._on_health(up, detail)
