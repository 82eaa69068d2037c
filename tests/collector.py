"""An OTLP collector: a gRPC server of OpenTelemetry's own protos that keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """A span as it came. Ids in hexadecimal, times in nanoseconds since 1970, ``status`` the name of its code."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves on ``endpoint`` until ``close``. ``shut`` makes it take calls and answer none."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.texts: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.reached.set()
        self.open.wait(600)
        self.texts.append(str(request))
        for resource in request.resource_spans:
            service = next(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
            self.spans += [_read(service, span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def until(self, enough: Callable[[list[Received]], bool], timeout_s: float = 60.0) -> list[Received]:
        """Wait for spans that are enough; fails with those that there are."""
        deadline = time.monotonic() + timeout_s
        while not enough(found := list(self.spans)):
            assert time.monotonic() < deadline, [(span.service, span.name) for span in found]
            threading.Event().wait(0.05)
        return found

    def close(self) -> None:
        """Gone without a word: the port is shut, and its connections with it."""
        self.open.set()
        self._server.stop(0).wait()


def _read(service: str, span: Any) -> Received:
    attributes = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        attributes[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        attributes,
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )
