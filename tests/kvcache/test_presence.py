"""The daemon's own absence: time in which it did not run counts against nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common.call_stats import CallStats
from services.kvcache.presence import AWAY_S, HELD_S, PULSE_S, LoopWatch, PresentClock
from tests.kvcache.clients.messages import opening, report
from tests.kvcache.conftest import Running, attached
from tests.polling import until
from tests.processes import Service, kvcache


class Hands:
    """A clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_stands_still_while_nobody_looks() -> None:
    hands = Hands()
    clock = PresentClock(hands)
    for _ in range(100):
        hands.now += AWAY_S
        clock()
    assert clock() == pytest.approx(100.0 + 100 * AWAY_S)
    hands.now += 3600.0
    assert clock() == pytest.approx(100.0 + 100 * AWAY_S), "the first look after an absence finds it"
    hands.now += PULSE_S
    assert clock() == pytest.approx(100.0 + 100 * AWAY_S + PULSE_S) and clock.away_s == 3600.0


def test_whoever_held_the_loop_is_named() -> None:
    calls = CallStats()
    watch = LoopWatch(Hands(), calls)
    with capture_logs() as logs:
        watch.late(-PULSE_S)
        watch.late(HELD_S)
        assert logs == []
        calls.done("Quick", "OK", 0.001)
        calls.done("Slow", "OK", 0.3)
        calls.done("Quick", "OK", 0.001)
        watch.late(0.3001)
    told = {"event": "loop_held", "log_level": "warning", "seconds": 0.3, "method": "Slow", "call_seconds": 0.3}
    assert logs == [told]
    assert (watch.held.count, watch.longest_s) == (3, 0.3001)
    assert dict(watch.held.cumulative())[HELD_S] == 2


def test_a_call_that_holds_the_loop_is_measured(tmp_path: Path) -> None:
    running = Running(tmp_path)
    with contextlib.closing(running):

        async def hold() -> None:
            threading.Event().wait(0.4)

        running.call(hold)
        until(lambda: running.daemon.watch.longest_s >= 0.3)


def stopped(daemon: Service, stub: kvcache_pb2_grpc.KvCacheServiceStub, seconds: float) -> None:
    """Stop the daemon for so long, and continue it."""
    os.kill(daemon.pid, signal.SIGSTOP)
    with pytest.raises(grpc.RpcError) as failure:
        stub.GetStats(pb.GetStatsRequest(), timeout=seconds)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    os.kill(daemon.pid, signal.SIGCONT)


def test_a_daemon_that_was_stopped_expires_nobody_for_it(tmp_path: Path) -> None:
    flags = ("--session-ttl", "5", "--drain", "0", "--cache-ttl", "6", "--sequence-ttl", "6")
    with kvcache(tmp_path, *flags) as daemon:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
        session = attached(stub)
        demands = [opening("kept", range(8), 2), opening("gone", range(50, 58), 2)]
        stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=demands))
        for name, first in (("kept", 0), ("gone", 50)):
            steps = report(name, 0, range(first, first + 8))
            stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
        stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=session, sequence_ids=["gone"]))

        stopped(daemon, stub, 8.0)

        # Nobody has called meanwhile, or could have.
        renewed = stub.RenewSession(pb.RenewSessionRequest(session_id=session))
        assert renewed.ttl.seconds == 5
        stats = stub.GetStats(pb.GetStatsRequest())
        assert (stats.expired_sessions, stats.expired_sequences) == (0, 0)
        assert (stats.pools[0].held_pages, stats.pools[0].cached_pages, stats.pools[0].expired_pages) == (2, 2, 0)
        answer = stub.GetSequence(pb.GetSequenceRequest(session_id=session, sequence_id="kept"))
        assert answer.sequence.idle.seconds < 6
        # Its own silence still ends a session.
        until(lambda: stub.GetStats(pb.GetStatsRequest()).expired_sessions)
        assert stub.GetStats(pb.GetStatsRequest()).pools[0].sessions == 0
