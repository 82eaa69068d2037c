"""Many idle callers, and slow ones, take no more than their share."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.core import GaugeMetricFamily
from structlog.testing import capture_logs

from services.common import prometheus
from services.common.edge import descriptors
from services.common.edge.listener import Listener
from services.common.prometheus import Endpoint
from tests.kvcache.conftest import Running
from tests.processes import Service

CROWD = 600


def serving(address: str) -> int:
    """What health says at an address, on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        request = health_pb2.HealthCheckRequest()
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True).status)


def idle(stack: contextlib.ExitStack, address: str, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    host, _, port = address.rpartition(":")
    return [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(count)]


@pytest.fixture
def room_for_a_crowd() -> Iterator[None]:
    """The tests' own descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_connections_do_not_lock_the_socket_out(tmp_path: Path, room_for_a_crowd: None) -> None:
    limits = 'ulimit -Sn 200; ulimit -Hn 500; exec "$0" "$@"'
    flags = ["--listen", "127.0.0.1:0", "--arena-dir", str(tmp_path / "arena"), "--memory", "1MiB"]
    launcher = ("/bin/sh", "-c", limits, sys.executable)
    daemon = Service("services.kvcache", tmp_path / "k.sock", flags, tmp_path / "log", launcher=launcher)
    try:
        address = daemon.wait_serving().tcp()
        with contextlib.ExitStack() as stack:
            crowd = idle(stack, address, CROWD)
            # The listener takes them in order: when the last one is closed, all have been looked at.
            assert crowd[-1].recv(1) == b""
            assert serving(daemon.address) == health_pb2.HealthCheckResponse.SERVING
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 400
        assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (500, 500)
        [told] = daemon.events("descriptors_short")
        assert (told["limit"], told["connections"]) == (500, 122)
    finally:
        daemon.close()


def test_who_is_connected_stays_so_and_who_comes_later_is_let_in_when_others_leave(tmp_path: Path) -> None:
    daemon = Running(tmp_path, "--listen", "127.0.0.1:0", "--max-connections", "4")
    address = daemon.daemon.bound[1]
    with grpc.insecure_channel(address) as channel, contextlib.ExitStack() as stack:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        crowd = idle(stack, address, 20)
        assert crowd[-1].recv(1) == b""
        stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        stack.close()
        assert serving(address) == health_pb2.HealthCheckResponse.SERVING
    daemon.close()


@pytest.mark.parametrize(
    ("wanted", "limit", "granted"),
    [
        (1024, 20000, 1024),
        (1024, 2048 + descriptors.RESERVED, 1024),
        (1024, 1024, (1024 - descriptors.RESERVED) // 2),
        (1024, 64, descriptors.LEAST),
        (1024, resource.RLIM_INFINITY, 1024),
    ],
)
def test_callers_share_what_the_service_does_not_need(wanted: int, limit: int, granted: int) -> None:
    with capture_logs() as logs:
        assert descriptors.connections(wanted, limit) == granted
    assert [one["event"] for one in logs] == (["descriptors_short"] if granted < wanted else [])


def test_the_limit_is_raised_only_as_far_as_one_may() -> None:
    changed: list[tuple[int, int]] = []
    assert descriptors.raise_limit(lambda which: (64, 4096), lambda which, to: changed.append(to)) == 4096
    assert descriptors.raise_limit(lambda which: (4096, 4096), lambda which, to: changed.append(to)) == 4096
    assert changed == [(4096, 4096)]


# --- metrics ----------------------------------------------------------------------------------------------------------


class One:
    """A collector of one metric."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("one", "One.", 1)


@pytest.fixture
def metrics() -> Iterator[tuple[str, int]]:
    endpoint = Endpoint(Listener(host="127.0.0.1", port=0), One())
    endpoint.start()
    host, _, port = endpoint.bound.rpartition(":")
    yield host, int(port)
    endpoint.stop()


def test_a_caller_that_dribbles_headers_is_hung_up_on(
    metrics: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "CALLER_S", 1.0)
    with socket.create_connection(metrics, timeout=0.1) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        for header in range(600):  # a minute of them
            try:
                slow.sendall(b"X-%d: 1\r\n" % header)
                assert slow.recv(1) == b""
                return
            except TimeoutError:
                continue  # it still listens
            except ConnectionError:
                return
    raise AssertionError("it listened for a minute")


def test_callers_of_the_metrics_are_bounded(metrics: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_CALLERS", 3)
    monkeypatch.setattr(prometheus, "CALLER_S", 600.0)  # nobody is let go for being slow
    monkeypatch.setattr(prometheus._Handler, "timeout", 600.0)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(metrics, timeout=60)) for _ in range(3)]
        with socket.create_connection(metrics, timeout=60) as refused:
            assert refused.recv(1) == b""
        held[0].close()
        while True:  # until its thread has noticed
            with socket.create_connection(metrics, timeout=60) as caller:
                try:
                    caller.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                    answer = caller.recv(15)
                except ConnectionError:
                    continue
                if answer:
                    break
        assert answer == b"HTTP/1.0 200 OK"
