"""Fetch or compute: the choice against all choices, tried one by one; rates; digests."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvcache.pool.layout import OpaqueLayout
from services.kvcache.tiers.digests import PageDigests, chain_digest, root_digest
from services.kvcache.tiers.fetch.choice import Leg, Regret, arrival, worth_fetching
from services.kvcache.tiers.fetch.rates import Rate
from tests.kvcache.fakes import LAYOUT

times = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 10.0])
legs = st.lists(st.builds(Leg, st.integers(0, 6), times, times), max_size=3)


@given(legs, times)
def test_the_choice_is_the_most_pages_that_come_in_time(legs: list[Leg], compute_s: float) -> None:
    total = sum(leg.pages for leg in legs)
    best = max((n for n in range(1, total + 1) if arrival(legs, n) <= n * compute_s + 1e-9), default=0)
    assert worth_fetching(legs, compute_s) == best


def test_a_rate_follows_what_is_measured_and_forgets_it() -> None:
    rate = Rate(0.001, 1e9)
    assert (rate.latency(0.0), rate.bandwidth(0.0)) == (0.001, 1e9)
    for _ in range(50):
        rate.measured(0.1, 1000, 1.0, 10.0)
    assert rate.latency(10.0) == pytest.approx(0.1, rel=0.01) and rate.bandwidth(10.0) == pytest.approx(1000, rel=0.1)
    assert rate.latency(1000.0) == pytest.approx(0.001, rel=0.01), "it is tried again"


def test_regret_is_what_the_other_choice_would_have_saved() -> None:
    regret = Regret()
    regret.fetched(2.0, 3.0)
    assert regret.seconds == 0.0
    regret.fetched(3.0, 2.0)
    assert regret.seconds == 1.0
    regret.computed(100, 5.0)
    regret.measured(1.0, 100.0)  # it would have taken two seconds
    assert regret.seconds == 4.0
    regret.measured(1.0, 100.0)
    assert regret.seconds == 4.0, "a choice is judged once"


def test_digests_differ_wherever_bytes_or_readers_may() -> None:
    opaque = OpaqueLayout(page_size=4, label="f32", page_bytes=128)
    roots = [
        root_digest(key, pool, layout, salt)
        for key in (b"", b"k" * 32, b"l" * 32)
        for pool in ("model", "model/uid:7", "modelf")
        for layout in (
            LAYOUT,
            dataclasses.replace(LAYOUT, head_dim=8),
            dataclasses.replace(LAYOUT, dtype="f16"),
            opaque,
        )
        for salt in ("", "s", "32")
    ]
    assert len(set(roots)) == len(roots)
    one, other = chain_digest(roots[0], b"\0\0\0\0"), chain_digest(roots[0], b"\1\0\0\0")
    assert len({*roots, one, other, chain_digest(one, b"\1\0\0\0")}) == len(roots) + 3


def test_digests_of_pages() -> None:
    digests = PageDigests(3)
    digests[1] = bytes(range(32))
    assert [digests[0], digests[1], digests[2]] == [bytes(32), bytes(range(32)), bytes(32)]
