"""Traces by OpenTelemetry, sent to a collector by OTLP. Importing this module imports OpenTelemetry.

Spans wait in a bounded queue for a thread that sends them, so no caller waits for the collector: what finds the queue
full, or cannot be sent, is dropped and counted. The SDK's variables (``OTEL_*``) set headers, certificates, resource
attributes, and the size of the queue and its batches.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.tracing.span import RPC_METHOD, RPC_STATUS, RPC_SYSTEM, Span, SpanKind, Value

log = structlog.get_logger()

#: Sending them to the collector takes at most so many seconds when the service stops.
FLUSH_S = 5.0

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
#: The codes of a served call that are the service's fault: OpenTelemetry's conventions for gRPC servers.
_FAILED = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
#: What an earlier service has decided not to sample. The sampler would say so too, and take much longer.
_NOT_SAMPLED = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-00").fullmatch
_OPTIONS: Any = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 5000))
_W3C = TraceContextTextMapPropagator()


class _Recorded:
    """See `Span`. The wall clock is read once a trace; from there on times are those of the monotonic clock."""

    __slots__ = ("_clock", "_offset_ns", "_span", "_tracer")

    def __init__(self, span: trace.Span, tracer: trace.Tracer, clock: Callable[[], float], offset_ns: int) -> None:
        self._span, self._tracer, self._clock, self._offset_ns = span, tracer, clock, offset_ns

    @property
    def context(self) -> trace.SpanContext:
        return self._span.get_span_context()

    @property
    def traceparent(self) -> str:
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        at: float | None = None,
        attributes: Mapping[str, Value] | None = None,
        links: Sequence[Span] = (),
    ) -> Span:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span, Context()),
            _KINDS[kind],
            attributes,
            [Link(link.context) for link in links if isinstance(link, _Recorded)],
            start_time=self._ns(at),
        )
        return _Recorded(span, self._tracer, self._clock, self._offset_ns)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def end(self, at: float | None = None, *, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._ns(at))

    def _ns(self, at: float | None) -> int:
        return self._offset_ns + round(1e9 * (self._clock() if at is None else at))


class _Queue(SpanProcessor):
    """The SDK's queue and thread, with every span accounted for: pending, sent or dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._lock = threading.Lock()
        self._exporter = exporter
        self._stopped = False
        self._failures = 0
        self.pending = self.sent = self.dropped = 0
        self.detail = ""  # what the exporter has last complained of
        self._most = BatchSpanProcessor._default_max_queue_size()
        self._batches = BatchSpanProcessor(_Sender(self._send))

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span, or drop it if the queue is full."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        with self._lock:
            if self._stopped or self.pending >= self._most:
                self.dropped += 1
                return
            self.pending += 1
        self._batches.on_end(span)

    def _send(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called on the SDK's thread, with spans that it has taken out of its queue."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self.detail, result = repr(error), SpanExportResult.FAILURE
        with self._lock:
            if self._stopped:  # counted as dropped already
                return result
            self.pending -= len(spans)
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
                self._failures = 0
                return result
            self.dropped += len(spans)
            self._failures += 1
        if self._failures.bit_count() == 1:  # at powers of two
            log.warning("spans_dropped", spans=len(spans), failures=self._failures, detail=self.detail)
        return result

    def flush(self, limit_s: float) -> None:
        """Send what is pending, and end. What is not sent after ``limit_s`` seconds is dropped."""
        # Not on a thread that the process would wait for.
        worker = threading.Thread(target=self._batches.shutdown, name="otlp-flush", daemon=True)
        worker.start()
        worker.join(limit_s)
        with self._lock:
            self._stopped = True
            left, self.pending = self.pending, 0
            self.dropped += left
        if left:
            log.warning("spans_dropped", spans=left, failures=self._failures, detail="the service stops")
        self._exporter.shutdown()


class _Sender(SpanExporter):
    def __init__(self, send: Callable[[Sequence[ReadableSpan]], SpanExportResult]) -> None:
        self._send = send

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._send(spans)


class _Complaints(logging.Handler):
    """Keeps OpenTelemetry's own log lines out of the service's, which are events; the last is a detail of one."""

    def __init__(self, queue: _Queue) -> None:
        super().__init__(logging.WARNING)
        self._queue = queue

    def emit(self, record: logging.LogRecord) -> None:
        self._queue.detail = record.getMessage()


class OtlpTracing:
    """Traces of one service. ``endpoint`` is ``http://host:port`` or, with TLS, ``https://host:port``.

    A call whose caller has decided is sampled as the caller says, any other with probability ``ratio``. ``resource``
    names the service; ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` override it. ``clock`` is the service's
    monotonic clock in seconds, ``wall_ns`` the wall clock in nanoseconds.
    """

    def __init__(
        self,
        endpoint: str,
        ratio: float,
        resource: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self._wall_ns = wall_ns
        self._queue = _Queue(
            OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), channel_options=_OPTIONS)
        )
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [_Complaints(self._queue)], False
        provider = TracerProvider(
            ParentBased(TraceIdRatioBased(ratio)),
            Resource.create(dict(resource)).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("rocmforge", resource.get("service.version"))

    @property
    def sent(self) -> int:
        """Spans that the collector took."""
        return self._queue.sent

    @property
    def dropped(self) -> int:
        """Spans that found the queue full, or that the collector did not take."""
        return self._queue.dropped

    def serve(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Span | None:
        """See `Tracing`."""
        carrier = {key: value for key, value in metadata if key in ("traceparent", "tracestate")}
        parent = carrier.get("traceparent")
        if isinstance(parent, str) and _NOT_SAMPLED(parent):
            return None
        span = self._tracer.start_span(
            method,
            _W3C.extract(carrier, Context()),
            trace.SpanKind.SERVER,
            {RPC_SYSTEM: "grpc", RPC_METHOD: method},
            start_time=(now := self._wall_ns()),
        )
        if not span.is_recording():
            return None
        return _Recorded(span, self._tracer, self._clock, now - round(1e9 * self._clock()))

    def end(self, span: Span, code: str) -> None:
        """See `Tracing`."""
        span.set({RPC_STATUS: code})
        span.end(error=code if code in _FAILED else "")

    async def stop(self, limit_s: float) -> None:
        """Send what is pending, for at most ``limit_s`` seconds, and no more than `FLUSH_S`."""
        await asyncio.to_thread(self._queue.flush, min(limit_s, FLUSH_S))
