"""What the tiers have counted since the daemon started."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.histogram import Histogram

HOST, OUTER = "host", "outer"

#: Seconds that a page takes to be stored or fetched.
BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class TierCounts:
    """One tier. Pages and bytes."""

    stored_pages: int = 0
    stored_bytes: int = 0
    fetched_pages: int = 0
    fetched_bytes: int = 0
    looked_up_pages: int = 0
    found_pages: int = 0
    failed_pages: int = 0
    store_seconds: Histogram = field(default_factory=lambda: Histogram(BOUNDS))
    fetch_seconds: Histogram = field(default_factory=lambda: Histogram(BOUNDS))


@dataclass(slots=True)
class MovedCounts:
    """The movement between tiers. Pages, but for ``fills`` and ``waited_openings``."""

    dropped_pages: int = 0
    outdated_pages: int = 0  # had been given up before they were read
    lost_pages: int = 0
    fills: int = 0
    waited_openings: int = 0
    tiers: dict[str, TierCounts] = field(default_factory=lambda: {HOST: TierCounts(), OUTER: TierCounts()})
