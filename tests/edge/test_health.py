"""Health: liveness is not readiness, and each watcher hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services import healthcheck
from services.common.edge.health import LIVENESS, NOT_SERVING, SERVING, Health
from tests.edge.certificates import issued
from tests.engine.running import RunningEngine
from tests.generation import request
from tests.kvcache.conftest import Running

READINESS = ("", "rocmforge.engine.v1.EngineService")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunningEngine]:
    one = RunningEngine(tmp_path).start()
    yield one
    one.close()


def statuses(channel: grpc.Channel) -> dict[str, int]:
    stub = health_pb2_grpc.HealthStub(channel)
    return {name: stub.Check(health_pb2.HealthCheckRequest(service=name)).status for name in (*READINESS, LIVENESS)}


def watching(channel: grpc.Channel, name: str = "") -> Any:
    """A watch that has received SERVING."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=60)
    assert next(watch).status == SERVING
    return watch


def test_the_process_lives_while_the_model_loads_and_is_not_ready(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path, "--kvcache-patience", "60", kvcache=f"unix:{tmp_path}/none.sock")
    starting = engine.begin(engine.engine.start())
    try:
        with grpc.insecure_channel(engine.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            live = stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS), wait_for_ready=True, timeout=60)
            assert live.status == SERVING
            assert statuses(channel) == {"": NOT_SERVING, READINESS[1]: NOT_SERVING, LIVENESS: SERVING}
    finally:
        starting.cancel()
        engine.close()


def test_an_engine_that_has_failed_is_not_alive(engine: RunningEngine) -> None:
    assert set(statuses(engine.channel).values()) == {SERVING}
    watch, ready = watching(engine.channel, LIVENESS), watching(engine.channel)

    def schedule() -> None:
        raise RuntimeError("a bug")

    loop = engine.engine.loop
    assert loop is not None
    loop.scheduler.schedule = schedule
    with pytest.raises(grpc.RpcError, match="the engine failed"):
        list(engine.stub.Generate(request()))
    assert next(watch).status == next(ready).status == NOT_SERVING


def test_one_that_leaves_is_not_ready_again_and_alive(engine: RunningEngine) -> None:
    serving = engine.engine._serving
    watch = watching(engine.channel)

    async def leave() -> None:
        serving.leave()
        serving.ready()

    engine.call(leave())
    assert next(watch).status == NOT_SERVING
    assert statuses(engine.channel) == {"": NOT_SERVING, READINESS[1]: NOT_SERVING, LIVENESS: SERVING}


def test_a_watcher_is_told_though_another_one_has_left(tmp_path: Path) -> None:
    daemon = Running(tmp_path)
    try:
        with grpc.insecure_channel(f"unix:{daemon.config.listeners[0].path}") as channel:
            first, second = watching(channel), watching(channel)
            first.cancel()
            with pytest.raises(grpc.RpcError, match="CANCELLED"):
                next(first)
            third = watching(channel)
            daemon.call(lambda: _at_once(daemon.daemon._serving.not_ready))
            assert next(second).status == next(third).status == NOT_SERVING
    finally:
        daemon.close()


async def _at_once(what: Any) -> None:
    what()


def test_a_watcher_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    """Its stream would be a call in flight for the whole grace."""
    daemon = Running(tmp_path, "--grace", "3000")
    try:
        with grpc.insecure_channel(f"unix:{daemon.config.listeners[0].path}") as channel:
            watch = watching(channel)
            daemon.call(lambda: daemon.daemon.stop(daemon.config.grace_s))
            assert [one.status for one in watch] == [NOT_SERVING]
    finally:
        daemon.close()


class Slow:
    """A call whose reader reads nothing until it is let."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise LookupError(code)


def test_a_status_is_set_though_nobody_reads_it() -> None:
    async def body() -> list[int]:
        health = Health()
        health.set([""], SERVING)
        watch: AsyncIterator[Any] = health.Watch(health_pb2.HealthCheckRequest(), Slow())
        told = [(await anext(watch)).status]
        for _ in range(3):  # the watch stands before its reader
            health.set([""], NOT_SERVING)
            health.set([""], SERVING)
        health.set([""], NOT_SERVING)
        told.append((await anext(watch)).status)
        health.end()
        return [*told, *[one.status async for one in watch]]

    assert asyncio.run(asyncio.wait_for(body(), 60)) == [SERVING, NOT_SERVING]


def test_a_name_that_is_not_there() -> None:
    async def body() -> None:
        health, asked = Health(), health_pb2.HealthCheckRequest(service="other")
        with pytest.raises(LookupError, match="NOT_FOUND"):
            await health.Check(asked, Slow())
        watch = health.Watch(asked, Slow())
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        health.set(["other"], SERVING)
        assert (await anext(watch)).status == SERVING

    asyncio.run(asyncio.wait_for(body(), 60))


# --- python -m services.healthcheck -----------------------------------------------------------------------------------


def test_the_check_asks_for_a_name_on_a_socket(engine: RunningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert healthcheck.main([engine.address, LIVENESS, "--timeout", "60"]) == 0
    engine.call(_at_once(engine.engine._serving.not_ready))
    assert healthcheck.main([engine.address, READINESS[1], "--timeout", "60"]) == 1
    assert healthcheck.main([engine.address, LIVENESS, "--timeout", "60"]) == 0
    assert healthcheck.main([engine.address, "nobody", "--timeout", "60"]) == 1
    out, err = capsys.readouterr()
    assert out.split() == ["SERVING", "NOT_SERVING", "SERVING"]
    assert err == f"{engine.address}: NOT_FOUND: no service 'nobody'\n"


def test_the_check_speaks_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, me = issued(tmp_path, "own", "kvcache.internal"), issued(tmp_path, "me", common="probe")
    daemon = Running(tmp_path, "--listen", "127.0.0.1:0", *own.serving(me.ca))
    try:
        asked = [daemon.daemon.bound[1], LIVENESS, "--timeout", "60", "--ca", str(own.ca), "--name", "kvcache.internal"]
        shown = ["--cert", str(me.cert), "--key", str(me.key)]
        assert healthcheck.main([*asked, *shown]) == 0
        assert healthcheck.main(asked) == 1  # shows none
        assert healthcheck.main([*asked[:-2], *shown]) == 1  # not the certificate's name
        assert healthcheck.main([*asked[:2], "--timeout", "3"]) == 1  # plaintext
    finally:
        daemon.close()
    assert capsys.readouterr().out == "SERVING\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["unix:/run/k.sock", "--ca", "{ca}"], "--ca: unix:/run/k.sock is not a TCP address"),
        (["127.0.0.1:1", "--name", "x"], "--name needs --ca"),
        (["127.0.0.1:1", "--cert", "{cert}"], "--cert and --key must be given together"),
        (["127.0.0.1:1", "--ca", "/proc/none"], "--ca: cannot read /proc/none"),
    ],
)
def test_the_check_says_what_is_wrong(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    me = issued(tmp_path, "me")
    assert healthcheck.main([flag.format(ca=me.ca, cert=me.cert) for flag in flags]) == 2
    assert says in capsys.readouterr().err
