"""One step computes and another is launched after it: what ends then, and a daemon killed then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests.e2e.conftest import MODEL
from tests.gated import gated, until_live
from tests.generation import collect, request
from tests.polling import until
from tests.processes import Service, kvcache

ON = ("--async-steps", "on")
#: More than a step is waited for that brings a first token; see `services.engine.scheduling.loop.FEW`.
REQUESTS = 6
TOKENS = 60


def asked(at: int, salt: str = "") -> engine_pb2.GenerateRequest:
    return request(f"Act {at}. " * (at + 1), TOKENS, sampling={"temperature": 0.9, "seed": at}, cache_salt=salt)


def stub_of(service: Service) -> Any:
    return engine_pb2_grpc.EngineServiceStub(service.channel)


def pool_of(daemon: Service) -> pb.PoolStats:
    cache = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not cache.Fsck(pb.FsckRequest()).violations
    [pool] = cache.GetStats(pb.GetStatsRequest()).pools
    return pool


def until_recovered(stub: Any) -> None:
    """Wait for the one session that was opened again: requests that have all their tokens end before it is."""
    assert until(lambda: stub.GetStats(engine_pb2.GetStatsRequest()).recoveries, "no session was opened again") == 1


def test_a_daemon_killed_with_two_steps_in_flight_changes_no_token(short_path: Path) -> None:
    with kvcache(short_path) as first, gated(short_path, first.address, *ON, model=MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        expected = [collect(stub.Generate(asked(at, "alone")))[1] for at in range(REQUESTS)]
        steps.hold()
        streams = [stub.Generate(asked(at)) for at in range(REQUESTS)]
        until_live(one, REQUESTS)
        steps.let(20)
        begun = [list(next(stream).token_ids) for stream in streams]
        steps.until_held(behind=1)
        first.kill()
        steps.close()
        with kvcache(short_path) as second:
            assert [head + collect(stream)[1] for head, stream in zip(begun, streams, strict=True)] == expected
            until_recovered(stub)
            pool = pool_of(second)
            assert (pool.active_sequences, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)


def test_requests_that_end_with_two_steps_in_flight_give_their_pages_back_and_hurt_nobody(short_path: Path) -> None:
    with kvcache(short_path) as daemon, gated(short_path, daemon.address, *ON, model=MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        expected = [collect(stub.Generate(asked(at, "alone")))[1] for at in range(REQUESTS)]
        steps.hold()
        streams = [stub.Generate(asked(at), timeout=20 if at == 1 else None) for at in range(REQUESTS)]
        until_live(one, REQUESTS)
        steps.let(20)
        begun = [list(next(stream).token_ids) for stream in streams]
        steps.until_held(behind=1)
        streams[0].cancel()
        with pytest.raises(grpc.RpcError) as late:
            begun[1] += [token for response in streams[1] for token in response.token_ids]
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < len(begun[1]) < TOKENS and begun[1] == expected[1][: len(begun[1])]
        steps.let()
        assert [begun[at] + collect(streams[at])[1] for at in range(2, REQUESTS)] == expected[2:]
        until(lambda: not stub.GetStats(engine_pb2.GetStatsRequest()).running_requests)
        pool = pool_of(daemon)
        assert (pool.active_sequences, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)
        stats = stub.GetStats(engine_pb2.GetStatsRequest())
        # The client of an overdue request hangs up: that is seen first, or the deadline is.
        assert (stats.cancelled_requests + stats.failed_requests, stats.recoveries) == (2, 0)
