"""`top` on real services, in a terminal of 80 by 24."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocmforge.engine.v1 import engine_pb2_grpc
from services.top.app import Explanation, Top
from services.top.looking import Looker
from tests.generation import collect, request
from tests.processes import ROOT, Service, engine, kvcache

MODEL = ROOT / "models" / "shakespeare"


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[Service, Service]]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        directory = Path(name)
        with kvcache(directory) as daemon, engine(directory, daemon.address, model=MODEL) as one:
            yield daemon, one


def test_what_it_sees_is_what_happened(services: tuple[Service, Service]) -> None:
    daemon, one = services
    stub = engine_pb2_grpc.EngineServiceStub(one.channel)
    now = [0.0]
    with contextlib.closing(Looker(daemon.address, [one.address, "127.0.0.1:1"], lambda: now[0])) as looker:
        before = looker.look()
        for _ in range(2):
            collect(stub.Generate(request([*range(1, 40)], max_tokens=10)))
        now[0] = 2.0
        after = looker.look()
    assert before.trouble == after.trouble == "" and before.epoch == after.epoch != 0
    [pool] = after.pools
    [session] = after.sessions
    assert pool.cached >= 2 and pool.hit_rate is not None and 0.2 < pool.hit_rate < 0.6
    assert pool.granted_s > 0 and before.pools[0].hit_rate is None
    assert session.pool_id == pool.id and not session.lost and 0 < session.lease_s <= session.ttl_s == 10
    seen, absent = after.engines
    assert seen.model == "shakespeare" and seen.tokens_s == 10 and seen.queue_limit == 1024
    assert seen.first_token_s is not None and 0 < seen.first_token_s < 60
    assert absent.trouble


def test_keys(services: tuple[Service, Service]) -> None:
    daemon, one = services

    async def body() -> str:
        looker = Looker(daemon.address, [one.address])
        app = Top(looker, 0.2)
        async with app.run_test(size=(80, 24)) as pilot:
            async with asyncio.timeout(30):
                while app.view is None:
                    await pilot.pause(0.05)
            for key in "aiptor":
                await pilot.press(key)
            assert (app._order, app._reverse) == ("o", True)
            await pilot.press("e")
            assert isinstance(app.screen, Explanation)
            await pilot.press("x")
            assert not isinstance(app.screen, Explanation)
            await pilot.press("space")
            assert app._paused
            svg = app.export_screenshot()
            await pilot.press("q")
        looker.close()
        return svg

    svg = asyncio.run(body())
    assert "rocmforge" in svg and "paused" in svg and "SEQUENCE" in svg


@pytest.mark.parametrize("colour", [True, False])
def test_in_a_terminal(services: tuple[Service, Service], colour: bool) -> None:
    daemon, one = services
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    if not colour:
        environment["NO_COLOR"] = "1"
    command = [sys.executable, "-m", "services.top", "--kvcache", daemon.address, "--engine", one.address]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"q quit" not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"q")
        with contextlib.suppress(OSError):  # the terminal is gone with who used it
            while os.read(ours, 65536):
                pass
        assert process.wait(60) == 0
    os.close(ours)
    assert b"shakespeare" in shown and b"# held" in shown
    assert (b"\x1b[1;32" in shown) == colour


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--interval", "0"], "expected seconds from 0.1 to 3600"),
        (["--engine", "nonsense"], "expected unix:/path or host:port"),
        (["--kvcache", "127.0.0.1:1"], "its output must be a terminal"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "services.top", "--engine", "127.0.0.1:2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
