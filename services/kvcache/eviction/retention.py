"""Retention: keeps pages in the cache longer than others, for a time and within a share of the pool.

A sequence may be opened with a *retention*: a time to live and a priority. When it ends, its pages get a *promise* of
that retention. A page with a promise that becomes cached is *retained*: it is evicted after every unretained page, in
order of increasing priority, then earliest expiry, then least recent use. When its time is over it becomes an ordinary
cached page, as if it had been cached at that moment. Nothing is pinned: if every cached page is retained, an allocation
evicts the lowest-ranked one.

The invariant of ``policy`` holds: a victim has no cached continuation. It relies on promises being joined, never
replaced: a page's promise covers those of all its cached continuations, with the latest expiry and the highest
priority. So at any moment a continuation is unretained, or its parent page is held, or its parent is retained and ranks
above it.
"""

from __future__ import annotations

from typing import NamedTuple

from services.common.errors import FieldInvalid

MAX_PRIORITY = 100

#: A client can extend this: every sequence with a retention that uses a page renews the page's promise.
MAX_RETENTION_S = 86400.0


class Promise(NamedTuple):
    """A priority, and an expiry on the cache's clock. Of two pages, the one with the lesser promise goes first."""

    priority: int
    until: float

    def joined(self, other: Promise) -> Promise:
        """The least promise that covers both."""
        return Promise(max(self.priority, other.priority), max(self.until, other.until))


class Retention(NamedTuple):
    """The retention that an engine requests when it opens a sequence; ``ttl_s`` counts from the sequence's end."""

    ttl_s: float
    priority: int

    def check(self) -> None:
        """Raises FieldInvalid."""
        if not 0 < self.ttl_s <= MAX_RETENTION_S:
            raise FieldInvalid(
                f"prompt.retention.ttl is {self.ttl_s:g} s; it must be above 0 s and at most {MAX_RETENTION_S:g} s",
                field="prompt.retention.ttl",
                limit=f"{MAX_RETENTION_S:g}",
            )
        if not 1 <= self.priority <= MAX_PRIORITY:
            raise FieldInvalid(
                f"prompt.retention.priority is {self.priority}; it must be 1 to {MAX_PRIORITY}",
                field="prompt.retention.priority",
                limit=MAX_PRIORITY,
            )

    def promise(self, now: float) -> Promise:
        """The promise for the pages of a sequence that ends now."""
        return Promise(self.priority, now + self.ttl_s)
