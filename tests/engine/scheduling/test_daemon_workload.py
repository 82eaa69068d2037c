# mypy: disable-error-code="assignment"
"""The random workloads of test_workload on a real daemon's pages, with replies lost on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.errors import ExceedsPool, KvCacheDown
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import PageLayout
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import FinishReason, Key, Request, key_of
from tests.engine.fakes import Clock, Harness, Scripted, TokenMemory, alone, make_request
from tests.engine.scheduling.test_workload import AHEAD, prompts
from tests.kvcache.conftest import Running

pytestmark = pytest.mark.usefixtures("patient_calls")

PAGE_SIZE = 4
names = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    one = Running(tmp_path_factory.mktemp("k"))
    yield one
    one.close()


class DaemonHarness(Harness):
    """A harness on a pool of its own in the daemon."""

    def __init__(self, daemon: Running, pages: int, limits: Limits, late: bool, ahead: str | None = None) -> None:
        self.clock = Clock()
        self.remote = GrpcPageSource(
            str(daemon.config.listeners[0]),
            f"pool {next(names)}",
            PageLayout(PAGE_SIZE, layers=1, kv_heads=1, head_dim=1, dtype="f32"),
            pool_pages=pages,
            ttl_s=600,
        )
        self.remote.reopen()
        self.memory = TokenMemory(pages, PAGE_SIZE)
        self.memory.ahead = ahead
        self.memory.unfollowed = lambda step: len(self.memory.steps) % 7 in (2, 3, 5)
        self.source = Scripted(self.remote, self.memory, late=late)
        self.tokens, self.text, self.ended, self.events, self.serving = {}, {}, {}, [], []
        self.fruitless = 0
        launch = self.memory.launch if ahead else None
        self.loop = EngineLoop(self.memory, self.source, limits, self._on_events, launch=launch, clock=self.clock)

    @property
    def shared(self) -> bool:
        """The pool is its own."""
        return False

    def check(self) -> None:
        """The daemon checks itself, at the end."""


requests = st.tuples(
    prompts, st.integers(1, 14), st.integers(0, 1), st.sampled_from(["", "", "s"]), st.sampled_from([1, 1, 2, 4])
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workload=st.lists(st.one_of(requests, requests, st.integers(0, 20), st.booleans()), min_size=10, max_size=40),
    pages=st.integers(5, 22),
    max_batch=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    late=st.booleans(),
    ahead=st.sampled_from(AHEAD),
)
def test_every_output_is_the_output_alone(
    daemon: Running,
    workload: list[Any],
    pages: int,
    max_batch: int,
    max_step_tokens: int,
    late: bool,
    ahead: str | None,
) -> None:
    harness = DaemonHarness(daemon, pages, Limits(max_batch, max_step_tokens, 100), late, ahead)
    asked: dict[Key, Request] = {}
    submitted = 0
    for operation in workload:
        match operation:
            case (prompt, max_tokens, seed, salt, n):
                name = f"r{submitted}"
                submitted += 1
                request = make_request(name, prompt, max_tokens=max_tokens, seed=seed, salt=salt, n=n)
                asked.update((key_of(name, one.sample), one) for one in (request, *request.others))
                harness.submit(request)
            case bool(served):
                harness.source.faults.append((KvCacheDown("lost"), served))
            case int(nth):
                harness.loop.cancel(f"r{nth}")
                harness.iterate(nth % 5)
    harness.until_idle()
    refused = {name for name, one in harness.ended.items() if isinstance(one.error, ExceedsPool)}
    assert set(harness.ended) == {
        name for name, one in asked.items() if one.request_id not in refused or not one.sample
    }
    for name in harness.ended:
        outcome, expected = harness.ended[name], alone(asked[name])
        if not isinstance(outcome.error, ExceedsPool):
            assert outcome.error is None
            got = harness.tokens[name]
            assert got == (expected[: len(got)] if outcome.reason is FinishReason.CANCELLED else expected)
    [pool] = [
        pool for pool in daemon.stub.GetStats(pb.GetStatsRequest()).pools if pool.pool_id == harness.remote.pool_id
    ]
    assert (pool.active_sequences, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)
    assert pool.free_pages + pool.cached_pages == pages
    assert not daemon.stub.Fsck(pb.FsckRequest()).violations
    harness.remote.close()


def test_the_workload_ends_where_it_began(daemon: Running, tmp_path: Path) -> None:
    harness = DaemonHarness(daemon, 16, Limits(4, 32, 8), late=True)
    for at in range(200):
        harness.submit(make_request(f"r{at}", [1, 2, 3], max_tokens=2))
        harness.until_idle()
    assert harness.loop.totals.page_calls <= 3 * 200
    harness.remote.close()
