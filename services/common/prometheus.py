"""Prometheus metrics: the HTTP endpoint, and metric families built from the services' counters."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.common.call_stats import CallStats
from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration
from services.common.histogram import Histogram

log = structlog.get_logger()

#: Seconds that a caller has in all, from its connection to the end of the response.
CALLER_S = 10.0
#: Callers at a time, a thread each.
MAX_CALLERS = 32

#: Values by the values of their labels.
Rows = Mapping[tuple[str, ...], float]


class Traced(Protocol):
    """Counts of the spans of traces: those that a collector took, and the others."""

    @property
    def sent(self) -> int:
        """Taken by the collector."""

    @property
    def dropped(self) -> int:
        """Never sent, or not taken."""


class Endpoint:
    """Serves a collector's metrics, and those of the process, over HTTP on its own threads."""

    def __init__(self, listener: Listener, collector: Collector) -> None:
        self._listener = listener
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._server: _Server | None = None
        self.bound = ""

    def start(self) -> None:
        """Start listening and set ``bound``. Raises InvalidConfiguration if the address cannot be bound."""
        listener = self._listener
        try:
            found = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._server = _Server(found[0][0], found[0][4][:2], self._answer)
        except (OSError, UnicodeError) as error:
            raise InvalidConfiguration(f"--metrics {listener}: cannot bind: {error}", field="--metrics") from error
        self.bound = str(Listener(host=listener.host, port=self._server.server_port))
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Stop listening; blocks for at most half a second. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return make_wsgi_app(self._registry)(environ, start_response)
        except Exception:
            log.exception("metrics_failed")
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"collecting the metrics failed; see the log\n"]


class _Server(ThreadingWSGIServer):
    """One thread per connection, at most `MAX_CALLERS`, and each for at most `CALLER_S`, however slowly it talks."""

    def __init__(self, family: int, address: tuple[Any, ...], app: Callable[..., Any]) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        super().__init__(address, _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind, without the base class's lookup of the host name, which may take seconds and is not needed."""
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, or hang up if too many callers have one."""
        with self._lock:
            if len(self._since) < MAX_CALLERS:
                self._since[request] = time.monotonic()
        if request in self._since:
            super().process_request(request, client_address)
        else:
            log.info("metrics_caller_refused", caller=str(client_address), limit=MAX_CALLERS)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on callers whose time is over; called about twice a second."""
        began = time.monotonic() - CALLER_S
        with self._lock:
            over = [request for request, since in self._since.items() if since < began]
        for request in over:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread reads an end, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that was lost or timed out."""
        log.info("metrics_caller_lost", caller=str(client_address), error=repr(sys.exception()))


class _Handler(WSGIRequestHandler):
    timeout = CALLER_S  # between two bytes, so that a silent caller of a stopped server is let go as well

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log every scrape."""


class Families:
    """Builds metric families under a name prefix; each is declared once, with its help and labels.

    All of them also have the ``constant`` labels.
    """

    def __init__(self, prefix: str, **constant: str) -> None:
        self._prefix = prefix
        self._names = tuple(constant)
        self._values = tuple(constant.values())
        self.metrics: list[Metric] = []

    def gauge(self, name: str, help: str, value: float) -> None:
        """Add a gauge without labels."""
        self.gauges(name, help, (), {(): value})

    def gauges(self, name: str, help: str, labels: tuple[str, ...], rows: Rows) -> None:
        """Add a gauge family, its values by label values."""
        family = GaugeMetricFamily(self._prefix + name, help, labels=(*self._names, *labels))
        for values, value in rows.items():
            family.add_metric((*self._values, *values), value)
        self.metrics.append(family)

    def info(self, name: str, help: str, **labels: str) -> None:
        """Add an info metric: a gauge of 1 whose labels carry the information."""
        self.gauges(name, help, tuple(labels), {tuple(labels.values()): 1})

    def counter(self, name: str, help: str, value: float) -> None:
        """Add a counter without labels; its name ends in ``_total``."""
        self.counters(name, help, (), {(): value})

    def counters(self, name: str, help: str, labels: tuple[str, ...], rows: Rows) -> None:
        """Add a counter family, its values by label values."""
        family = CounterMetricFamily(self._prefix + name, help, labels=(*self._names, *labels))
        for values, value in rows.items():
            family.add_metric((*self._values, *values), value)
        self.metrics.append(family)

    def histogram(self, name: str, help: str, distribution: Histogram) -> None:
        """Add a histogram without labels."""
        self.histograms(name, help, (), {(): distribution})

    def histograms(
        self, name: str, help: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], Histogram]
    ) -> None:
        """Add a histogram family, by label values."""
        family = HistogramMetricFamily(self._prefix + name, help, labels=(*self._names, *labels))
        for values, distribution in rows.items():
            buckets = [(floatToGoString(bound), count) for bound, count in distribution.cumulative()]
            family.add_metric((*self._values, *values), buckets, distribution.sum)
        self.metrics.append(family)

    def spans(self, traced: Traced) -> None:
        """Add the spans of traces, by what became of them."""
        rows: Rows = {("sent",): traced.sent, ("dropped",): traced.dropped}
        self.counters("trace_spans_total", "Spans of traces, by what became of them.", ("result",), rows)

    def calls(self, name: str, help: str, calls: CallStats) -> None:
        """Add RPCs as two families: counts by method and status code, and durations in seconds by method."""
        seconds: dict[tuple[str, ...], Histogram] = {(key,): took for key, took in calls.seconds.copy().items()}
        self.counters(f"{name}_handled_total", f"{help}, by status code.", ("method", "code"), calls.handled.copy())
        self.histograms(f"{name}_handling_seconds", f"{help}: durations in seconds.", ("method",), seconds)
