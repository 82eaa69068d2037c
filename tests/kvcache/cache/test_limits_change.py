"""Limits that change while a daemon runs: what there is stays, and is refused more."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from services.common.errors import ExceedsBudget, HostMemoryExceeded, InvalidConfiguration
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening, Prompt
from tests.kvcache.fakes import World


def test_a_fence_counts_for_those_that_are_lost_already() -> None:
    world = World(8, drain_s=3600.0)
    session = world.attached(pid=5)
    world.now += session.ttl_s
    assert world.cache.sweep() == [session]
    world.now += 10
    world.cache.sweep()
    assert not world.processes.killed
    world.cache.take_up(replace(world.cache.limits, drain_s=5.0, fence="kill"))
    world.cache.sweep()
    assert world.processes.killed == [5]


def test_a_lower_budget_takes_nothing_back_and_gives_nothing_more() -> None:
    page = World(1).layout.page_bytes
    world = World(1, budget_bytes=100 * page + 3 * 256 * 64)
    world.attached("first", pool_pages=60)
    world.cache.take_up(replace(world.cache.limits, budget_bytes=50 * page))
    world.sound()
    with pytest.raises(ExceedsBudget):
        world.attached("second", pool_pages=1)
    world.cache.take_up(replace(world.cache.limits, budget_bytes=200 * page + 3 * 256 * 64))
    world.attached("second", pool_pages=60)
    world.sound()


def test_less_host_memory_than_is_charged_refuses_more_and_ends_nothing() -> None:
    world = World(64)
    session = world.attached()
    opening = Opening("a", Prompt(array("I", range(9))), 8)
    assert isinstance(world.cache.calls.allocate(session.id, [opening], [])[0][0][1], Grant)
    limits = world.cache.limits
    world.cache.take_up(replace(limits, host_memory=world.cache.memory.used - 1))
    world.sound()
    [(_, refused)], _ = world.cache.calls.allocate(session.id, [Opening("b", Prompt(array("I", [1])), 1)], [])
    assert isinstance(refused, HostMemoryExceeded)
    assert world.cache.calls.remove(session.id, ["a"])[0] == [True]
    [(_, granted)], _ = world.cache.calls.allocate(session.id, [Opening("b", Prompt(array("I", [1])), 1)], [])
    assert isinstance(granted, Grant)
    with pytest.raises(InvalidConfiguration, match="--host-memory is 1 bytes"):
        world.cache.check_limits(replace(limits, host_memory=1))
    world.sound()
