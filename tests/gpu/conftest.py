"""A daemon and engines in processes of their own, on GPUs that are real or stood in for."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gated import Steps, gated
from tests.gpus import ROOT, Host, host
from tests.processes import Service, engine, kvcache

MODEL = ROOT / "models" / "shakespeare"


class Refused(AssertionError):
    """A command that was answered with an error, where none was looked for."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class Engine:
    """tests/gpu/peer.py: each command is a method, and raises Refused for an error."""

    def __init__(self, address: str, host: Host, device: int, pages: int, ttl_s: float, log: Path, **env: str) -> None:
        self.log_path = log
        self._log = log.open("ab")
        words = [address, str(device), str(pages), str(ttl_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.peer", *words],
            cwd=ROOT,
            env={**host.environment, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(name, *arguments)

    def _ask(self, *command: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # told below
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the engine ended: {self.log_path.read_text()[-2000:]}"
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
        self._log.close()


class World:
    """What a test starts; all of it ends with the test."""

    def __init__(self, directory: Path, host: Host) -> None:
        self.host = host
        self._directory = directory
        self._stack = ExitStack()
        self._count = 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def daemon(self, *flags: str, **env: str) -> Service:
        flags = ("--device", "gpu", "--memory", "8MiB", *flags)
        environment = {**self.host.environment, **env}
        return self._stack.enter_context(kvcache(self._directory, *flags, environment=environment))

    def serving(self, daemon: Service, name: str, *flags: str) -> Service:
        """An engine that generates, with the bundled model."""
        words = ("--device", "gpu", *flags)
        service = engine(
            self._directory,
            daemon.address,
            *words,
            model=MODEL,
            name=name,
            wait=False,
            environment=self.host.environment,
        )
        # Kernels are compiled on the first run, which takes a CPU longer than a GPU's compiler.
        return self._stack.enter_context(service).wait_serving(timeout_s=300)

    def gated(self, daemon: Service, name: str, *flags: str) -> tuple[Service, Steps]:
        """An engine that generates, and computes a step when the test lets it."""
        words = ("--device", "gpu", *flags)
        process = gated(
            self._directory,
            daemon.address,
            *words,
            model=MODEL,
            name=name,
            base=self.host.environment,
            start_s=300,
        )
        service, steps = self._stack.enter_context(process)
        return service, steps

    def engine(self, daemon: Service, device: int = 0, *, pages: int = 16, ttl_s: float = 600, **env: str) -> Engine:
        self._count += 1
        log = self._directory / f"engine{self._count}.log"
        engine = Engine(daemon.address, self.host, device, pages, ttl_s, log, **env)
        self._stack.callback(engine.end)
        return engine


@pytest.fixture
def one(tmp_path: Path) -> Iterator[World]:
    """A machine with a GPU at least."""
    with World(tmp_path, host(1)) as world:
        yield world


@pytest.fixture
def two(tmp_path: Path) -> Iterator[World]:
    """A machine with two GPUs at least."""
    with World(tmp_path, host(2)) as world:
        yield world
