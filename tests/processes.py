"""Real services as child processes, for tests that need two of them, a kill -9, or a stranger's client."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[1]
START_S = 60.0


class Service:
    """One ``python -m MODULE ARGUMENTS`` with its log in a file; ``address`` is the unix socket it listens on."""

    def __init__(self, module: str, socket: Path, arguments: list[str], log: Path) -> None:
        self.address = f"unix:{socket}"
        self.log_path = log
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--listen", self.address, *arguments],
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_serving(self, service: str = "") -> Service:
        """Return once health says SERVING; fail at once when the process ends instead."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=START_S)
        # A process that could not start would leave the watch waiting for its whole timeout.
        pidfd = os.pidfd_open(self.process.pid)

        def cancel_on_exit() -> None:
            with selectors.DefaultSelector() as selector:
                selector.register(pidfd, selectors.EVENT_READ)
                selector.select(START_S)
            if self.process.poll() is not None:
                watching.cancel()
            os.close(pidfd)

        threading.Thread(target=cancel_on_exit, daemon=True).start()
        try:
            for answer in watching:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return self
        except grpc.RpcError as error:
            raise AssertionError(f"{self.process.args} did not serve: {error}\n{self.log()}") from error
        raise AssertionError(f"{self.process.args} ended its health watch\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The logged events of that name so far."""
        lines = (line for line in self.log().splitlines() if line.startswith("{"))
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """SIGTERM and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.kill()
        self._log.close()


@contextlib.contextmanager
def kvcache(directory: Path, *arguments: str, name: str = "kvcache", wait: bool = True) -> Iterator[Service]:
    """A daemon with its socket and arenas below ``directory``."""
    arenas = ["--arena-dir", str(directory / "arena")]
    service = Service("services.kvcache", directory / f"{name}.sock", [*arenas, *arguments], directory / f"{name}.log")
    try:
        yield service.wait_serving() if wait else service
    finally:
        service.close()


@contextlib.contextmanager
def engine(
    directory: Path, daemon: str, *arguments: str, model: Path, name: str = "engine", wait: bool = True
) -> Iterator[Service]:
    """An engine on a daemon's address, with its socket in ``directory``."""
    flags = ["--model", str(model), "--kvcache", daemon, *arguments]
    service = Service("services.engine", directory / f"{name}.sock", flags, directory / f"{name}.log")
    try:
        yield service.wait_serving() if wait else service
    finally:
        service.close()
