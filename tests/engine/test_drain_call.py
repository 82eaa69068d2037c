"""Drain, the call and the command: the process stays, and what runs ends when it ends."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common.edge.health import NOT_SERVING, SERVING
from services.engine import cli
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request

TOKEN = "a" * 43


class Duck:
    """A lame-duck delay that ends when the test says so."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._over = asyncio.Event()
        self.delays: list[float] = []
        engine.engine._sleep = self.sleep

    async def sleep(self, delay: float) -> None:
        self.delays.append(delay)
        await self._over.wait()

    def end(self) -> None:
        async def body() -> None:
            self._over.set()

        self._engine.call(body())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunningEngine]:
    one = RunningEngine(tmp_path, "--lame-duck", "7", "--max-batch", "1").start()
    yield one
    one.close()


def test_a_lame_duck_is_not_ready_and_serves(engine: RunningEngine) -> None:
    duck = Duck(engine)
    try:
        watch = health_pb2_grpc.HealthStub(engine.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == SERVING
        assert engine.stub.Drain(pb.DrainRequest()).live_requests == 0
        assert next(watch).status == NOT_SERVING
        waiting = engine.stub.Drain.future(pb.DrainRequest(wait=True), timeout=60)
        assert len(collect(engine.stub.Generate(request(max_tokens=4)))[1]) == 4
        assert not engine.stub.GetStats(pb.GetStatsRequest()).draining
        assert duck.delays == [7] and not waiting.done()
        duck.end()
        assert waiting.result().live_requests == 0
        assert refused(lambda: engine.stub.Generate(request())).reason == "DRAINING"
        assert duck.delays == [7], "a second drain joins the first"
    finally:
        duck.end()


def test_a_drain_waits_for_what_runs_and_for_nothing_else(engine: RunningEngine) -> None:
    engine.steps.hold()
    duck = Duck(engine)
    duck.end()
    runs = engine.stub.Generate(request(max_tokens=30))
    assert engine.steps.reached.wait(60)
    waits = engine.stub.Generate(request(max_tokens=30))
    engine.until_live(2)
    drained = engine.stub.Drain.future(pb.DrainRequest(wait=True), timeout=60)
    engine.steps.step()  # behind which the engine's thread is told of the drain
    engine.steps.step()
    assert refused(lambda: waits).reason == "DRAINING"
    with pytest.raises(grpc.RpcError) as caught:
        engine.stub.Drain(pb.DrainRequest(wait=True), timeout=0.01)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert engine.stub.Drain(pb.DrainRequest()).live_requests == 1 and not drained.done()
    engine.steps.release()
    assert len(collect(runs)[1]) == 30
    assert drained.result().live_requests == 0
    assert engine.stub.GetStats(pb.GetStatsRequest()).draining
    engine.stop()  # without another delay
    assert len(duck.delays) == 1


def test_only_an_operator_drains(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(
        "".join(f"{name}:{hashlib.sha256(name.encode() + TOKEN.encode()).hexdigest()}\n" for name in "ab")
    )
    tokens.chmod(0o600)
    flags = ["--listen", "127.0.0.1:0", "--tokens", str(tokens), "--allow", "operator=token:b"]
    engine = RunningEngine(tmp_path, *flags).start()
    try:
        with grpc.insecure_channel(engine.engine.bound[1]) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)

            def drain(name: str) -> pb.DrainResponse:
                metadata = [("authorization", f"Bearer {name}{TOKEN}")]
                answer: pb.DrainResponse = stub.Drain(pb.DrainRequest(), metadata=metadata)
                return answer

            error = refused(lambda: drain("a"))
            assert (error.code, error.reason) == ("PERMISSION_DENIED", "ROLE_MISSING")
            assert "operator=token:a" in error.message
            assert refused(lambda: stub.Drain(pb.DrainRequest())).reason == "UNAUTHENTICATED"
            assert len(collect(engine.stub.Generate(request(max_tokens=4)))[1]) == 4
            assert drain("b").live_requests == 0
    finally:
        engine.close()


def test_over_plain_tcp_nobody_drains(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path, "--listen", "127.0.0.1:0").start()
    try:
        with grpc.insecure_channel(engine.engine.bound[1]) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            assert refused(lambda: stub.Drain(pb.DrainRequest())).reason == "ROLE_MISSING"
    finally:
        engine.close()


@pytest.mark.needs("other-users")
def test_another_user_with_the_role_gets_a_socket() -> None:
    other = os.geteuid() + 4321
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:  # others may pass through the directories above
        engine = RunningEngine(Path(folder), "--allow", f"operator=uid:{other}").start()
        try:
            assert engine.engine.bound[1:] == [f"unix:{folder}/e.{other}.sock"]
        finally:
            engine.close()


def test_the_command_says_what_is_left(engine: RunningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    Duck(engine).end()
    engine.steps.hold()
    runs = engine.stub.Generate(request(max_tokens=30))
    assert engine.steps.reached.wait(60)
    target = ["--target", engine.address]
    assert cli.run("drain", target) == 0
    assert cli.run("drain", [*target, "--wait", "0.01"]) == 1
    engine.steps.release()
    collect(runs)
    assert cli.run("drain", [*target, "--wait", "60"]) == 0
    left = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert left == [1, 1, 0]
