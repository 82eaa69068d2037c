"""The daemon's Prometheus metrics; docs/metrics.md documents them."""

from __future__ import annotations

import asyncio

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.call_stats import CallStats
from services.common.prometheus import Families, Rows, Traced
from services.kvcache.cache.cache import KvCache
from services.kvcache.kvevents.publisher import KvEventPublisher
from services.kvcache.lease.quarantine import Fence
from services.kvcache.pool.pool import Pool
from services.kvcache.presence import LoopWatch
from services.kvcache.tier_metrics import tell_tiers
from services.kvcache.tiers.tiers import Tiers
from services.version import VERSION

PREFIX = "rocmforge_kvcache_"

#: Time limit in seconds for the cache's event loop to answer; beyond it the loop is stuck and the scrape fails.
COLLECT_S = 5.0


class KvCacheMetrics(Collector):
    """Collects a cache's metrics at each scrape, on the cache's own event loop, between two transactions."""

    def __init__(
        self,
        cache: KvCache,
        calls: CallStats,
        watch: LoopWatch,
        loop: asyncio.AbstractEventLoop,
        kv_events: KvEventPublisher | None,
        traced: Traced | None,
        tiers: Tiers | None = None,
    ) -> None:
        self._tiers = tiers
        self._traced = traced
        self._cache = cache
        self._kv_events = kv_events
        self._calls = calls
        self._watch = watch
        self._loop = loop

    def collect(self) -> list[Metric]:
        """Collect all families. Must not be called on the cache's event loop."""
        return asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(COLLECT_S)

    async def _look(self) -> list[Metric]:
        families, cache = Families(PREFIX), self._cache
        families.info(
            "run_info", "This run of the daemon.", epoch=f"{cache.epoch:016x}", eviction=cache.limits.eviction
        )
        families.info("build_info", "The version that runs.", version=VERSION)
        families.gauge(
            "budget_bytes", "Memory budget of all pools; with pools on GPUs, per GPU.", cache.limits.budget_bytes
        )
        families.gauge("host_memory_bytes", "The daemon's own memory that is charged.", cache.memory.used)
        families.gauge("host_memory_limit_bytes", "Budget of the daemon's own memory.", cache.memory.limit)
        families.counter("host_memory_refused_total", "What that budget refused.", cache.memory.refused)
        families.counter("sessions_opened_total", "Sessions opened.", cache.opened_sessions)
        families.counter(
            "sessions_expired_total", "Sessions lost: lease expired, or process gone.", cache.expired_sessions
        )
        families.counter("sequences_expired_total", "Sequences ended as leaked.", cache.expired_sequences)
        lost = [record.fence for record in cache.quarantine.lost()]
        fences: Rows = {(fence.name.lower(),): lost.count(fence) for fence in Fence}
        families.gauges("sessions_lost", "Lost sessions that may still write pages.", ("fence",), fences)
        families.counter("engines_killed_total", "Engines killed for their silence.", cache.quarantine.killed)
        turns: Rows = {("taken",): cache.attach_turns, ("refused",): cache.admission.refusals}
        families.counters("attach_turns_total", "Attempts of sessions to attach to GPU memory.", ("outcome",), turns)
        families.counter("pools_dropped_total", "Pools whose memory was freed.", cache.pools.dropped)
        families.histogram("loop_held_seconds", "How much too late the event loop came back.", self._watch.held)
        families.gauge("loop_held_seconds_max", "The longest that the event loop was held.", self._watch.longest_s)
        families.calls("rpc", "Calls served by the daemon", self._calls)
        if self._traced is not None:
            families.spans(self._traced)
        events = self._kv_events
        families.counter("kv_event_batches_total", "Batches of KV events published.", events.published if events else 0)
        families.counter("kv_event_replays_total", "Replays of KV events served.", events.replayed if events else 0)
        if self._tiers is not None:
            tell_tiers(families, self._tiers)
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
        states[pool.id, "filling"] = table.filling_count
    families.gauges("pages", "Pages by state; the states add up to the pool.", ("pool", "state"), states)
    gauge("pages_retained", "Cached pages under retention.", {p: p.table.cached.retained_count for p in pools})
    gauge("page_bytes", "Bytes per page.", {pool: pool.layout.page_bytes for pool in pools})
    gauge("arena_bytes", "Memory of a pool, canaries included.", {pool: pool.arena.size_bytes for pool in pools})
    gauge("sessions", "Live sessions.", {pool: cache.session_count(pool) for pool in pools})
    gauge("sequences", "Live sequences.", {pool: len(pool.sequences) for pool in pools})
    counter("prefix_cache_queries_total", "Prompt tokens looked up.", {p: p.totals.lookup_tokens for p in pools})
    counter(
        "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", {p: p.totals.hit_tokens for p in pools}
    )
    counter("pages_granted_total", "Pages granted to sequences.", {p: p.totals.granted_pages for p in pools})
    counter(
        "pages_filled_total", "Pages fetched from lower tiers and indexed.", {p: p.totals.filled_pages for p in pools}
    )
    counter("pages_published_total", "Pages completed and indexed.", {p: p.totals.published_pages for p in pools})
    counter(
        "demands_refused_total",
        "Demands refused for lack of pages or quota.",
        {p: p.totals.refused_demands for p in pools},
    )
    evicted: dict[tuple[str, ...], float] = {}
    for pool in pools:
        totals = pool.totals
        evicted[pool.id, "allocation"] = totals.evicted_pages - totals.evicted_on_request
        evicted[pool.id, "request"] = totals.evicted_on_request
        evicted[pool.id, "expiry"] = totals.expired_pages
    families.counters("pages_evicted_total", "Cached pages evicted, by cause.", ("pool", "cause"), evicted)
    verified: dict[tuple[str, ...], float] = {}
    for pool in pools:
        if (checksums := pool.checksums) is not None:
            verified[pool.id, "intact"] = checksums.verified_pages - checksums.corrupted_pages
            verified[pool.id, "corrupted"] = checksums.corrupted_pages
    families.counters(
        "pages_verified_total", "Published pages whose checksum was compared.", ("pool", "outcome"), verified
    )
    counter(
        "pages_withdrawn_total",
        "Pages taken out of the prefix cache because they, or pages before them, were corrupted.",
        {p: p.totals.withdrawn_pages for p in pools},
    )
    counter(
        "pages_zeroed_total",
        "Pages zeroed before they were granted again.",
        {p: p.table.unclean.zeroed_pages for p in pools if p.table.unclean is not None},
    )
