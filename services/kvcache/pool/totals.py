"""What a pool has counted since it was created."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counts since the pool was created."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    granted_pages: int = 0
    published_pages: int = 0
    evicted_pages: int = 0
    evicted_on_request: int = 0  # included in evicted_pages
    expired_pages: int = 0
    refused_demands: int = 0
    filled_pages: int = 0  # included in published_pages
    withdrawn_pages: int = 0  # corrupted pages, and those cached behind them
