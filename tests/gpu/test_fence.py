"""An engine on GPU pages that is stopped in the middle of a step for longer than its lease and the drain."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests import polling
from tests.generation import collect, request
from tests.gpu.conftest import World
from tests.gpus import host
from tests.processes import Service

pytestmark = pytest.mark.timeout(600)

#: Each prompt takes more than half of them, with what is generated behind it. Pages of 16 tokens.
PAGES = 12
FIRST = list(range(100, 100 + 6 * 16 + 5))
SECOND = list(range(600, 600 + 6 * 16 + 9))
LONGER = SECOND + SECOND[:32]
TOKENS = 16
POOL = ("--memory", "32MiB", "--pool-pages", str(PAGES))
#: Hardly a drain: the stop outlasts it.
SHORT = (*POOL, "--session-ttl", "4", "--drain", "0.1")
ENGINE = ("--dtype", "f32")


def stub_of(service: Service) -> Any:
    return engine_pb2_grpc.EngineServiceStub(service.channel)


def cache_of(daemon: Service) -> Any:
    return kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)


def look(daemon: Service) -> pb.GetStatsResponse:
    stats: pb.GetStatsResponse = cache_of(daemon).GetStats(pb.GetStatsRequest())
    return stats


def until(daemon: Service, holds: Callable[[pb.GetStatsResponse], bool]) -> pb.GetStatsResponse:
    [found] = polling.until(lambda: list(filter(holds, [look(daemon)])))
    return found


def is_fenced(stats: pb.GetStatsResponse) -> bool:
    return any(lost.fence == pb.FENCE_ALIVE for lost in stats.lost_sessions)


def until_recovered(service: Service) -> None:
    """Wait until it has opened a new session."""
    polling.until(lambda: stub_of(service).GetStats(engine_pb2.GetStatsRequest()).recoveries)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What FIRST, SECOND and LONGER generate when nothing happens: on a daemon that has ended by then."""
    with World(tmp_path_factory.mktemp("alone"), host(1)) as one:
        daemon = one.daemon(*POOL)
        service = one.serving(daemon, "alone", *ENGINE)
        asked = [request(prompt, TOKENS, cache_salt=str(at)) for at, prompt in enumerate((FIRST, SECOND, LONGER))]
        tokens = [collect(stub_of(service).Generate(one))[1] for one in asked]
        assert service.stop() == 0 and daemon.stop() == 0
    return tokens


def test_what_it_writes_when_it_goes_on_hurts_nobody_and_its_word_frees_its_pages(
    one: World, undisturbed: list[list[int]]
) -> None:
    expected = undisturbed[:2]
    daemon = one.daemon(*SHORT)
    stopped, steps = one.gated(daemon, "a", *ENGINE)
    other, others = one.gated(daemon, "b", *ENGINE)
    first = stub_of(stopped).Generate(request(FIRST, TOKENS))
    steps.until_held()  # it is about to write its whole prompt
    stopped.process.send_signal(signal.SIGSTOP)
    others.let()
    second = stub_of(other).Generate(request(SECOND, TOKENS))
    fenced = until(daemon, is_fenced)
    [lost] = fenced.lost_sessions
    assert lost.pid == stopped.pid and PAGES // 2 < lost.quarantined_pages == fenced.pools[0].quarantined_pages
    stopped.process.send_signal(signal.SIGCONT)
    steps.let(1)  # the step in which it was stopped
    until_recovered(stopped)
    assert not until(daemon, lambda stats: not stats.lost_sessions).pools[0].quarantined_pages
    steps.let()
    assert [collect(first)[1], collect(second)[1]] == expected
    assert [event["why"] for event in daemon.events("engine_fence_over")] == ["vouched"]
    assert not cache_of(daemon).Fsck(pb.FsckRequest()).violations


def test_what_it_reads_of_others_when_it_goes_on_is_not_said(one: World, undisturbed: list[list[int]]) -> None:
    """Its complete pages stay in the cache, and are evicted for others while it is stopped."""
    expected = [undisturbed[0], undisturbed[2]]
    daemon = one.daemon(*SHORT)
    stopped, steps = one.gated(daemon, "a", *ENGINE)
    other, others = one.gated(daemon, "b", *ENGINE)
    first = stub_of(stopped).Generate(request(FIRST, TOKENS))
    steps.let(5)
    steps.until_held()
    stopped.process.send_signal(signal.SIGSTOP)
    until(daemon, is_fenced)
    second = stub_of(other).Generate(request(LONGER, TOKENS))
    others.let(10)
    others.until_held()  # it has pages that the first reads, and has written them
    assert until(daemon, lambda stats: bool(stats.pools)).pools[0].evicted_pages
    stopped.process.send_signal(signal.SIGCONT)
    steps.let(1)
    until_recovered(stopped)
    for gate in (others, steps):
        gate.let()
    assert [collect(first)[1], collect(second)[1]] == expected


def test_what_stays_silent_is_killed_and_its_pages_are_anothers(one: World, undisturbed: list[list[int]]) -> None:
    expected = undisturbed[1]
    daemon = one.daemon(*SHORT, "--fence", "kill")
    stopped, steps = one.gated(daemon, "a", *ENGINE)
    other = one.serving(daemon, "b", *ENGINE)
    running = stub_of(stopped).Generate(request(FIRST, TOKENS))
    steps.until_held()
    stopped.process.send_signal(signal.SIGSTOP)
    second = stub_of(other).Generate(request(SECOND, TOKENS))
    assert stopped.process.wait(60) == -signal.SIGKILL
    assert collect(second)[1] == expected
    stats = until(daemon, lambda stats: not stats.lost_sessions)
    assert (stats.killed_engines, stats.pools[0].quarantined_pages) == (1, 0)
    running.cancel()
