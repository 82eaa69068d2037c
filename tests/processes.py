"""Real services as child processes, for tests that need two of them, a kill -9, or a stranger's client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from services.healthcheck import wait_serving

ROOT = Path(__file__).parents[1]
START_S = 60.0


class Service:
    """One ``python -m MODULE ARGUMENTS`` with its log in a file; ``address`` is the unix socket it listens on.

    It inherits ``environment``, or that of the tests; ``launcher`` is the command that runs Python.
    """

    def __init__(
        self,
        module: str,
        socket: Path,
        arguments: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (sys.executable,),
    ) -> None:
        self.address = f"unix:{socket}"
        self.log_path = log
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [*launcher, "-m", module, "--listen", self.address, *arguments],
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env={**(os.environ if environment is None else environment), "OPENBLAS_NUM_THREADS": "1"},
        )
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_serving(self, service: str = "", timeout_s: float = START_S) -> Service:
        """Return once health says SERVING; fail at once when the process ends instead."""
        try:
            wait_serving(self.address, alive=lambda: self.process.poll() is None, timeout_s=timeout_s, service=service)
        except (ChildProcessError, TimeoutError) as error:
            raise AssertionError(f"{error}\n{self.log()}") from error
        return self

    def log(self) -> str:
        return self.log_path.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The logged events of that name so far."""
        # Behind the last end of a line is what is being written now, or what a kill cut off.
        lines = (line for line in self.log().rpartition("\n")[0].splitlines() if line.startswith("{"))
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def started(self) -> dict[str, Any]:
        """The event of its start, which is logged a moment after health says SERVING."""
        while not (told := [*self.events("kvcache_serving"), *self.events("engine_serving")]):
            assert self.process.poll() is None, self.log()
        [event] = told
        return event

    def tcp(self) -> str:
        """The TCP address on which it listens, according to its log."""
        return next(str(one) for one in self.started()["listen"] if not one.startswith("unix:"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> int:
        """SIGTERM and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.kill()
        self._log.close()


@contextlib.contextmanager
def kvcache(
    directory: Path,
    *arguments: str,
    name: str = "kvcache",
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Service]:
    """A daemon with its socket and arenas below ``directory``."""
    flags = ["--arena-dir", str(directory / "arena"), *arguments]
    service = Service("services.kvcache", directory / f"{name}.sock", flags, directory / f"{name}.log", environment)
    try:
        yield service.wait_serving() if wait else service
    finally:
        service.close()


@contextlib.contextmanager
def engine(
    directory: Path,
    daemon: str,
    *arguments: str,
    model: Path,
    name: str = "engine",
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
    module: str = "services.engine",
) -> Iterator[Service]:
    """An engine on a daemon's address, with its socket in ``directory``."""
    flags = ["--model", str(model), "--kvcache", daemon, *arguments]
    service = Service(module, directory / f"{name}.sock", flags, directory / f"{name}.log", environment)
    try:
        yield service.wait_serving() if wait else service
    finally:
        service.close()
