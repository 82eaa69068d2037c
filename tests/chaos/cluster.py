"""The processes of a run: a daemon, two engines, and between them two wires and two proxies of calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests.chaos.load.calls import Calls
from tests.chaos.load.wire import Wire
from tests.chaos.load.workload import MODEL
from tests.chaos.schedule import DAEMON, DRAIN_S, ENGINES, TTL_S, WIRES
from tests.chaos.verdict import Verdict
from tests.processes import Service

#: So few that requests are preempted and pages evicted.
POOL_PAGES = 160
GRACE_S = 3.0
#: A service that was told to end has done so by then.
STOP_S = 60.0
_OPTIONS = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]


class Node:
    """A service that is ended and started again; ``lock`` is held by who does something to its process."""

    def __init__(self, name: str, module: str, flags: list[str], directory: Path, verdict: Verdict) -> None:
        self.name = name
        self.socket = directory / f"{name}.sock"
        self.lock = asyncio.Lock()
        self.runs = 0
        self.service: Service | None = None
        self.is_paused = False
        self._module, self._flags, self._directory, self._verdict = module, flags, directory, verdict
        self._waiting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start a process; `until_serving` waits for it."""
        self.runs += 1
        log = self._directory / f"{self.name}.{self.runs}.log"
        self.service = Service(self._module, self.socket, self._flags, log)

    async def until_serving(self) -> None:
        """Return once it serves. Raises AssertionError when it does not come to that."""
        service = self.service
        if service is None:
            raise AssertionError(f"{self.name} was not started")
        await asyncio.to_thread(service.wait_serving, timeout_s=120.0)

    def signal(self, number: int) -> None:
        """Send its process a signal."""
        if self.service is not None and self.service.process.poll() is None:
            self.service.process.send_signal(number)
            self.is_paused = number == signal.SIGSTOP

    async def end(self, number: int) -> None:
        """End it by a signal, and see it gone; SIGTERM has to end it with status 0."""
        service = self.service
        if service is None:
            return
        if service.process.poll() is None:
            service.process.send_signal(number)
            try:
                status = await asyncio.to_thread(service.process.wait, STOP_S)
            except Exception as error:
                self._verdict.find("not ended", f"{self.name} {signal.Signals(number).name}: {error}\n{_tail(service)}")
                status = None
            if number == signal.SIGTERM and status not in (0, None):
                self._verdict.find("bad end", f"{self.name} ended with {status} at SIGTERM\n{_tail(service)}")
        self.service = None
        service.close()

    def check(self) -> None:
        """Find it, if it ended by itself, or logged what must not be."""
        service = self.service
        if service is None:
            return
        if (status := service.process.poll()) is not None:
            self._verdict.find("died", f"{self.name} ended by itself with {status}\n{_tail(service)}")
            self.service = None

    def complaints(self) -> list[str]:
        """Lines of its logs that tell of a bug."""
        found = []
        for log in sorted(self._directory.glob(f"{self.name}.*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if '"rpc_failed"' in line or '"sweep_failed"' in line or "Traceback (most recent" in line:
                    found.append(f"{log.name}: {line[:2000]}")
        return found


def _tail(service: Service) -> str:
    return service.log()[-3000:]


class Cluster:
    """All that runs. ``engine_stubs`` and ``cache`` go there directly, past the wires."""

    def __init__(self, directory: Path, seed: int, verdict: Verdict) -> None:
        self.directory = directory
        daemon = ["--arena-dir", str(directory / "arena"), "--memory", "64MiB", "--event-ring", "1024"]
        daemon += ["--session-ttl", f"{TTL_S}", "--drain", f"{DRAIN_S}", "--grace", f"{GRACE_S}"]
        self.nodes = {DAEMON: Node(DAEMON, "services.kvcache", daemon, directory, verdict)}
        self.wires: dict[str, Wire] = {}
        self.calls: dict[str, Calls] = {}
        for name, wire in zip(ENGINES, WIRES, strict=True):
            between, behind = directory / f"{wire}.sock", directory / f"{wire}-calls.sock"
            self.wires[wire] = Wire(between, behind)
            target = f"unix:{self.nodes[DAEMON].socket}"
            self.calls[wire] = Calls(f"unix:{behind}", target, random.Random(f"{wire} {seed}"))
            flags = ["--model", str(MODEL), "--kvcache", f"unix:{between}", "--pool-pages", str(POOL_PAGES)]
            flags += ["--max-batch", "8", "--generation-count", "32", "--grace", f"{GRACE_S}"]
            self.nodes[name] = Node(name, "services.engine", flags, directory, verdict)
        self.channels: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        """Start all of it, and leave no process."""
        try:
            for name, node in self.nodes.items():
                if name != DAEMON:
                    wire = WIRES[ENGINES.index(name)]
                    await self.calls[wire].start()
                    await self.wires[wire].start()
                await node.start()
                await node.until_serving()
                self.channels[name] = grpc.aio.insecure_channel(f"unix:{node.socket}", options=_OPTIONS)
            yield self
        finally:
            for channel in self.channels.values():
                await channel.close()
            for name in (*ENGINES, DAEMON):
                self.nodes[name].signal(signal.SIGCONT)
                await self.nodes[name].end(signal.SIGKILL)
            for wire in WIRES:
                await self.wires[wire].close()
                if self.calls[wire].is_started:
                    await self.calls[wire].close()

    def engine(self, name: str) -> Any:
        """A stub of an engine."""
        return engine_pb2_grpc.EngineServiceStub(self.channels[name])

    @property
    def cache(self) -> Any:
        """A stub of the daemon."""
        return kvcache_pb2_grpc.KvCacheServiceStub(self.channels[DAEMON])

    def heal(self) -> None:
        """Undo the faults of wires and calls, and resume paused processes."""
        for wire in WIRES:
            self.wires[wire].heal()
            self.calls[wire].heal()
        for node in self.nodes.values():
            if node.is_paused:
                node.signal(signal.SIGCONT)

    def pids(self) -> dict[str, int]:
        """The processes that live, by ``NAME.RUN``."""
        return {
            f"{name}.{node.runs}": node.service.pid
            for name, node in self.nodes.items()
            if node.service is not None and node.service.process.poll() is None
        }


def uses(pid: int) -> tuple[int, int] | None:
    """Resident bytes that are its own, not of files or shared memory, and open descriptors; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024, descriptors
    return None
