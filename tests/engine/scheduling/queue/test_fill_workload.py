"""Any workload over a pool with a lower tier, whatever its fills do: outputs are the same, and nothing is left over."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.lower_tier import FillingHarness, lower
from tests.engine.scheduling.test_workload import AHEAD, faults, operations, run_workload


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(operations, lower, lower), min_size=15, max_size=50),
    st.integers(20, 90),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from(AHEAD),
    st.sampled_from([0.0, 0.03, 0.25, 5.0]),
)
def test_every_output_is_the_output_alone_whatever_fills_do(
    workload: list[object],
    slots: int,
    page_size: int,
    max_batch: int,
    max_step_tokens: int,
    late: bool,
    ahead: str | None,
    fill_wait_s: float,
) -> None:
    harness = FillingHarness(
        pages=slots // page_size,
        page_size=page_size,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        late=late,
        ahead=ahead,
        fill_wait_s=fill_wait_s,
    )
    run_workload(harness, workload)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(operations, lower, lower, faults), min_size=15, max_size=50),
    st.integers(20, 90),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from(AHEAD),
    st.sampled_from([0.03, 0.25, 5.0]),
)
def test_lost_replies_and_lost_sessions_amid_fills_change_no_output(
    workload: list[object],
    slots: int,
    page_size: int,
    max_batch: int,
    max_step_tokens: int,
    late: bool,
    ahead: str | None,
    fill_wait_s: float,
) -> None:
    harness = FillingHarness(
        pages=slots // page_size,
        page_size=page_size,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        late=late,
        ahead=ahead,
        fill_wait_s=fill_wait_s,
    )
    run_workload(harness, workload)
