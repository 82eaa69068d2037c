"""Two engines with client-side balancing: an upgrade loses no stream, and an outage is reported in time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common.edge.health import LIVENESS, NOT_SERVING, SERVING
from services.engine.config import BUNDLED_MODEL
from tests.generation import collect, request
from tests.loopback import own_host
from tests.processes import ROOT, Service, engine, kvcache

TOKENS = 60
CLIENTS = 3
#: As a headless Service has them used: every engine's address, and those that are ready.
BALANCING = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": "rocmforge.engine.v1.EngineService"},
    }
)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


PORT = 50051


class Crowd:
    """Clients that stream one generation after the other until they are stopped; ``failures`` has what went wrong."""

    def __init__(self, hosts: list[str]) -> None:
        self.failures: list[str] = []
        self.finished = 0
        self._stop = threading.Event()
        self._ended = threading.Condition()
        address = "ipv4:" + ",".join(f"{host}:{PORT}" for host in hosts)
        options = [
            ("grpc.service_config", BALANCING),
            ("grpc.enable_retries", 0),  # what a retry would hide
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        self._channel = grpc.insecure_channel(address, options=options)
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, at: int) -> None:
        stub, count = engine_pb2_grpc.EngineServiceStub(self._channel), 0
        while not self._stop.is_set():
            count += 1
            one = request(f"Speech {at} {count}:", max_tokens=TOKENS, sampling={"temperature": 0.9, "seed": at})
            try:
                tokens = collect(stub.Generate(one, wait_for_ready=True, timeout=120))[1]
                if len(tokens) != TOKENS:
                    self.failures.append(f"{len(tokens)} tokens")
            except (grpc.RpcError, AssertionError) as error:
                self.failures.append(str(error))
            with self._ended:
                self.finished += 1
                self._ended.notify_all()

    def until_finished(self, more: int) -> None:
        """Wait until so many further generations have ended."""
        with self._ended:
            wanted = self.finished + more
            assert self._ended.wait_for(lambda: self.finished >= wanted, 120), f"{self.finished} of {wanted} ended"

    def until_served(self, service: Service) -> None:
        """Wait until an engine has served some of it."""
        stub, deadline = engine_pb2_grpc.EngineServiceStub(service.channel), time.monotonic() + 120
        while not stub.GetStats(pb.GetStatsRequest()).finished_requests:
            assert time.monotonic() < deadline and not self.failures, self.failures
            self.until_finished(1)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        self._channel.close()


def rolled(service: Service) -> None:
    """What a preStop hook and the end of a pod do."""
    command = [sys.executable, "-m", "services.engine", "drain", "--target", service.address, "--wait", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "draining, 0 requests live\n"), done.stderr
    assert service.stop() == 0
    assert not service.events("grace_over")


@pytest.mark.parametrize("hook", [True, False], ids=["preStop", "SIGTERM alone"])
def test_a_rolling_restart_loses_no_stream(directory: Path, hook: bool) -> None:
    hosts = [own_host(), own_host()]
    with kvcache(directory) as daemon, contextlib.ExitStack() as stack:

        def start(at: int, name: str) -> Service:
            listen = ["--listen", f"{hosts[at]}:{PORT}", "--lame-duck", "2", "--grace", "100"]
            return stack.enter_context(engine(directory, daemon.address, *listen, model=BUNDLED_MODEL, name=name))

        engines = [start(at, f"old{at}") for at in range(2)]
        crowd = Crowd(hosts)
        try:
            for at, old in enumerate(engines):
                crowd.until_served(old)
                if hook:
                    rolled(old)
                else:
                    assert old.stop() == 0 and not old.events("grace_over")
                new = start(at, f"new{at}")
                crowd.until_served(new)
        finally:
            crowd.stop()
        assert crowd.failures == []
        assert crowd.finished > 10


def status(service: Service, name: str) -> Any:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status


def test_an_outage_of_the_daemon_is_told_while_requests_wait(directory: Path) -> None:
    patience = ["--unready-after", "1", "--kvcache-patience", "600"]
    with kvcache(directory) as first, engine(directory, first.address, *patience, model=BUNDLED_MODEL) as one:
        stub = engine_pb2_grpc.EngineServiceStub(one.channel)
        watch = health_pb2_grpc.HealthStub(one.channel).Watch(health_pb2.HealthCheckRequest(), timeout=120)
        assert next(watch).status == SERVING
        first.kill()  # and the engine is idle
        assert next(watch).status == NOT_SERVING
        stream = stub.Generate(request(max_tokens=8), timeout=120)
        assert status(one, LIVENESS) == SERVING
        with kvcache(directory):
            assert len(collect(stream)[1]) == 8
            assert next(watch).status == SERVING
        assert stub.GetStats(pb.GetStatsRequest()).failed_requests == 0
