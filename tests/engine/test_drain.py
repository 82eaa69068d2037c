"""SIGTERM to a real engine: running requests have the grace period, all others end at once."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.common import rpc
from services.common.errors import ServiceError
from services.engine.config import BUNDLED_MODEL
from tests.engine.running import refused
from tests.gated import Steps, gated, until_live
from tests.generation import collect, request
from tests.polling import until
from tests.processes import Service, engine, kvcache


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


def stub_of(service: Service) -> Any:
    return engine_pb2_grpc.EngineServiceStub(service.channel)


def submission(name: str, max_tokens: int) -> pb.SubmitGenerationRequest:
    return pb.SubmitGenerationRequest(request=request(max_tokens=max_tokens, request_id=name))


def watch(service: Service, name: str) -> Any:
    return stub_of(service).WatchGeneration(pb.WatchGenerationRequest(request_id=name))


def submit(service: Service, steps: Steps, name: str, max_tokens: int, live: int) -> Any:
    """Submit to an engine that stands in a step, and begin to watch; ``live`` are then known to it."""
    accepted = stub_of(service).SubmitGeneration.future(submission(name, max_tokens))
    until_live(service, live)
    steps.let(1)  # behind it this one is looked at
    accepted.result(60)
    return watch(service, name)


def terminate(service: Service) -> None:
    """Send SIGTERM, and wait until the engine is draining."""
    statuses = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
    assert next(statuses).status == health_pb2.HealthCheckResponse.SERVING
    service.process.send_signal(signal.SIGTERM)
    assert next(statuses).status == health_pb2.HealthCheckResponse.NOT_SERVING
    statuses.cancel()


def last_error(watch: Any) -> ServiceError:
    *_, last = watch
    assert last.WhichOneof("result") == "error"
    return rpc.error_from_status(last.error)


def assert_given_back(daemon: Service) -> None:
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not stub.Fsck(kvcache_pb2.FsckRequest()).violations
    [pool] = stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
    assert (pool.sessions, pool.held_pages, pool.quarantined_pages, pool.active_sequences) == (0, 0, 0, 0)


def test_those_that_run_end_and_those_that_wait_are_told(directory: Path) -> None:
    limits = ["--max-batch", "2", "--grace", "100"]
    with kvcache(directory) as daemon, gated(directory, daemon.address, *limits, model=BUNDLED_MODEL) as (one, steps):
        stub = stub_of(one)
        attached = stub.Generate(request(max_tokens=600))
        until_live(one, 1)
        submitted = submit(one, steps, "runs", 600, live=2)
        steps.let(3)  # in the last of which it is, too
        next(attached)
        next(submitted)
        waiting = stub.Generate(request(max_tokens=5))
        batch = stub.BatchGenerate(pb.BatchGenerateRequest(requests=[request(max_tokens=5)] * 2))
        queued = submit(one, steps, "waits", 5, live=6)
        terminate(one)
        steps.let(100)  # those that run do, and are not done
        for error in (
            refused(lambda: waiting),
            *(rpc.error_from_status(item.error) for item in batch),
            last_error(queued),
            refused(lambda: stub.Generate(request())),
        ):
            assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING") and error.retry_after_s
        assert stub.GetStats(pb.GetStatsRequest()).draining
        steps.close()
        *_, last = submitted
        assert last.response.finish.usage.completion_tokens == 600
        assert collect(attached)[2].usage.completion_tokens == 600
        assert one.process.wait(60) == 0
        assert_given_back(daemon)
        assert "Traceback" not in one.log()


def test_what_outlasts_the_grace_ends_with_a_reason(directory: Path) -> None:
    limits = ["--max-batch", "8", "--grace", "0.2"]
    with kvcache(directory) as daemon, gated(directory, daemon.address, *limits, model=BUNDLED_MODEL) as (one, steps):
        stub = stub_of(one)
        attached = [stub.Generate(request([at + 1] * 400, max_tokens=600)) for at in range(6)]
        until_live(one, 6)
        steps.let(20)
        for stream in attached:
            next(stream)
        submitted = submit(one, steps, "long", 900, live=7)
        steps.let(20)
        next(submitted)
        one.process.send_signal(signal.SIGTERM)
        until(lambda: one.events("grace_over"), one.log)
        steps.close()
        errors = [*(refused(lambda stream=stream: stream) for stream in attached), last_error(submitted)]  # type: ignore[misc]
        for error in errors:
            assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
            assert "its grace of 0.2 s is over" in error.message and error.retry_after_s
        assert one.process.wait(60) == 0
        assert_given_back(daemon)
        assert [event["live"] for event in one.events("grace_over")] == [7]
        assert "Traceback" not in one.log()


def test_with_nothing_to_do_it_ends_at_once_and_a_watcher_with_it(directory: Path) -> None:
    with engine(directory, "local", "--grace", "600", model=BUNDLED_MODEL) as one:
        stub_of(one).SubmitGeneration(submission("done", 3))
        *_, last = watch(one, "done")
        assert last.response.finish.usage.completion_tokens == 3
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(60) == 0
        with pytest.raises(grpc.RpcError) as caught:
            stub_of(one).GetGeneration(pb.GetGenerationRequest(request_id="done"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
