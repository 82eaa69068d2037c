"""An engine as a process that computes a step when the test lets it, and otherwise is the product as it is run.

``python -m tests.gated`` is ``python -m services.engine`` with a gate before the model: each step takes a byte out of a
pipe, and waits for one when there is none. Before that it puts one into another pipe, so that a test knows when the
engine is in a step that it has not computed. The engine's thread puts one there for each step that it launches, so that
a test knows when a step is in flight behind that one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from services.engine import __main__ as product
from services.engine import server
from services.engine.model.runner import Runner
from services.engine.sampling.result import Result
from services.engine.scheduling.step import Chunk, Flight
from tests.gpus import environment
from tests.polling import until
from tests.processes import START_S, Service, engine

PIPE = "TESTS_STEPS"
#: Behind the name of that pipe, the other's.
REACHED = ".reached"
#: Less than a pipe holds.
MANY = 30_000
AT_GATE, LAUNCHED = b"g", b"l"


class Steps:
    """The test's end of the pipe: at first no step is computed."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        os.mkfifo(f"{path}{REACHED}")
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._told = os.open(f"{path}{REACHED}", os.O_RDWR)
        self._let = self._reached = self._launched = 0
        self._closed = False

    def let(self, count: int = MANY) -> None:
        """Let so many more steps through."""
        if os.write(self._pipe, bytes(count)) != count:
            raise ValueError(f"the pipe has no room for {count} steps")
        self._let += count

    def hold(self) -> None:
        """Take back what was let and not computed."""
        with contextlib.suppress(BlockingIOError):
            while taken := os.read(self._pipe, MANY):
                self._let -= len(taken)

    def until_held(self, behind: int = 0) -> None:
        """Wait until all that was let is computed, and the engine is in a step that waits: after its last look at its
        lease, and before it reads or writes a page. ``behind`` steps are launched behind that one; on a GPU none is,
        since there the engine's thread itself waits at the gate, in the launch.
        """
        while self._reached <= self._let or (behind and self._launched < self._reached + behind):
            told = os.read(self._told, MANY)
            self._reached += told.count(AT_GATE)
            self._launched += told.count(LAUNCHED)

    def close(self) -> None:
        """Let all steps through that are still to come. Closing twice changes nothing."""
        if not self._closed:
            self._closed = True
            os.close(self._pipe)
            os.close(self._told)


@contextlib.contextmanager
def gated(
    directory: Path,
    daemon: str,
    *arguments: str,
    model: Path,
    name: str = "engine",
    base: Mapping[str, str] = os.environ,
    start_s: float = START_S,
) -> Iterator[Any]:
    """As ``tests.processes.engine``, and its steps: ``(service, steps)``. ``base`` is the environment it inherits."""
    pipe = directory / f"{name}.steps"
    with contextlib.closing(Steps(pipe)) as steps:
        surroundings = {**environment(base), PIPE: str(pipe)}
        with engine(
            directory,
            daemon,
            *arguments,
            model=model,
            name=name,
            wait=False,
            environment=surroundings,
            module="tests.gated",
        ) as service:
            yield service.wait_serving(timeout_s=start_s), steps


def until_live(service: Service, samples: int) -> None:
    """Wait until an engine knows of so many samples that have not ended."""
    stub = engine_pb2_grpc.EngineServiceStub(service.channel)

    def live() -> bool:
        stats = stub.GetStats(engine_pb2.GetStatsRequest())
        return bool(stats.running_requests + stats.queued_requests >= samples)

    until(live)


class GatedRunner(Runner):
    """A runner that takes a byte for a step; once nobody holds the pipe's other end it takes none."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pipe = os.open(os.environ[PIPE], os.O_RDONLY)
        # To write alone would fail once nobody reads; and nobody may for as long as the test runs.
        self._told = os.open(os.environ[PIPE] + REACHED, os.O_RDWR | os.O_NONBLOCK)

    def run(self, step: Sequence[Chunk]) -> list[Result]:
        self._tell(LAUNCHED)
        return super().run(step)

    def launch(self, step: Sequence[Chunk]) -> Flight:
        flight = super().launch(step)
        self._tell(LAUNCHED)
        return flight

    def _computed(self, *given: Any) -> Any:
        self._tell(AT_GATE)
        os.read(self._pipe, 1)
        return super()._computed(*given)

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._told, what)


if __name__ == "__main__":
    server.Engine = functools.partial(server.Engine, make_runner=GatedRunner)  # type: ignore[assignment,misc]
    sys.exit(product.main())
