"""A run: generators as processes, started together, and what they wrote down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.stand import ROOT
from benchmarks.serve import record
from benchmarks.serve.generator import Job
from benchmarks.serve.plan import Plan
from benchmarks.serve.record import Lag, Record

#: Between the moment that generators are given the start and the start.
HEAD_START_S = 0.2
READY_S = 180.0


@dataclass(frozen=True, slots=True)
class Load:
    """Generators of runs against one engine: so many processes, and connections of all of them."""

    address: str
    generators: int
    connections: int
    limit_s: float
    folder: Path

    def run(
        self, plan: Plan, meanwhile: Callable[[float], None] = lambda began: None
    ) -> tuple[list[Record], list[Lag]]:
        """Do a plan; ``meanwhile`` is called at once with its start on the clock ``time.monotonic``.

        Raises RuntimeError if a generator fails.
        """
        files = [self.folder / f"{plan.salt}-{part}.json" for part in range(self.generators)]
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(self._start(plan, part, file)) for part, file in enumerate(files)]
            for one in running:
                if one.stdout is None or one.stdout.readline() != "ready\n":
                    raise RuntimeError(f"a generator ended before the start: {one.wait(READY_S)}")
            began = time.monotonic() + HEAD_START_S
            for one in running:
                if one.stdin is not None:
                    one.stdin.write(f"{began!r}\n")
                    one.stdin.close()
            meanwhile(began)
            for one in running:
                if status := one.wait():
                    raise RuntimeError(f"a generator ended with {status}")
        found = [record.read(file) for file in files]
        return [one for records, _ in found for one in records], [lag for _, lag in found]

    @contextlib.contextmanager
    def _start(self, plan: Plan, part: int, out: Path) -> Iterator[subprocess.Popen[str]]:
        connections = max(1, self.connections // self.generators)
        job = Job(self.address, dataclasses.asdict(plan), part, self.generators, connections, self.limit_s, str(out))
        command = [sys.executable, "-m", "benchmarks.serve.generator", json.dumps(dataclasses.asdict(job))]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as started:
            try:
                yield started
            finally:
                if started.poll() is None:
                    started.kill()
