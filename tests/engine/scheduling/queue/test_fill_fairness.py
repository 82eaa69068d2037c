"""Who may go before a request whose pages are being filled, and for how long."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.scheduling.sequence import Key
from tests.engine.lower_tier import lower, put_below
from tests.engine.scheduling.queue.test_fairness import FairHarness, operations, run_fairly


class FairFillingHarness(FairHarness):
    """Also knows who waits for a fill, and whose patience is over."""

    def __init__(self, fill_wait_s: float, **shape: Any) -> None:
        super().__init__(**shape)
        self.tier = put_below(self, fill_wait_s)
        self.memory.running = self.loop.scheduler.running  # type: ignore[attr-defined]

    def in_fills(self) -> set[Key]:
        scheduler = self.loop.scheduler
        waits = dict(scheduler._fill_waits._waits)
        asked = self.asked[-1]
        for sequence, wait in waits.items():
            if self.clock.now >= wait.since + self.loop._limits.fill_wait_s and sequence.key not in asked:
                later = [key for key in asked if scheduler.live[key].order > sequence.order]
                assert not later, f"{later} overtake {sequence}, which has waited long enough"
        return {sequence.key for sequence in waits}

    def check_empty(self) -> None:
        self.tier.abandon()
        super().check_empty()

    @property
    def _progress(self) -> tuple[int, ...]:
        return (*super()._progress, self.tier.refusals)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(operations, lower, lower), min_size=12, max_size=40),
    st.integers(24, 90),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([0.02, 0.25, 3.0]),
)
def test_a_request_is_overtaken_for_no_longer_than_its_fill_wait(
    workload: list[object],
    slots: int,
    page_size: int,
    max_batch: int,
    spare: int,
    late: bool,
    fill_wait_s: float,
) -> None:
    harness = FairFillingHarness(
        fill_wait_s, slots=slots, page_size=page_size, max_batch=max_batch, spare=spare, late=late
    )
    run_fairly(harness, workload)
