"""Metrics for Prometheus: an HTTP endpoint, and the families that both services make of their counts."""

from __future__ import annotations

from collections.abc import Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.calls import Calls
from services.distribution import Distribution
from services.errors import InvalidConfiguration
from services.serving import Listener

#: Values by the values of their labels.
Rows = Mapping[tuple[str, ...], float]


class Endpoint:
    """Serves a collector's metrics, and those of the process, to whoever asks, from threads of its own."""

    def __init__(self, listener: Listener, collector: Collector) -> None:
        self._listener = listener
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._server: WSGIServer | None = None
        self.bound = ""

    def start(self) -> None:
        """Listen; ``bound`` has the port then. Raises InvalidConfiguration when the address cannot be had."""
        listener = self._listener
        try:
            self._server, _ = start_http_server(listener.port, listener.host, self._registry)
        except (OSError, UnicodeError) as error:
            raise InvalidConfiguration(f"--metrics {listener}: cannot bind: {error}", field="--metrics") from error
        self.bound = str(Listener(host=listener.host, port=self._server.server_port))

    def stop(self) -> None:
        """Listen no more; waits half a second at most. Stopping twice changes nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class Families:
    """Collects families under a prefix: every name is said once, with its help and its labels."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.metrics: list[Metric] = []

    def gauge(self, name: str, help: str, value: float) -> None:
        """A number that goes up and down."""
        self.gauges(name, help, (), {(): value})

    def gauges(self, name: str, help: str, labels: tuple[str, ...], rows: Rows) -> None:
        """Gauges by their labels."""
        family = GaugeMetricFamily(self._prefix + name, help, labels=labels)
        for values, value in rows.items():
            family.add_metric(values, value)
        self.metrics.append(family)

    def info(self, name: str, help: str, **labels: str) -> None:
        """A gauge of 1, whose labels say it all."""
        self.gauges(name, help, tuple(labels), {tuple(labels.values()): 1})

    def counter(self, name: str, help: str, value: float) -> None:
        """A number that only rises; its name ends in ``_total``."""
        self.counters(name, help, (), {(): value})

    def counters(self, name: str, help: str, labels: tuple[str, ...], rows: Rows) -> None:
        """Counters by their labels."""
        family = CounterMetricFamily(self._prefix + name, help, labels=labels)
        for values, value in rows.items():
            family.add_metric(values, value)
        self.metrics.append(family)

    def histogram(self, name: str, help: str, distribution: Distribution) -> None:
        """A distribution."""
        self.histograms(name, help, (), {(): distribution})

    def histograms(
        self, name: str, help: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], Distribution]
    ) -> None:
        """Distributions by their labels."""
        family = HistogramMetricFamily(self._prefix + name, help, labels=labels)
        for values, distribution in rows.items():
            buckets = [(floatToGoString(bound), count) for bound, count in distribution.cumulative()]
            family.add_metric(values, buckets, distribution.sum)
        self.metrics.append(family)

    def calls(self, name: str, help: str, calls: Calls) -> None:
        """Calls as two families: counts by method and code, and seconds by method."""
        seconds: dict[tuple[str, ...], Distribution] = {(key,): took for key, took in calls.seconds.copy().items()}
        self.counters(f"{name}_handled_total", f"{help}, by how they ended.", ("method", "code"), calls.handled.copy())
        self.histograms(f"{name}_handling_seconds", f"{help}: how long they took.", ("method",), seconds)
