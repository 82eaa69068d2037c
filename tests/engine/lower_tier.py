"""A page source with a lower tier, whose fills a test decides, and what may happen to it in a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from services.common.errors import PagesFilling
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import Demand, Exchange, Grant
from tests.engine.fakes import Harness, TokenMemory


@dataclass
class Plan:
    """What becomes of the next fill: how many exchanges it takes, when to ask again, and how many pages of the prompt
    are there at the end; None for all, 0 for a fill that fails.
    """

    exchanges: int
    retry_after_s: float | None
    pages: int | None


@dataclass
class Fill:
    """A fill in flight. Its ``pages`` are taken from the pool from its start on."""

    plan: Plan
    name: str
    prompt: tuple[int, ...]
    salt: str
    pages: tuple[int, ...]
    left: int


class LowerTier(LocalPageSource):
    """Has every prefix of every prompt, in a tier below the pool. What it copies into the pool are the tokens."""

    def __init__(self, total_pages: int, page_size: int, memory: TokenMemory) -> None:
        self.plans: list[Plan] = []
        self.fills: dict[tuple[str, tuple[int, ...]], Fill] = {}
        self.begun: list[str] = []
        self.refusals = 0
        self._tokens = memory
        super().__init__(total_pages, page_size)

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str]) -> Exchange:
        """Serve one batch; an opening that may wait and whose fill has not ended is refused."""
        for sequence_id in removed:
            self._remove(sequence_id)
        for key, fill in list(self.fills.items()):
            fill.left -= 1
            if fill.left <= 0:
                self._end(key)
        return _Served([self._filling(demand) or self._serve(demand) for demand in demands])

    def reopen(self) -> None:
        """Start over; fills end with the pool."""
        self.fills.clear()
        super().reopen()

    def _filling(self, demand: Demand) -> Grant | None:
        opening = demand.opening
        if opening is None or demand.sequence_id in self._sequences or demand.sequence_id in self._removed:
            return None
        if opening.fill_wait_s is None:
            return None
        key = (opening.salt, tuple(opening.prompt))
        fill = self.fills.get(key) or self._begin(key)
        if fill is None:
            return None
        self.refusals += 1
        return Grant(demand.sequence_id, error=PagesFilling("filling", retry_after_s=fill.plan.retry_after_s))

    def _begin(self, key: tuple[str, tuple[int, ...]]) -> Fill | None:
        salt, prompt = key
        whole = (len(prompt) - 1) // self.page_size
        if not self.plans or not whole:
            return None
        plan = self.plans.pop(0)
        count = whole if plan.pages is None else min(whole, plan.pages)
        name = f"fill {len(self.begun)}"
        grant = self._serve(Demand.of_prompt(name, prompt[: count * self.page_size + 1], count, salt=salt))
        if grant.error is not None:
            return None
        self._tokens.poison(grant.pages[grant.cached_tokens // self.page_size :])
        prefix = prompt[: count * self.page_size]
        self.fills[key] = fill = Fill(plan, name, prefix, salt, grant.pages, max(1, plan.exchanges))
        self.begun.append(name)
        return fill

    def _end(self, key: tuple[str, tuple[int, ...]]) -> None:
        """Publish what was copied: it is there at once, as it would be if the mover had been writing all along."""
        fill = self.fills.pop(key)
        for at, token in enumerate(fill.prompt):
            self._tokens.pages[fill.pages[at // self.page_size]][at % self.page_size] = token
        self._serve(Demand.of_step(fill.name, 0, fill.prompt, len(fill.pages), len(fill.pages)))
        self._remove(fill.name)

    def evict(self) -> None:
        """Others have needed the pool: nothing stays cached."""
        while self._cached:
            page = self._evict()
            self._tokens.poison([page])
            self._free.append(page)

    def abandon(self) -> None:
        """The mover is gone: what it was filling comes to nothing."""
        for fill in self.fills.values():
            self._remove(fill.name)
        self.fills.clear()


class _Served:
    def __init__(self, grants: list[Grant]) -> None:
        self._grants = grants

    def result(self) -> list[Grant]:
        return self._grants


def put_below(harness: Harness, fill_wait_s: float) -> LowerTier:
    """Give the pool of an engine that has done nothing yet a lower tier."""
    tier = LowerTier(harness.local.total_pages, harness.local.page_size, harness.memory)
    harness.local = harness.source.inner = tier
    harness.loop._limits = dataclasses.replace(harness.loop._limits, fill_wait_s=fill_wait_s)
    harness.loop.scheduler = harness.loop._new_scheduler()
    return tier


class FillingHarness(Harness):
    """An engine whose pool has a lower tier."""

    def __init__(self, *, fill_wait_s: float = 0.25, **shape: Any) -> None:
        super().__init__(**shape)
        self.tier = put_below(self, fill_wait_s)

    def check_empty(self) -> None:
        """As any engine's, but for fills that nobody waits for."""
        self.tier.abandon()
        super().check_empty()

    @property
    def _progress(self) -> tuple[int, ...]:
        return (*super()._progress, self.tier.refusals)


def tier_of(harness: Harness) -> LowerTier:
    """The lower tier of an engine that has one."""
    assert isinstance(harness.local, LowerTier)
    return harness.local


class Act:
    """One of them."""

    def act(self, harness: Harness) -> None:
        """Let it happen."""


@dataclass(frozen=True)
class Planned(Act):
    """What becomes of the next fill: from one that is over at once to one that outlives any patience."""

    exchanges: int
    retry_after_s: float | None
    pages: int | None

    def act(self, harness: Harness) -> None:
        tier_of(harness).plans.append(Plan(self.exchanges, self.retry_after_s, self.pages))


@dataclass(frozen=True)
class Abandon(Act):
    """The mover is killed."""

    def act(self, harness: Harness) -> None:
        tier_of(harness).abandon()


@dataclass(frozen=True)
class Evict(Act):
    """Nothing stays cached in the pool."""

    def act(self, harness: Harness) -> None:
        tier_of(harness).evict()


fills = st.builds(
    Planned,
    st.sampled_from([1, 1, 2, 3, 5, 40]),
    st.sampled_from([None, 0.0, 0.001, 0.02, 0.3]),
    st.sampled_from([None, None, 0, 1, 2]),
)
lower = st.one_of(fills, fills, st.builds(Abandon), st.builds(Evict))
