"""An engine that is stopped in the middle of a step for longer than its lease and the drain, and then continued."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests import polling
from tests.e2e.conftest import MODEL
from tests.gated import Steps, gated
from tests.generation import collect, request
from tests.kvcache.conftest import LAYOUT_PB
from tests.processes import Service, engine, kvcache

#: Each prompt takes more than half of them, with what is generated behind it. Pages of 16 tokens.
PAGES = 24
FIRST = list(range(100, 100 + 13 * 16 + 5))
SECOND = list(range(600, 600 + 13 * 16 + 9))
TOKENS = 24
POOL = ("--session-ttl", "2", "--pool-pages", str(PAGES))
#: Hardly a drain: the stop outlasts it.
SHORT = (*POOL, "--drain", "0.1")
#: How many steps are in flight behind the one in which the engine is stopped. A step that brings the first token of a
#: lone request has none behind it, so a prompt takes two.
BEHIND = {"off": 0, "on": 1}
MODES = pytest.mark.parametrize("mode", BEHIND)


def flags_of(mode: str) -> tuple[str, ...]:
    return ("--async-steps", mode, "--max-batch", "8", "--max-step-tokens", "128")


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


def finish_launched(steps: Steps, mode: str) -> None:
    """Compute the step that waits, and those after it."""
    for _ in range(1 + BEHIND[mode]):
        steps.until_held()
        steps.let(1)


def scored(prompt: list[int]) -> engine_pb2.GenerateRequest:
    """A request for log probabilities, too: they change with whatever is read, even where no token does."""
    return request(prompt, TOKENS, sampling={"logprobs": 0})


def scores(stream: Any) -> list[tuple[int, float]]:
    """The tokens of a whole stream, and their log probabilities."""
    told = [one for response in stream for one in zip(response.token_ids, response.logprobs, strict=True)]
    return [(token, one.logprob) for token, one in told]


def alone(directory: Path, *prompts: list[int]) -> list[list[int]]:
    """What the prompts generate when nothing happens."""
    return [[token for token, _ in one] for one in scored_alone(directory, *prompts)]


def scored_alone(directory: Path, *prompts: list[int]) -> list[list[Any]]:
    """The same with log probabilities, up to rounding."""
    with kvcache(directory, name="k0") as daemon, engine(directory, daemon.address, model=MODEL, name="e0") as one:
        found = [scores(stub_of(one).Generate(scored(prompt))) for prompt in prompts]
    return [[(token, pytest.approx(logprob, abs=1e-3)) for token, logprob in told] for told in found]


@MODES
def test_what_it_writes_when_it_goes_on_hurts_nobody_and_its_word_frees_its_pages(short_path: Path, mode: str) -> None:
    expected = alone(short_path, FIRST, SECOND)
    with (
        kvcache(short_path, *SHORT) as daemon,
        gated(short_path, daemon.address, *flags_of(mode), model=MODEL, name="a") as (one, steps),
        gated(short_path, daemon.address, model=MODEL, name="b") as (other, others),
    ):
        first = stub_of(one).Generate(request(FIRST, TOKENS))
        steps.until_held(BEHIND[mode])  # it is about to write its prompt
        one.process.send_signal(signal.SIGSTOP)
        others.let(10)
        second = stub_of(other).Generate(request(SECOND, TOKENS))
        fenced = until(daemon, is_fenced)
        [lost] = fenced.lost_sessions
        assert (lost.pid, lost.quarantined_pages) == (one.pid, fenced.pools[0].quarantined_pages)
        assert lost.quarantined_pages > PAGES // 2, "what is left is too little for the other: it waits"
        [told] = daemon.events("engine_fenced")
        assert (told["pid"], told["pages"], told["session"]) == (one.pid, lost.quarantined_pages, lost.session_handle)
        with pytest.raises(grpc.RpcError, match=f"its process {one.pid} is alive"):
            cache_of(daemon).ReleaseQuarantine(pb.ReleaseQuarantineRequest(session_handle=lost.session_handle))

        one.process.send_signal(signal.SIGCONT)
        finish_launched(steps, mode)
        until_recovered(one)
        assert not until(daemon, lambda stats: not stats.lost_sessions).pools[0].quarantined_pages
        for gate in (others, steps):
            gate.let()
        assert [collect(first)[1], collect(second)[1]] == expected
        assert [event["why"] for event in daemon.events("engine_fence_over")] == ["vouched"]
        assert not cache_of(daemon).Fsck(pb.FsckRequest()).violations


@MODES
def test_what_it_reads_of_others_when_it_goes_on_is_not_said(short_path: Path, mode: str) -> None:
    """Its complete pages stay in the cache, and are evicted for others while it is stopped."""
    longer = SECOND + SECOND[:64]
    expected = scored_alone(short_path, FIRST, longer)
    with (
        kvcache(short_path, *SHORT) as daemon,
        gated(short_path, daemon.address, *flags_of(mode), model=MODEL, name="a") as (one, steps),
        gated(short_path, daemon.address, model=MODEL, name="b") as (other, others),
    ):
        first = stub_of(one).Generate(scored(FIRST))
        steps.let(5)
        steps.until_held(BEHIND[mode])
        one.process.send_signal(signal.SIGSTOP)
        until(daemon, is_fenced)
        second = stub_of(other).Generate(scored(longer))
        others.let(10)
        others.until_held()
        assert look(daemon).pools[0].evicted_pages, "of what the first reads"
        one.process.send_signal(signal.SIGCONT)
        finish_launched(steps, mode)
        until_recovered(one)
        for gate in (others, steps):
            gate.let()
        assert [scores(first), scores(second)] == expected


@MODES
def test_what_stays_silent_is_killed_where_that_is_allowed(short_path: Path, mode: str) -> None:
    [expected] = alone(short_path, SECOND)
    with (
        kvcache(short_path, *SHORT, "--fence", "kill") as daemon,
        gated(short_path, daemon.address, *flags_of(mode), model=MODEL, name="a") as (one, steps),
        engine(short_path, daemon.address, model=MODEL, name="b") as other,
    ):
        running = stub_of(one).Generate(request(FIRST, TOKENS))
        steps.until_held(BEHIND[mode])
        one.process.send_signal(signal.SIGSTOP)
        second = stub_of(other).Generate(request(SECOND, TOKENS))
        assert one.process.wait(60) == -signal.SIGKILL
        assert collect(second)[1] == expected
        stats = until(daemon, lambda stats: not stats.lost_sessions)
        assert (stats.killed_engines, stats.pools[0].quarantined_pages) == (1, 0)
        [told] = daemon.events("engine_killed")
        assert told["pid"] == one.pid and daemon.process.poll() is None and other.process.poll() is None
        running.cancel()


@MODES
def test_one_that_ends_while_it_is_fenced_gives_its_pages_back(short_path: Path, mode: str) -> None:
    with (
        kvcache(short_path, *SHORT) as daemon,
        gated(short_path, daemon.address, *flags_of(mode), model=MODEL, name="a") as (one, steps),
    ):
        running = stub_of(one).Generate(request(FIRST, TOKENS))
        steps.until_held(BEHIND[mode])
        one.process.send_signal(signal.SIGSTOP)
        until(daemon, is_fenced)
        one.kill()
        stats = until(daemon, lambda stats: not stats.lost_sessions)
        assert stats.pools[0].free_pages == PAGES
        assert [event["why"] for event in daemon.events("engine_fence_over")] == ["gone"]
        running.cancel()


def test_a_client_that_names_no_process_and_disappears_is_told_of_and_can_be_released(short_path: Path) -> None:
    flags = ("--session-ttl", "1", "--drain", "0", "--listen", "127.0.0.1:0", "--allow", "engine=anyone")
    with kvcache(short_path, *flags) as daemon:
        with grpc.insecure_channel(daemon.tcp()) as channel:
            client = kvcache_pb2_grpc.KvCacheServiceStub(channel)
            opened = client.OpenSession(
                pb.OpenSessionRequest(client_name="stranger", pool_id="p", layout=LAYOUT_PB, pool_pages=8)
            )
            with Path(opened.arena.file_path).open("r+b") as arena:
                arena.seek(opened.arena.canary_offset)
                canary = arena.read(32)
                arena.write(bytes(byte ^ 0xFF for byte in canary))
            client.AttachSession(pb.AttachSessionRequest(session_id=opened.session_id, seen=canary))
            opening = pb.SequenceOpening(sequence_id="a", prompt=pb.Prompt(tokens=range(6)), total_pages=3)
            client.AllocatePages(
                pb.AllocatePagesRequest(session_id=opened.session_id, demands=[pb.Demand(opening=opening)])
            )
        [lost] = until(
            daemon, lambda stats: any(lost.fence == pb.FENCE_UNSEEN for lost in stats.lost_sessions)
        ).lost_sessions
        assert (lost.client_name, lost.quarantined_pages, lost.HasField("pid")) == ("stranger", 3, False)
        assert lost.session_handle == opened.session_handle
        [told] = daemon.events("engine_fenced")
        assert (told["client"], told["pages"], told["pid"]) == ("stranger", 3, None)
        released = cache_of(daemon).ReleaseQuarantine(pb.ReleaseQuarantineRequest(session_handle=lost.session_handle))
        assert released.released_pages == 3
        stats = look(daemon)
        assert stats.pools[0].free_pages == 8 and not stats.lost_sessions


def test_the_daemon_is_not_its_own_engine(short_path: Path) -> None:
    """Whatever process a caller names."""
    with kvcache(short_path, "--session-ttl", "1", "--drain", "0", "--fence", "kill") as daemon:
        start = int(Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = pb.ProcessIdentity(
            pid=daemon.pid, start_time=start, pid_namespace=os.readlink(f"/proc/{daemon.pid}/ns/pid")
        )
        opened = cache_of(daemon).OpenSession(
            pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB, pool_pages=8, process=process)
        )
        with Path(opened.arena.file_path).open("r+b") as arena:
            arena.seek(opened.arena.canary_offset)
            canary = arena.read(32)
            arena.write(bytes(byte ^ 0xFF for byte in canary))
        cache_of(daemon).AttachSession(pb.AttachSessionRequest(session_id=opened.session_id, seen=canary))
        stats = until(daemon, is_fenced)
        assert stats.killed_engines == 0 and daemon.process.poll() is None
