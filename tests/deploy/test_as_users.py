"""The services as the manifests start them: their users, directories, sockets, probes and hooks, on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2_grpc
from services import healthcheck
from services.engine.config import BUNDLED_MODEL
from tests.deploy.manifests import Workload, daemon, engines
from tests.generation import collect, request
from tests.loopback import own_host
from tests.processes import ROOT
from tests.strangers import commons

pytestmark = [pytest.mark.needs("kustomize"), pytest.mark.needs("other-users")]

OVERLAY = "cpu"
START_S = 120.0

#: A container's process: what it imports, it imports before it gives root up, since others may not read the checkout.
CONTAINER = """
import encodings.idna, os, sys
import services.engine.__main__, services.engine.doctor, services.engine.server, services.engine.cli.drain
import services.healthcheck, services.kvcache.__main__
from services import __main__ as commands
uid, program, *words = sys.argv[1:]
os.setgroups([])
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
mains = {"kvcache": services.kvcache.__main__.main, "engine": services.engine.__main__.main, "rocmforge": commands.main}
raise SystemExit(mains[program](words))
"""


class Node:
    """A node's directories below ``folder``, and containers that see them as theirs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.host = folder, own_host()
        for name in ("run", "shm", "tmp"):
            (folder / name).mkdir()
            (folder / name).chmod(0o755)  # as the kubelet makes what is missing
        (folder / "tmp").chmod(0o777)  # as an emptyDir is
        shutil.copytree(BUNDLED_MODEL, folder / "model")

    def seen(self, text: str) -> str:
        """What a manifest says, in this node's paths and at its address."""
        here = {"run/rocmforge": "run", "dev/shm/rocmforge": "shm", "tmp": "tmp"}
        text = re.sub(
            r"(?<!\w)/(run/rocmforge|dev/shm/rocmforge|tmp)\b", lambda m: f"{self._folder}/{here[m[1]]}", text
        )
        return text.replace("0.0.0.0:", f"{self.host}:")

    def prepare(self, work: Workload) -> None:
        """Run its init containers, which are root."""
        for first in work.pod["initContainers"]:
            assert first["securityContext"]["runAsUser"] == 0
            subprocess.run([self.seen(word) for word in first["command"]], check=True, timeout=60)

    def command(self, work: Workload, program: str, words: list[str]) -> list[str]:
        return [sys.executable, "-c", CONTAINER, str(work.uid), program, *map(self.seen, words)]

    def environment(self, work: Workload) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ROCMFORGE_")}
        own = {name: self.seen(value) for name, value in work.environment.items()}
        return {**kept, "OPENBLAS_NUM_THREADS": "1", "HOME": "/proc/none", **own}

    @contextlib.contextmanager
    def running(self, work: Workload, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Its container, ready by its own probes."""
        self.prepare(work)
        command = [*self.command(work, work.service, work.container["args"]), *more]
        log = self._folder / f"{work.name}.log"
        deadline = time.monotonic() + START_S
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment(work), stderr=file)
        try:
            while not self.probed(work, "readinessProbe"):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            assert self.probed(work, "livenessProbe")
            yield process
        finally:
            process.kill()
            process.wait(60)

    def probed(self, work: Workload, kind: str) -> bool:
        """Ask what the kubelet asks."""
        asked = work.container[kind]["grpc"]
        return healthcheck.main([f"{self.host}:{asked['port']}", asked["service"]]) == 0

    def executed(self, work: Workload, command: list[str]) -> subprocess.CompletedProcess[str]:
        program, *words = command
        whole = self.command(work, program, words)
        return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_manifests_run() -> None:
    kvcache, [engine] = daemon(OVERLAY), engines(OVERLAY)
    with commons() as folder:
        node = Node(folder)
        model = f"--model={folder}/model"
        with node.running(kvcache, "--memory=64MiB") as served, node.running(engine, model) as serving:
            assert (folder / "run").stat().st_uid == kvcache.uid
            with grpc.insecure_channel(f"{node.host}:50051") as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                assert len(collect(stub.Generate(request(max_tokens=8), timeout=60))[1]) == 8
            [hook] = [command for name, command in engine.commands if name == "preStop"]
            done = node.executed(engine, hook)
            assert (done.returncode, done.stdout) == (0, "draining, 0 requests live\n"), done.stderr
            assert not node.probed(engine, "readinessProbe") and node.probed(engine, "livenessProbe")
            for process in (serving, served):
                process.terminate()
                assert process.wait(60) == 0


def test_an_engine_is_no_more_than_an_engine_to_the_daemon() -> None:
    """Its user cannot come in where the daemon's own does."""
    kvcache, [engine] = daemon(OVERLAY), engines(OVERLAY)
    with commons() as folder:
        node = Node(folder)
        with node.running(kvcache, "--memory=64MiB"):
            for socket_name, answered in (("kvcache.10002.sock", True), ("kvcache.sock", False)):
                done = node.executed(engine, ["rocmforge", "healthcheck", f"unix:/run/rocmforge/{socket_name}"])
                assert (done.returncode == 0) is answered, done.stderr
