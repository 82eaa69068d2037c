"""The engine's Prometheus metrics. docs/metrics.md describes each."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.call_stats import CallStats
from services.common.histogram import Histogram
from services.common.prometheus import Families, Rows, Traced
from services.engine.api.served import Served
from services.engine.delivery.registry import GenerationRegistry
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.sequence import FinishReason
from services.engine.scheduling.stats import Snapshot
from services.engine.vllm_metrics import pool_usage, request_families, vllm_families
from services.version import VERSION

PREFIX = "rocmforge_engine_"


class EngineMetrics(Collector):
    """Collects the engine's metrics at each scrape, without blocking on the engine's thread.

    ``served_calls`` counts the RPCs that the engine serves, ``made_calls`` those that it makes to the daemon. With
    ``vllm_names`` some are also exported under vLLM's names.
    """

    def __init__(
        self,
        generations: GenerationRegistry,
        served_calls: CallStats,
        made_calls: CallStats,
        draining: Callable[[], bool],
        *,
        vllm_names: bool = False,
    ) -> None:
        self._vllm_names = vllm_names
        self._generations = generations
        self._served_calls = served_calls
        self._made_calls = made_calls
        self._draining = draining
        self._served: Served | None = None
        self._traced: Traced | None = None

    def trace(self, traced: Traced | None) -> None:
        """Add the metrics of traces, if there are any."""
        self._traced = traced

    def serve(self, served: Served) -> None:
        """Add the metrics that need a loaded model, which are nearly all of them."""
        self._served = served

    def collect(self) -> list[Metric]:
        """Returns all metric families."""
        families = Families(PREFIX)
        families.info("build_info", "The version that runs.", version=VERSION)
        families.gauge("draining", "1 while the engine drains and rejects new requests.", self._draining())
        families.gauge("generations_retained", "Finished submitted generations kept.", self._generations.retained)
        families.gauge("generation_bytes", "Bytes of the output of submitted generations.", self._generations.bytes)
        if self._traced is not None:
            families.spans(self._traced)
        families.calls("rpc", "Calls that the engine served", self._served_calls)
        families.calls("kvcache_rpc", "Calls that the engine made to the KV-cache daemon", self._made_calls)
        if self._served is not None:
            now = self._served.loop.snapshot()
            self._tell_served(families, self._served, now)
            _tell_loop(families, self._served.loop, now)
            if self._vllm_names:
                return [*families.metrics, *vllm_families(self._served, now)]
        return families.metrics

    def _tell_served(self, families: Families, served: Served, now: Snapshot) -> None:
        families.info("model_info", "The model that is served.", model=served.model_id, backend=served.backend)
        state = served.matrix_units or "none"
        families.info("matrix_units_info", "Whether attention uses the GPU's matrix units.", state=state)
        families.info("lease_info", "The epoch of the session's daemon.", epoch=f"{served.source.epoch:016x}")
        families.gauge("num_tokens_waiting", "Tokens that waiting requests start with.", now.waiting_tokens)
        families.gauge("queue_limit_requests", "Most requests that may wait.", served.limits.max_queue)
        families.gauge("queue_limit_tokens", "Most tokens that may wait.", served.limits.max_queue_tokens)
        families.gauge("kv_pages_held", "Distinct pages held by this engine's live requests.", now.held_pages)
        available = served.source.available_pages
        families.gauge("pool_usage_perc", "Fraction of the pool held by all engines, 0 to 1.", pool_usage(served))
        families.gauges(
            "pool_pages_available", "Free and evictable pages.", (), {(): available} if available is not None else {}
        )
        usage = now.held_pages / max(1, now.total_pages)
        families.gauge("kv_cache_usage_perc", "Fraction of the pool held by this engine, 0 to 1.", usage)


def _tell_loop(families: Families, loop: EngineLoop, now: Snapshot) -> None:
    totals, seen = loop.totals, loop.stats
    request_families(families, loop, now)
    families.gauge("stalled_seconds", "Seconds since the last step while requests run or wait; else 0.", now.stalled_s)
    ended: Rows = {(reason.name.lower(),): totals.ended[reason] for reason in FinishReason}
    families.counters("request_success_total", "Requests that ended without an error.", ("finished_reason",), ended)
    families.counters(
        "request_errors_total", "Queued requests that ended with an error.", ("reason",), _by(totals.errors)
    )
    families.counters("requests_refused_total", "Requests rejected before queueing.", ("reason",), _by(totals.refused))
    families.counter("page_calls_total", "Page exchanges, at most one per step for the whole batch.", totals.page_calls)
    families.counter("session_recoveries_total", "Times the session was lost and reopened.", totals.recoveries)
    phases: dict[tuple[str, ...], Histogram] = {
        ("schedule",): seen.schedule,
        ("compute",): seen.compute,
        ("page_wait",): seen.page_wait,
    }
    families.histograms("step_seconds", "Step time by phase.", ("phase",), phases)
    families.histogram("step_requests", "Requests in a step.", seen.step_requests)
    families.histogram("page_wait_seconds", "Seconds waited for each page exchange.", seen.exchange_wait)
    families.histogram(
        "fill_wait_seconds",
        "Seconds that requests waited for pages from lower tiers, of those that did.",
        seen.fill_wait,
    )
    families.gauge(
        "prefill_tokens_per_second", "Prompt tokens computed per second, of recent steps.", loop.prefill_speed
    )


def _by(counts: dict[str, int]) -> Rows:
    return {(reason,): count for reason, count in dict(counts).items()}
