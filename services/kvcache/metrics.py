"""The daemon's counts as Prometheus metrics. docs/metrics.md tells what each is for."""

from __future__ import annotations

import asyncio

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.call_stats import CallStats
from services.common.prometheus import Families, Rows
from services.kvcache.cache.cache import KvCache
from services.kvcache.pool.pool import Pool

PREFIX = "rocmforge_kvcache_"

#: Seconds that the cache's loop has to answer in: one that takes longer is stuck, and the scrape fails.
COLLECT_S = 5.0


class KvCacheMetrics(Collector):
    """What there is of a cache when somebody asks, seen from its own loop, between two transactions."""

    def __init__(self, cache: KvCache, calls: CallStats, loop: asyncio.AbstractEventLoop) -> None:
        self._cache = cache
        self._calls = calls
        self._loop = loop

    def collect(self) -> list[Metric]:
        """All families. Not to be called on the cache's loop."""
        return asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(COLLECT_S)

    async def _look(self) -> list[Metric]:
        families, cache = Families(PREFIX), self._cache
        families.info(
            "run_info", "This run of the daemon.", epoch=f"{cache.epoch:016x}", eviction=cache.limits.eviction
        )
        families.gauge(
            "budget_bytes", "Memory that pools may have, on each GPU where they are on GPUs.", cache.limits.budget_bytes
        )
        families.counter("sessions_opened_total", "Sessions opened.", cache.opened_sessions)
        families.counter(
            "sessions_expired_total", "Sessions lost: lease over, or process gone.", cache.expired_sessions
        )
        families.counter("sequences_expired_total", "Sequences ended as leaked.", cache.expired_sequences)
        turns: Rows = {("taken",): cache.attach_turns, ("refused",): cache.attach_refusals}
        families.counters("attach_turns_total", "Sessions that came to attach to GPU memory.", ("outcome",), turns)
        families.counter("pools_dropped_total", "Pools whose memory was given back.", cache.pools.dropped)
        families.calls("rpc", "Calls that the daemon served", self._calls)
        _tell_pools(families, cache)
        return families.metrics


def _tell_pools(families: Families, cache: KvCache) -> None:
    pools, label = list(cache.pools), ("pool",)

    def gauge(name: str, help: str, values: dict[Pool, float]) -> None:
        families.gauges(name, help, label, {(pool.id,): value for pool, value in values.items()})

    def counter(name: str, help: str, values: dict[Pool, float]) -> None:
        families.counters(name, help, label, {(pool.id,): value for pool, value in values.items()})

    states: dict[tuple[str, ...], float] = {}
    for pool in pools:
        table = pool.table
        states[pool.id, "free"] = table.free_count
        states[pool.id, "held"] = table.held_count
        states[pool.id, "cached"] = table.cached_count
        states[pool.id, "quarantined"] = table.quarantined_count
    families.gauges("pages", "Pages by state; all states together are the pool.", ("pool", "state"), states)
    gauge("pages_retained", "Cached pages that are retained.", {p: p.table.cached.retained_count for p in pools})
    gauge("page_bytes", "Bytes of a page.", {pool: pool.layout.page_bytes for pool in pools})
    gauge("arena_bytes", "Memory of a pool, canaries included.", {pool: pool.arena.size_bytes for pool in pools})
    gauge("sessions", "Live sessions.", {pool: cache.session_count(pool) for pool in pools})
    gauge("sequences", "Live sequences.", {pool: len(pool.sequences) for pool in pools})
    counter("prefix_cache_queries_total", "Prompt tokens looked up.", {p: p.totals.lookup_tokens for p in pools})
    counter("prefix_cache_hits_total", "Prompt tokens found.", {p: p.totals.hit_tokens for p in pools})
    counter("pages_granted_total", "Pages taken by sequences.", {p: p.totals.granted_pages for p in pools})
    counter("pages_published_total", "Pages completed and indexed.", {p: p.totals.published_pages for p in pools})
    counter(
        "demands_refused_total", "Demands for which no page was there.", {p: p.totals.refused_demands for p in pools}
    )
    evicted: dict[tuple[str, ...], float] = {}
    for pool in pools:
        totals = pool.totals
        evicted[pool.id, "allocation"] = totals.evicted_pages - totals.evicted_on_request
        evicted[pool.id, "request"] = totals.evicted_on_request
        evicted[pool.id, "expiry"] = totals.expired_pages
    families.counters("pages_evicted_total", "Cached pages given up, by why.", ("pool", "cause"), evicted)
