"""A span as the services see it, whatever records it. Without tracing there are no spans, and None stands for one."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol, TypeAlias

Value: TypeAlias = str | int | float | bool | Sequence[str]


class SpanKind(enum.Enum):
    """Whether a span is of a call served, of a call made, or of neither."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
    INTERNAL = enum.auto()


class Span(Protocol):
    """A recorded span. Times are seconds of the service's monotonic clock; None is now. Any thread may use it."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context of a call that is made within it."""

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        at: float | None = None,
        attributes: Mapping[str, Value] | None = None,
        links: Sequence[Span] = (),
    ) -> Span:
        """Begin a span within it."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""

    def end(self, at: float | None = None, *, error: str = "") -> None:
        """End it; ``error`` is the reason of its failure. Ending it again does nothing."""


#: The span of the call that is being served; None if it is not sampled.
SPAN: ContextVar[Span | None] = ContextVar("span", default=None)

#: The attributes and the name of a call's span: OpenTelemetry's conventions for gRPC.
RPC_SYSTEM, RPC_METHOD, RPC_STATUS = "rpc.system.name", "rpc.method", "rpc.response.status_code"


class Tracing(Protocol):
    """Decides which calls are sampled, and begins their spans."""

    def serve(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Span | None:
        """The span of a call of ``method``, ``package.Service/Method``, with that metadata; None if not sampled."""

    def end(self, span: Span, code: str) -> None:
        """End the span of a served call that ended with this gRPC status code."""
