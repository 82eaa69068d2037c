"""The page source: the only interface between the scheduler and the KV cache.

``exchange`` is called at most once per step, for the whole batch. It does not block: it overlaps with the step on the
device, and its result is collected after the step. There are two sources, tested by one conformance suite:
`daemon.GrpcPageSource` (the daemon's pages) and `local.LocalPageSource` (this process's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rocmforge.client.demands import (
    MAX_CATEGORY,
    MAX_EXPECTED_RETURN_S,
    MAX_RETENTION_PRIORITY,
    MAX_RETENTION_S,
    MAX_TURN,
    Demand,
    Grant,
    Opening,
    PageCopy,
    Retention,
    ReuseHint,
)
from rocmforge.client.layout import PageLayout

__all__ = [
    "MAX_CATEGORY",
    "MAX_EXPECTED_RETURN_S",
    "MAX_RETENTION_PRIORITY",
    "MAX_RETENTION_S",
    "MAX_TURN",
    "Demand",
    "Exchange",
    "Grant",
    "Opening",
    "PageCopy",
    "PageLayout",
    "PageSource",
    "Retention",
    "ReuseHint",
]


class Exchange(Protocol):
    """An exchange in flight."""

    def result(self) -> list[Grant]:
        """Wait for the grants, one per demand, in order.

        Raises ``SessionExpired`` when all of this engine's pages are lost, and ``KvCacheDown`` when there was no answer
        and the same exchange may be retried.
        """


class PageSource(Protocol):
    """Pages for one engine. Its methods are called on the engine's thread only, its properties read on any."""

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""

    @property
    def available_pages(self) -> int | None:
        """Pages of the whole pool, of all its engines, that are free or evictable; None while that is unknown."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def retains(self) -> bool:
        """Whether an opening may ask for a retention."""

    @property
    def memory(self) -> Any:
        """The pages, ``[page, layer, (k, v), kv_head, slot, head_dim]``, as the backend allocated or mapped them.

        Raises ``SessionExpired`` while there is no session.
        """

    @property
    def epoch(self) -> int:
        """The epoch of the daemon that owns the pages, 0 without a daemon."""

    @property
    def silent_since(self) -> float | None:
        """Since when the session's lease could not be renewed, in seconds of the clock; None while it can."""

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str]) -> Exchange:
        """Send one batch: ``removed`` sequences are removed first, then ``demands`` are served in order.

        No step in flight may use a removed sequence's pages. Does not block.
        """

    def may_launch(self) -> bool:
        """Whether the lease is certain to last long enough to launch a step on the pages."""

    def reopen(self) -> None:
        """Open a new session after ``SessionExpired``, without any sequences. Raises ``KvCacheDown`` when there is no
        answer.
        """

    def close(self) -> None:
        """Release everything. No step may be in flight."""
