"""The engines that a benchmark of serving runs, each as processes: ours with its daemon, and vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.parts.stand import ROOT, process
from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.kvcache.arena.host import default_directory

START_S = 600.0


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine that serves. ``kill_daemon`` kills the daemon, starts another, and returns both moments on the clock
    ``time.monotonic``; an engine without one has None.
    """

    address: str
    model: pb.GetModelResponse
    kill_daemon: Callable[[], tuple[float, float]] | None


@contextlib.contextmanager
def ours(model: Path, flags: list[str], daemon_flags: list[str], log: Path | None) -> Iterator[Serving]:
    """A daemon and an engine."""
    # In memory, like the daemon's default: the arena's pages must not wait for a disk.
    with (
        tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as name,
        contextlib.ExitStack() as stack,
    ):
        cache, address = f"unix:{name}/k.sock", f"unix:{name}/e.sock"
        words = ["--listen", cache, "--arena-dir", f"{name}/arena", *daemon_flags]

        def start() -> subprocess.Popen[bytes]:
            return stack.enter_context(process("services.kvcache", cache, *words, log=log))

        running = start()
        engine = ["--listen", address, "--model", str(model), "--kvcache", cache, *flags]
        stack.enter_context(process("services.engine", address, *engine, log=log))

        def kill_daemon() -> tuple[float, float]:
            nonlocal running
            running.kill()
            running.wait()
            moment = time.monotonic()
            running = start()
            return moment, time.monotonic()

        yield Serving(address, described(address, lambda: True), kill_daemon)


@contextlib.contextmanager
def vllm(python: str, path: str, model: Path, arguments: dict[str, Any], log: Path | None) -> Iterator[Serving]:
    """vLLM's AsyncLLM in a process, run by ``python`` with ``path`` as its PYTHONPATH, and ``arguments`` of its
    ``AsyncEngineArgs``.
    """
    with tempfile.TemporaryDirectory(prefix="rf-bench-") as name, contextlib.ExitStack() as stack:
        address = f"unix:{name}/e.sock"
        said: Any = stack.enter_context(log.open("ab")) if log else subprocess.DEVNULL
        path = os.pathsep.join(filter(None, (path, str(ROOT / "protos"))))
        started = subprocess.Popen(
            [python, str(Path(__file__).with_name("vllm_engine.py")), address,
             json.dumps({"model": str(model), "skip_tokenizer_init": True, **arguments})],
            stdout=said, stderr=said, env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # its engine core is a process of its own, and ends with it
        )  # fmt: skip
        try:
            yield Serving(address, described(address, lambda: started.poll() is None), None)
        finally:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def described(address: str, alive: Callable[[], bool]) -> pb.GetModelResponse:
    """The model, once the engine answers. Raises ChildProcessError if ``alive`` is false first, TimeoutError after
    `START_S`.
    """
    until = time.monotonic() + START_S
    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        while time.monotonic() < until:
            with contextlib.suppress(grpc.RpcError):
                found: pb.GetModelResponse = stub.GetModel(pb.GetModelRequest(), wait_for_ready=True, timeout=0.5)
                return found
            if not alive():
                raise ChildProcessError(f"{address}: the engine ended before it served")
    raise TimeoutError(f"{address}: not serving after {START_S:g} s")
