"""What the tiers below the pools have done, as metrics; docs/metrics.md documents them."""

from __future__ import annotations

from services.common.histogram import Histogram
from services.common.prometheus import Families
from services.kvcache.tiers.counts import HOST, OUTER
from services.kvcache.tiers.tiers import Tiers

#: What a tier counts, and how its metric calls it.
_PAGES = ("stored", "fetched", "looked_up", "found", "failed")


def tell_tiers(families: Families, tiers: Tiers) -> None:
    """Add the families of the lower tiers."""
    label, there = ("tier",), [name for name in (HOST, OUTER) if tiers.state(name) is not None]
    available: dict[tuple[str, ...], float] = {}
    pages: dict[tuple[str, ...], float] = {}
    moved: dict[tuple[str, ...], float] = {}
    seconds: dict[tuple[str, ...], Histogram] = {}
    for name in there:
        state, counts = tiers.state(name), tiers.counts.tiers[name]
        available[(name,)] = float(state is not None and state.available)
        for what in _PAGES:
            pages[name, what] = getattr(counts, f"{what}_pages")
        moved[name, "store"], moved[name, "fetch"] = counts.stored_bytes, counts.fetched_bytes
        seconds[name, "store"], seconds[name, "fetch"] = counts.store_seconds, counts.fetch_seconds
    families.gauges("tier_available", "1 if a lower tier can be used.", label, available)
    families.counters("tier_pages_total", "Pages of lower tiers, by what became of them.", ("tier", "event"), pages)
    families.counters("tier_bytes_total", "Bytes that went to lower tiers and came from them.", ("tier", "way"), moved)
    families.histograms("tier_seconds", "Durations of one page in seconds, by way.", ("tier", "way"), seconds)
    if (host := tiers.host) is not None:
        families.gauge("host_cache_pages", "Pages in the host tier.", len(host))
        families.gauge("host_cache_bytes", "Bytes of pages in the host tier.", host.used_bytes)
        families.gauge("host_cache_limit_bytes", "Size of the host tier.", host.capacity)
        families.counter("host_cache_evicted_pages_total", "Pages evicted from the host tier.", host.evicted)
    counts_ = tiers.counts
    families.gauge("mover_running", "1 if there is a mover.", float(tiers.mover.running))
    families.counter("mover_restarts_total", "Movers started after the first.", tiers.mover.restarts)
    families.gauge("spills_queued", "Pages that wait to be stored in lower tiers.", tiers.spills.queued)
    families.gauge("tier_pages_moving", "Pages on their way.", tiers.spills.moving + tiers.fetcher.moving)
    families.counter("spills_dropped_total", "Pages not stored because the queue was full.", counts_.dropped_pages)
    families.counter("spills_outdated_total", "Pages given up before they were read.", counts_.outdated_pages)
    families.counter("mover_lost_pages_total", "Pages on their way when a mover ended.", counts_.lost_pages)
    families.counter("fills_total", "Runs of pages fetched from lower tiers.", counts_.fills)
    families.counter(
        "openings_waited_total", "Openings that were refused while pages were filled.", counts_.waited_openings
    )
    families.counter(
        "fetch_regret_seconds_total",
        "Seconds lost by fetching what was faster to compute, and the reverse, in hindsight.",
        tiers.fetcher.regret.seconds,
    )
