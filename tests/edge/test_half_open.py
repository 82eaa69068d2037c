"""Connections whose other side vanished are detected and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from rocmforge.client import cache as kvclient
from rocmforge.client.transport import keepalive
from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common.edge import keepalive as serving_keepalive
from services.engine import cli
from services.engine.cli import client
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import Demand, Opening, PageLayout
from services.engine.scheduling.loop import BACKOFF_S
from tests.edge.proxy import Proxy
from tests.engine.running import RunningEngine
from tests.kvcache.conftest import Running
from tests.polling import until

GEOMETRY = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="f32")
OPENING = Demand("a", start=0, tokens=[], total_pages=2, known_pages=0, opening=Opening([1, 2, 3]))
#: Long enough for a busy machine to answer a ping, and short for a test.
PING_S, PATIENCE_S = 0.6, 3.0
NEVER_S = 600.0


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    one = Proxy(tmp_path / "proxy.sock", tmp_path / "k.sock")
    yield one
    one.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


def pings(monkeypatch: pytest.MonkeyPatch, client_s: float, server_s: float, patience_s: float = PATIENCE_S) -> None:
    monkeypatch.setattr(keepalive, "CLIENT", keepalive.pings(client_s, patience_s))
    least = serving_keepalive.SERVER[-1]
    monkeypatch.setattr(serving_keepalive, "SERVER", [*keepalive.pings(server_s, patience_s), least])


def test_an_unanswered_call_gets_the_next_one_a_channel_of_its_own(
    daemon: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings(monkeypatch, NEVER_S, NEVER_S)
    source = GrpcPageSource(proxy.address, "pool", GEOMETRY, pool_pages=8)
    source.reopen()
    proxy.forget()
    [grant] = source.exchange([OPENING], []).result()
    assert grant.pages == (0, 1)
    assert proxy.connections == 2
    source.close()


def test_an_idle_engine_notices_too(daemon: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    pings(monkeypatch, PING_S, NEVER_S)
    source = GrpcPageSource(proxy.address, "pool", GEOMETRY, pool_pages=8, ttl_s=600)
    source.reopen()
    proxy.forget()
    assert proxy.left.wait(60), "it still waits for an answer to its ping"
    source.close()


def test_an_engine_goes_on_when_the_path_works_again(tmp_path: Path, proxy: Proxy) -> None:
    daemon = Running(tmp_path, "--memory", "16MiB")
    engine = RunningEngine(tmp_path, "--pool-id", "p", kvcache=proxy.address).start()
    request = engine_pb2.GenerateRequest(
        prompt={"text": "ROMEO:"}, sampling={"temperature": 0}, stopping={"max_tokens": 40, "ignore_eos": True}
    )
    undisturbed = [token for one in engine.stub.Generate(request) for token in one.token_ids]
    stream = engine.stub.Generate(request)
    tokens = list(next(stream).token_ids)
    engine.steps.hold()
    proxy.swallow(True)
    proxy.forget()
    engine.steps.release()
    before = proxy.connections
    assert proxy.until_connected(before + 2), "it does not try again"
    proxy.swallow(False)
    for one in stream:
        tokens += one.token_ids
    assert tokens == undisturbed
    engine.close()
    daemon.close()


def test_it_goes_on_within_five_seconds() -> None:
    """A call that began just before the path works again is waited for; the next one is answered."""
    assert kvclient.MAX_CALL_S + max(BACKOFF_S) < 5
    assert keepalive.CLIENT_PING_S + keepalive.CLIENT_PATIENCE_S < 5


def test_a_call_whose_client_is_gone_ends(tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    pings(monkeypatch, NEVER_S, PING_S)
    daemon = Running(tmp_path)
    with grpc.insecure_channel(proxy.address) as channel:
        stream = kvcache_pb2_grpc.KvCacheServiceStub(channel).WatchEvents(pb.WatchEventsRequest())
        next(stream)
        proxy.forget()
        assert proxy.dropped.wait(60), "the daemon still waits for an answer to its ping"
        until(lambda: daemon.daemon.calls.handled.get(("WatchEvents", "CANCELLED")) == 1)
    daemon.close()


def test_pings_of_a_client_are_no_flood(daemon: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    pings(monkeypatch, PING_S, NEVER_S, patience_s=60.0)
    with grpc.insecure_channel(proxy.address, options=client.options()) as channel:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        stub.GetStats(pb.GetStatsRequest())
        assert proxy.until_sent(6)  # nothing but pings, twice as many as a server bears that takes them for a flood
        stub.GetStats(pb.GetStatsRequest())
    assert proxy.connections == 1


class Mute(engine_pb2_grpc.EngineServiceServicer):
    """An engine that says one token and then nothing until ``over``."""

    def __init__(self) -> None:
        self.over = Event()
        self.said = Event()

    def _say(self, message: Any) -> Iterator[Any]:
        yield message
        self.said.set()
        self.over.wait(120)

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        return self._say(engine_pb2.GenerateResponse(request_id="a", text="But", token_ids=[1]))

    def WatchGeneration(self, request: Any, context: Any) -> Iterator[Any]:
        return self._say(engine_pb2.WatchGenerationResponse(response={"request_id": "a", "text": "But"}))


@pytest.mark.parametrize("words", [["generate", "hello"], ["watch", "a"]], ids=lambda words: words[0])
def test_a_command_does_not_wait_for_an_engine_that_is_gone(
    tmp_path: Path,
    proxy: Proxy,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pings(monkeypatch, PING_S, NEVER_S)
    mute = Mute()
    server = grpc.server(futures.ThreadPoolExecutor(2), options=serving_keepalive.SERVER)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(mute, server)
    server.add_insecure_port(f"unix:{tmp_path}/k.sock")
    server.start()
    with futures.ThreadPoolExecutor(1) as user:
        status = user.submit(cli.run, words[0], [*words[1:], "--target", proxy.address])
        assert mute.said.wait(60)
        proxy.forget()
        try:
            assert status.result(60) == 1
        finally:
            mute.over.set()
            server.stop(None).wait()
    assert "UNAVAILABLE" in capsys.readouterr().err
