"""An engine in this process, over its real socket, with the bundled model and faults in the test's hands."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common import rpc
from services.common.errors import ServiceError
from services.engine.config import Config
from services.engine.model.runner import Runner
from services.engine.sampling.result import Result
from services.engine.scheduling.step import Chunk
from services.engine.server import Engine
from tests.kvcache.conftest import Running
from tests.polling import until


class Gate(Runner):
    """Lets steps through: all of them, or, once ``hold`` was called, none until ``release``.

    ``reached`` says that a step stands before a gate that is shut.
    """

    def __init__(self, model: Any, memory: Callable[[], Any]) -> None:
        super().__init__(model, memory)
        self.reached = threading.Event()
        self.fault: Callable[[Sequence[Chunk]], None] = lambda step: None
        self._changed = threading.Condition()
        self._passes = math.inf  # steps that may still go through

    def hold(self) -> None:
        self._let(0)

    def release(self) -> None:
        self._let(math.inf)

    def step(self) -> None:
        """Let one step through, and no other until ``release``; wait until the next one has arrived."""
        self._let(1)
        if not self.reached.wait(60):
            raise TimeoutError("there was no other step")

    def _let(self, passes: float) -> None:
        with self._changed:
            if self._passes or passes:  # else one may stand there already, and still does
                self.reached.clear()
            self._passes = passes
            self._changed.notify_all()

    def run(self, step: Sequence[Chunk]) -> list[Result]:
        self._pass(step)
        return super().run(step)

    def _computed_behind(self, work: Any, *given: Any) -> Any:
        self._pass(work.step)
        return super()._computed_behind(work, *given)

    def _pass(self, step: Sequence[Chunk]) -> None:
        with self._changed:
            if not self._passes:
                self.reached.set()
                if not self._changed.wait_for(lambda: self._passes > 0, 60):
                    raise TimeoutError("nobody released the gate")
            self._passes -= 1
        self.fault(step)


class RunningEngine:
    """The engine's loop runs in a thread; ``gate`` is between the scheduler and the model."""

    def __init__(self, directory: Path, *flags: str, kvcache: str = "local") -> None:
        listen = f"unix:{directory}/e.sock"
        self.address = listen
        self.gate: Gate | None = None
        config = Config.read(["--listen", listen, "--kvcache", kvcache, "--grace", "5", *flags], {})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self.call(self._make(config))
        self.channel = grpc.insecure_channel(listen)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.stopped = False

    async def _make(self, config: Config) -> Engine:
        def make_runner(model: Any, memory: Callable[[], Any], *rest: Any) -> Gate:
            self.gate = Gate(model, memory)
            return self.gate

        return Engine(config, make_runner=make_runner)

    def call(self, coroutine: Any) -> Any:
        """Run on the engine's loop and wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def begin(self, coroutine: Any) -> Any:
        """Run on the engine's loop and do not wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self) -> RunningEngine:
        self.call(self.engine.start())
        return self

    @property
    def steps(self) -> Gate:
        if self.gate is None:
            raise AssertionError("not started")
        return self.gate

    def until_live(self, count: int) -> None:
        """Wait until so many requests are live, and the engine's thread knows of each."""

        async def live() -> int:  # between two turns of the calls: each makes its request known and tells the thread
            return len(self.engine.streams)

        until(lambda: self.call(live()) >= count)

    def until_told(self, messages: int) -> None:
        """Wait until so many messages lie before the engine's thread, which stands still."""
        loop = self.engine.loop
        assert loop is not None
        until(lambda: loop._inbox.qsize() >= messages)

    def idle(self) -> None:
        """Wait until no request is live, then check that nothing is held."""
        self.call(asyncio.wait_for(self.engine.streams.until_none(), 60))
        stats = self.stub.GetStats(pb.GetStatsRequest())
        assert (stats.running_requests, stats.queued_requests, stats.held_pages) == (0, 0, 0)

    def settle(self) -> None:
        """Undo what a test did to the steps, and wait until no request is live."""
        self.steps.fault = lambda step: None
        self.steps.release()
        self.idle()

    def stop(self, grace_s: float = 5.0) -> None:
        if not self.stopped:
            self.stopped = True
            self.call(self.engine.stop(grace_s))

    def close(self) -> None:
        if self.gate is not None:
            self.gate.release()
        self.stop(0.0)
        self.channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def served_by_a_daemon(tmp_path: Path, *flags: str) -> tuple[RunningEngine, Running]:
    """An engine on a daemon's pages, 64 of them."""
    for name in ("k", "e"):
        (tmp_path / name).mkdir()
    daemon = Running(tmp_path / "k", "--memory", "64MiB")
    address = str(daemon.config.listeners[0])
    return RunningEngine(tmp_path / "e", "--pool-pages", "64", *flags, kvcache=address).start(), daemon


def refused(call: Callable[[], Any]) -> ServiceError:
    """The error that a call, or the stream it begins, ends with."""
    try:
        answer = call()
        if not hasattr(answer, "DESCRIPTOR"):
            list(answer)
    except grpc.RpcError as failure:
        return rpc.error_from(failure)
    raise AssertionError("it was not refused")
