"""Any workload over a pool with a lower tier, whatever its fills do: outputs are the same, and nothing is left over."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.engine.lower_tier import FillingHarness, lower
from tests.engine.scheduling.test_workload import faults, harness_of, operations, run_workload, shaped


def run(workload: list[object], *drawn: Any) -> None:
    """``drawn`` is what `shaped` draws of an engine, and its fill wait in seconds."""
    *shape, fill_wait_s = drawn
    run_workload(harness_of(*shape, make=partial(FillingHarness, fill_wait_s=fill_wait_s)), workload)


@settings(max_examples=150, deadline=None)
@shaped(st.one_of(operations, lower, lower), st.sampled_from([0.0, 0.03, 0.25, 5.0]))
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
    run(workload, slots, page_size, max_batch, max_step_tokens, late, ahead, fill_wait_s)


@settings(max_examples=150, deadline=None)
@shaped(st.one_of(operations, lower, lower, faults), st.sampled_from([0.03, 0.25, 5.0]))
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
    run(workload, slots, page_size, max_batch, max_step_tokens, late, ahead, fill_wait_s)
