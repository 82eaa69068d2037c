"""The health service, `grpc.health.v1`: which names are served, for probes, routers and clients that watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

#: The name that says whether the process should keep running. The others say whether it should get requests.
LIVENESS = "liveness"

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_pb2_grpc.HealthServicer):
    """The statuses by name. Setting one never waits, however slowly a watcher reads.

    Each watcher hears of the current status, not of all between, and independently of the other watchers.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._watchers: set[asyncio.Event] = set()
        self._over = False

    def set(self, names: Iterable[str], status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set the status of several names."""
        self._statuses.update(dict.fromkeys(names, status))
        self._wake()

    def end(self) -> None:
        """End each watch once its reader has the last status: a server that stops need not wait for them."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        """The status of one name; NOT_FOUND for one that is not here."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of one name, and each time that it has changed; SERVICE_UNKNOWN for one that is not here."""
        changed, sent = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                elif self._over:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)
