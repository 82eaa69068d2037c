"""Fetch or compute: how many pages of a continuation are worth fetching, and what the choice has cost in hindsight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

#: Choices to compute that wait to be judged.
_MOST_PENDING = 64


class Leg(NamedTuple):
    """So many pages in a row from one tier: seconds until it begins to deliver, and seconds a page."""

    pages: int
    latency_s: float
    page_s: float


def arrival(legs: Sequence[Leg], pages: int) -> float:
    """Seconds until the first ``pages`` pages are there: the tiers deliver one after the other."""
    at = 0.0
    for leg in legs:
        some = min(leg.pages, pages)
        if some <= 0:
            continue
        at = max(at, leg.latency_s) + some * leg.page_s
        pages -= some
    return at


def worth_fetching(legs: Sequence[Leg], compute_s: float) -> int:
    """The most pages that are there no later than they would be computed, at ``compute_s`` a page."""
    best = count = 0
    at = 0.0
    for leg in legs:
        if leg.pages <= 0:
            continue
        at = max(at, leg.latency_s)
        # Along a leg both grow evenly, so the last page that pays is the last of the leg, or none behind the first that
        # does not.
        first, last = at + leg.page_s - (count + 1) * compute_s, at + leg.pages * leg.page_s
        if last <= (count + leg.pages) * compute_s:
            best = count + leg.pages
        elif first <= 0:
            slower = leg.page_s - compute_s
            best = count + min(leg.pages, int((count * compute_s - at) / slower + 1e-9))
        count += leg.pages
        at = last
    return best


class Regret:
    """Seconds lost against the better choice, known afterwards."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pending: deque[tuple[int, float]] = deque(maxlen=_MOST_PENDING)

    def fetched(self, took_s: float, compute_s: float) -> None:
        """Pages were waited for ``took_s``, and would have been computed in ``compute_s``."""
        self.seconds += max(0.0, took_s - compute_s)

    def computed(self, size: int, compute_s: float) -> None:
        """Pages of ``size`` bytes were computed though a tier had them: judged when that tier is measured next."""
        self._pending.append((size, compute_s))

    def measured(self, latency_s: float, bytes_per_s: float) -> None:
        """What a tier has turned out to be able to."""
        while self._pending:
            size, compute_s = self._pending.popleft()
            self.seconds += max(0.0, compute_s - latency_s - size / max(bytes_per_s, 1.0))
