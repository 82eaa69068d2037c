"""Adds a token to the calls of a channel.

gRPC's own way needs TLS, and a unix socket has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc


class _Details(NamedTuple):
    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """For channels of threads."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _with_header(self, details: Any) -> _Details:
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._header],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Call with the token."""
        return continuation(self._with_header(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Call with the token."""
        return continuation(self._with_header(details), request)


class AsyncBearer(grpc.aio.UnaryStreamClientInterceptor):
    """For streams of asyncio's channels."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Call with the token."""
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        return await continuation(
            grpc.aio.ClientCallDetails(
                details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
            ),
            request,
        )
