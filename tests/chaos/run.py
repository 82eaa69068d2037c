"""A run: start everything, let faults come while clients work, heal, and see that all is as it was."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocmforge.engine.v1 import engine_pb2
from tests.chaos.cluster import Cluster, uses
from tests.chaos.load.clients import Clients
from tests.chaos.load.stranger import Stranger
from tests.chaos.load.workload import requests, undisturbed
from tests.chaos.observer import Observer, Series
from tests.chaos.schedule import KINDS, WIRES, Fault
from tests.chaos.verdict import Expected, Verdict

REQUESTS = 48
WORKERS = 8
#: Tokens that clients have by the time of a tampering.
TOLD = 100
#: After the last fault everything is whole again by then.
SETTLE_S = 240.0


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    seconds: float
    faults: Sequence[Fault]
    verdict: Verdict
    series: dict[str, Series]
    pages: list[tuple[float, int, int, int, int]]
    calls: dict[str, int]
    healed_at_s: float = 0.0
    ended_at_s: float = 0.0


class Run:
    """One run of a schedule. ``tamper`` is called with the cluster in the middle of it, by tests of the oracle."""

    def __init__(
        self,
        seed: int,
        seconds: float,
        faults: Sequence[Fault],
        *,
        workers: int = WORKERS,
        count: int = REQUESTS,
        tamper: Callable[[Cluster], None] | None = None,
        settle_s: float = SETTLE_S,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._seed, self._seconds, self._faults = seed, seconds, faults
        self._workers, self._count, self._tamper, self._say = workers, count, tamper, say
        self._settle_s = settle_s
        self._verdict = Verdict(seed)
        self._baselines: dict[str, int] = {}

    def go(self) -> Outcome:
        """Run it, in a directory of its own that is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="rf-") as name:
            directory = Path(name)
            messages = requests(self._seed, self._count)
            expected = undisturbed(directory, messages)
            self._say(
                f"{len(messages)} requests of {sum(len(told) for told, _ in expected.values())} tokens undisturbed"
            )
            return asyncio.run(self._run(directory, messages, expected))

    async def _run(self, directory: Path, messages: list[engine_pb2.GenerateRequest], expected: Expected) -> Outcome:
        verdict = self._verdict
        cluster = Cluster(directory, self._seed, verdict)
        observer = Observer(cluster, verdict)
        async with cluster.running():
            for name, pid in cluster.pids().items():
                self._note(name, pid)
            verdict.began += verdict.now_s()  # the run begins when everything serves
            clients = Clients(cluster, messages, expected, verdict, self._seed)
            working = asyncio.create_task(clients.run(self._workers))
            watching = asyncio.create_task(observer.watch())
            outcome = Outcome(self._seed, self._seconds, self._faults, verdict, observer.series, observer.pages, {})
            try:
                await self._disturb(cluster, working)
                cluster.heal()
                outcome.healed_at_s = verdict.now_s()
                clients.stop()
                await asyncio.wait_for(working, SETTLE_S)
                await observer.settle(self._settle_s)
            except TimeoutError:
                verdict.find("hung", f"{SETTLE_S:g} s after everything was healed, clients still wait")
            finally:
                for task in (working, watching):
                    task.cancel()
                for ended in await asyncio.gather(working, watching, return_exceptions=True):
                    if isinstance(ended, Exception):
                        verdict.find("harness", f"{type(ended).__name__}: {ended}")
            observer.look_at_processes()
            observer.judge(self._baselines)
            outcome.ended_at_s = verdict.now_s()
            for wire in WIRES:
                for what, count in cluster.calls[wire].done.items():
                    outcome.calls[what] = outcome.calls.get(what, 0) + count
        return outcome

    def _note(self, name: str, pid: int) -> None:
        if found := uses(pid):
            self._baselines[name] = found[1]

    async def _disturb(self, cluster: Cluster, working: asyncio.Task[None]) -> None:
        """Let the faults come at their times; return when the last is over and the time is up, or a client failed."""
        tasks = [asyncio.create_task(self._fault(cluster, fault)) for fault in self._faults]
        tasks.append(asyncio.create_task(self._in_the_middle(cluster)))
        every = asyncio.gather(*tasks)
        await asyncio.wait((every, working), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            every.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await every
            return
        await every

    async def _in_the_middle(self, cluster: Cluster) -> None:
        await asyncio.sleep(self._seconds / 2)
        if self._tamper is not None:
            while self._verdict.counts.get("tokens", 0) < TOLD:  # before that there may be nothing to tamper with
                await asyncio.sleep(0.05)
            self._tamper(cluster)
        await asyncio.sleep(self._seconds / 2)

    async def _fault(self, cluster: Cluster, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - self._verdict.now_s()))
        if fault.target in WIRES:
            await self._disturb_wire(cluster, fault)
        elif fault.kind == "hostile":
            self._verdict.did(fault, "begins")
            socket = cluster.nodes[fault.target].socket
            await Stranger(fault.target, socket, self._verdict, fault.seed).attack(fault.lasts_s)
            self._verdict.did(fault, "ended")
        else:
            async with cluster.nodes[fault.target].lock:
                await self._disturb_process(cluster, fault)
        self._say(f"{self._verdict.now_s():6.1f} s: {fault}")

    async def _disturb_process(self, cluster: Cluster, fault: Fault) -> None:
        node = cluster.nodes[fault.target]
        if not KINDS[fault.kind].ends_process:
            node.signal(signal.SIGSTOP)
            self._verdict.did(fault, "stopped")
            await asyncio.sleep(fault.lasts_s)
            node.signal(signal.SIGCONT)
            self._verdict.did(fault, "continued")
            return
        number = signal.SIGKILL if fault.kind.startswith("kill") else signal.SIGTERM
        self._verdict.did(fault, number.name)
        await node.end(number)
        await asyncio.sleep(fault.lasts_s)
        await node.start()
        self._verdict.did(fault, "started again")
        try:
            await node.until_serving()
        except AssertionError as error:
            self._verdict.find("not started", f"{node.name}: {str(error)[-3000:]}")
            return
        self._verdict.did(fault, "serves again")
        if node.service is not None:
            self._note(f"{node.name}.{node.runs}", node.service.pid)

    async def _disturb_wire(self, cluster: Cluster, fault: Fault) -> None:
        wire, calls = cluster.wires[fault.target], cluster.calls[fault.target]
        self._verdict.did(fault, "begins")
        if fault.kind == "delay":
            wire.delay_s = 0.02 + fault.seed % 100 / 1000
        elif fault.kind == "half-open":
            wire.hold()
        elif fault.kind == "black-hole":
            wire.swallow()
        elif fault.kind == "cut":
            wire.refuses = True
            wire.cut()
        else:
            calls.doing, calls.share = fault.kind, (0.2, 0.5, 1.0)[fault.seed % 3]
        await asyncio.sleep(fault.lasts_s)
        if fault.kind in ("delay", "half-open", "cut"):
            wire.heal()
        elif calls.doing == fault.kind:
            calls.heal()
        self._verdict.did(fault, "ended")
