"""The connection to the daemon, replaced when a call is not answered in time.

A connection whose other side vanished without a word looks open. gRPC replaces one only when it is told that it has
ended, so every call on it would wait for its deadline. Pings find that out in seconds, and the call after one that was
not answered need not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias

import grpc

from rocmforge.client.errors import InvalidConfiguration
from rocmforge.client.events import LOGGED, EventLog

#: What is sent with a call, by lower-case key.
Metadata: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Channel:
    channel: grpc.Channel
    stub: Any


class Connection:
    """Calls the methods of a stub on a channel. Threads share it.

    ``connect`` makes a channel, which must not share its sockets with other channels, and ``stub_of`` a channel's stub.
    With ``replace_lost`` a channel that has lost its connection is replaced as well, so that the next one may come with
    certificates that have been renewed. ``connect`` may raise InvalidConfiguration then: the old channel stays.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.Channel],
        stub_of: Callable[[grpc.Channel], Any],
        *,
        replace_lost: bool = False,
        log: EventLog = LOGGED,
    ) -> None:
        self._log = log
        self._connect = connect
        self._stub_of = stub_of
        self._lock = Lock()
        codes = grpc.StatusCode
        self._silent = {codes.DEADLINE_EXCEEDED, codes.UNAVAILABLE} if replace_lost else {codes.DEADLINE_EXCEEDED}
        self._closed = False
        self._current = self._made()

    def _made(self) -> _Channel:
        channel = self._connect()
        return _Channel(channel, self._stub_of(channel))

    def call(self, method: str, request: Any, timeout_s: float, metadata: Metadata | None = None) -> Any:
        """Call a unary method; returns its reply. Raises grpc.RpcError.

        When it is not answered in time, the next call has a channel of its own. Calls of other threads that are under
        way on the old one fail with CANCELLED.
        """
        while True:
            current = self._current
            try:
                return getattr(current.stub, method)(request, timeout=timeout_s, metadata=metadata)
            except ValueError:
                if current is self._current:  # closed for good
                    raise
            except grpc.RpcError as failure:
                if failure.code() in self._silent:
                    self._replace(current)
                raise

    def _replace(self, silent: _Channel) -> None:
        with self._lock:
            if self._closed or silent is not self._current:
                return
            try:
                self._current = self._made()
            except InvalidConfiguration as error:
                self._log.error("kvcache_channel_kept", reason=error.reason, detail=error.message)
                return
        silent.channel.close()

    def close(self) -> None:
        """Close it for good. Idempotent."""
        with self._lock:
            self._closed = True
        self._current.channel.close()
