"""One project of docker-compose.yml, with its own images and name, and the commands for it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.processes import ROOT

PROJECT = "rocmforge-test"
#: Tags of the images that are tested, and of those that they are upgraded to.
OLD, NEW = "test-old", "test-new"
WAIT_S = 180


def docker(*words: str, check: bool = True, timeout: float = 1800, variables: Mapping[str, str] | None = None) -> str:
    """Run a command of docker. Returns its output; raises AssertionError with it when it fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROCMFORGE_")}
    environment = {"DOCKER_BUILDKIT": "0", **inherited, **(variables or {})}
    done = subprocess.run(
        ["docker", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert not check or done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def missing() -> str:
    """Why no Docker engine can be used here, and what to do; empty if one can."""
    for words, change in (
        (["docker", "info"], "install docker.io, and start the engine or join the group docker"),
        (["docker", "compose", "version"], "install Docker Compose 2"),
    ):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            return f"there is no docker: {change}"
        if done.returncode:
            return f"`{' '.join(words)}` fails: {done.stderr.strip()}; {change}"
    return ""


@dataclass
class Stack:
    """``variables`` are those of the compose file, ``files`` its overrides."""

    variables: dict[str, str] = field(
        default_factory=lambda: {"ROCMFORGE_KVCACHE_TAG": OLD, "ROCMFORGE_ENGINE_TAG": OLD}
    )
    files: tuple[str, ...] = ("docker-compose.yml",)

    def compose(self, *words: str, check: bool = True) -> str:
        """Run a command of compose on this project."""
        chosen = [word for file in self.files for word in ("-f", file)]
        return docker("compose", "-p", PROJECT, *chosen, *words, check=check, variables=self.variables)

    def up(self, *words: str) -> None:
        """Bring the project to what its files and variables say, and wait until it is healthy."""
        self.compose("up", "--wait", "--wait-timeout", str(WAIT_S), *words)

    def down(self) -> None:
        """Remove it with its volumes."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, service: str) -> Any:
        """What Docker says of the only container of a service."""
        [one] = self.containers(service)
        return json.loads(docker("inspect", one))[0]

    def kill_process(self, service: str) -> None:
        """SIGKILL the service's process, as the kernel does when memory runs out."""
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)

    def until(self, service: str, action: str, since: float) -> None:
        """Wait until Docker reports an ``action`` of a service, such as ``start`` or ``health_status: healthy``,
        at or after ``since``, in seconds since 1970.
        """
        [one] = self.containers(service)
        words = ["--filter", f"container={one}", "--since", f"{since:.9f}", "--format", "{{.Action}}"]
        with subprocess.Popen(["docker", "events", *words], stdout=subprocess.PIPE) as events:
            try:
                assert events.stdout is not None
                deadline, told = time.monotonic() + WAIT_S, b""
                while action.encode() not in told.splitlines():
                    ready, _, _ = select.select([events.stdout], [], [], max(0.0, deadline - time.monotonic()))
                    assert ready, f"{service}: no {action} within {WAIT_S} s"
                    told += os.read(events.stdout.fileno(), 4096)
            finally:
                events.kill()

    def until_back(self, service: str, since: float) -> None:
        """Wait until a service that was killed at ``since`` was restarted, and is healthy again."""
        self.until(service, "start", since)
        self.until(service, "health_status: healthy", since)
