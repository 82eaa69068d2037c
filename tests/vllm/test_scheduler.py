"""The connector's half in vLLM's scheduler, step by step."""

from __future__ import annotations

import pytest

from rocmforge.vllm.plan import Plan, Report
from rocmforge.vllm.scheduler import Scheduled, SchedulerHalf
from tests.vllm.doubles import BlockPool, Request

SIZE = 8


class Stepped:
    """A half with a pool of 32 blocks and a clock that stands still."""

    def __init__(self, page_size: int = SIZE) -> None:
        self.now = 0.0
        self.pool = BlockPool(32)
        self.half = SchedulerHalf(
            page_size=page_size,
            block_size=SIZE,
            salt_of=lambda request: request.salt,
            lookup_timeout_s=0.5,
            clock=lambda: self.now,
        )
        self.half.bind(self.pool)

    def request(self, length: int, name: str = "a") -> Request:
        return Request(name, list(range(1, length + 1)), 50)

    def opened(self, request: Request, resident: int, session: int = 1) -> str:
        """Look up, and let the daemon answer; the sequence's name."""
        assert self.half.matched(request, 0) == (None, False)
        [opening] = self.half.plan(Scheduled()).openings
        self.half.report(Report(session, {opening.sequence: resident}))
        return opening.sequence

    def run(self, request: Request, computed: int) -> Plan:
        """A step after which so many tokens of the request are computed."""
        if not request.blocks:
            request.blocks = self.pool.get_new_blocks(8)
            self.half.allocated(request, [block.block_id for block in request.blocks], 0)
        return self.half.plan(Scheduled(computed={request.request_id: computed}))


def test_the_first_report_of_a_session_leaves_lookups_under_way() -> None:
    one = Stepped()
    request = one.request(40)
    assert one.half.matched(request, 0) == (None, False)
    [opening] = one.half.plan(Scheduled()).openings
    one.half.report(Report(1))
    assert one.half.matched(request, 0) == (None, False)
    assert one.half.plan(Scheduled()).empty
    one.half.report(Report(1, {opening.sequence: 16}))
    assert one.half.matched(request, 0) == (16, True)


def test_a_new_session_has_nothing_of_the_one_before() -> None:
    one = Stepped()
    request = one.request(40)
    name = one.opened(request, 16)
    one.half.report(Report(2))
    assert one.half.matched(request, 0) == (None, False)
    plan = one.half.plan(Scheduled())
    assert plan.endings == [name]
    assert [opening.sequence for opening in plan.openings] != [name]


def test_a_lookup_that_is_not_answered_is_a_miss_and_saved_for_when_it_is() -> None:
    one = Stepped()
    request = one.request(40)
    assert one.half.matched(request, 0) == (None, False)
    [opening] = one.half.plan(Scheduled()).openings
    one.now = 0.5
    assert one.half.matched(request, 0) == (0, False)
    assert not one.run(request, 40).saves
    one.half.report(Report(1, {opening.sequence: 8}))
    [save] = one.run(request, 41).saves
    assert (save.start, save.stop) == (8, 40)


def test_vllm_does_not_wait_for_what_it_has_itself() -> None:
    one = Stepped()
    request = one.request(40)
    assert one.half.matched(request, 32) == (0, False)
    assert len(one.half.plan(Scheduled(computed={"a": 40})).openings) == 1


def test_only_tokens_that_are_known_are_saved() -> None:
    one = Stepped()
    request = one.request(14)
    one.opened(request, 0)
    [save] = one.run(request, 16).saves  # two more are computed, whose numbers are still on the GPU
    assert save.stop == 8
    request.output += [5, 6]
    [save] = one.run(request, 17).saves
    assert (save.start, save.tokens) == (8, [9, 10, 11, 12, 13, 14, 5, 6])


@pytest.mark.parametrize("done", [True, False])
def test_blocks_are_held_until_a_save_has_read_them(done: bool) -> None:
    one = Stepped()
    request = one.request(40)
    one.opened(request, 0)
    [save] = one.run(request, 40).saves
    request.num_computed_tokens = 40
    held = [block.block_id for block in request.blocks[:5]]
    one.half.finished(request, [block.block_id for block in request.blocks])
    one.pool.free_blocks(request.blocks[::-1])
    assert list(save.blocks) == held
    assert one.half.pending
    assert not {block.block_id for block in one.pool.get_new_blocks(one.pool.free)} & set(held)
    one.half.report(Report(1, saved={save.number: done}))
    one.half.plan(Scheduled())
    assert {block.block_id for block in one.pool.get_new_blocks(one.pool.free)} == set(held)
    assert not one.half.pending


def test_the_last_sampled_token_has_no_k_and_v() -> None:
    one = Stepped()
    request = one.request(15)
    one.opened(request, 0)
    one.run(request, 15)
    request.output, request.num_computed_tokens = [7], 16  # a step in flight runs the token that was just sampled
    one.half.finished(request, [block.block_id for block in request.blocks])
    assert not one.half.plan(Scheduled()).saves


def test_a_request_whose_load_failed_loads_no_more() -> None:
    one = Stepped()
    request = one.request(40)
    one.opened(request, 32)
    assert one.half.matched(request, 0) == (32, True)
    one.half.allocated(request, [3, 4, 5, 6, 7], 32)
    [load] = one.half.plan(Scheduled()).loads
    assert list(load.blocks) == [3, 4, 5, 6]
    one.half.report(Report(1, loaded={"a"}, unloaded={5}))
    assert one.half.matched(request, 16) == (0, False)


def test_a_request_that_ends_while_it_loads_is_not_saved() -> None:
    one = Stepped()
    request = one.request(40)
    name = one.opened(request, 16)
    assert one.half.matched(request, 0) == (16, True)
    one.half.allocated(request, [3, 4, 5, 6, 7], 16)
    one.half.plan(Scheduled())
    request.num_computed_tokens = 40
    one.half.finished(request, [3, 4, 5, 6, 7])
    plan = one.half.plan(Scheduled())
    assert (plan.saves, plan.endings) == ([], [name])
