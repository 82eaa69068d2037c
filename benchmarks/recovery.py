"""Seconds from a SIGKILL until all is well: of the engine, until its pages are free for others; of the daemon, until
the next token of the streams that were running.

Real processes on the bundled model: a daemon, and an engine under a batch of streams. What was killed is started again
at once, as a supervisor would, and how long its start takes is measured beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.parts.rows import Row, as_json, line
from benchmarks.parts.stand import process
from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.engine.config import BUNDLED_MODEL
from services.kvcache.arena.host import default_directory

STREAMS, TOKENS = 8, 400
LIMIT_S = 120.0
#: Beyond the start of a process, which is the machine's: what users may expect, in seconds.
BARS_S = {"engine": 3.0, "daemon": 5.0}


class Stream:
    """A stream, and when its messages came."""

    def __init__(self, stub: Any, seed: int) -> None:
        self.arrivals: list[float] = []
        self.failure: grpc.RpcError | None = None
        self._call = stub.Generate(
            engine_pb2.GenerateRequest(
                prompt=engine_pb2.Prompt(text=f"Citizen {seed}:\n"),
                sampling=engine_pb2.Sampling(temperature=1, seed=seed),
                stopping=engine_pb2.Stopping(max_tokens=TOKENS, ignore_eos=True),
            ),
            timeout=LIMIT_S,
        )
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._call:
                if response.token_ids:
                    with self._changed:
                        self.arrivals.append(time.perf_counter())
                        self._changed.notify_all()
        except grpc.RpcError as failure:
            self.failure = failure
        with self._changed:
            self._changed.notify_all()

    def until(self, messages: int) -> None:
        """Wait for so many messages. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.arrivals) >= messages, LIMIT_S):
                raise TimeoutError(f"a stream had {len(self.arrivals)} messages after {LIMIT_S:g} s: {self.failure}")

    def finish(self) -> None:
        """Read it to its end. Raises the error that it ended with."""
        self._thread.join(LIMIT_S)
        if self.failure is not None:
            raise self.failure

    def silence_after(self, moment: float) -> float:
        """Seconds from a moment until the end of the longest pause that ended after it."""
        pauses = [
            (later - earlier, later)
            for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)
            if later > moment
        ]
        return max(pauses)[1] - moment


class Pair:
    """The addresses and starts of a daemon and an engine in a directory."""

    def __init__(self, folder: Path) -> None:
        self._daemon, self._engine = f"unix:{folder}/k.sock", f"unix:{folder}/e.sock"
        self._arena = folder / "arena"
        self.starts: dict[str, list[float]] = {"daemon": [], "engine": []}

    @contextlib.contextmanager
    def daemon(self) -> Iterator[subprocess.Popen[bytes]]:
        """The daemon, once it serves."""
        words = ["--listen", self._daemon, "--arena-dir", str(self._arena), "--memory", "64MiB"]
        with self._started("daemon", process("services.kvcache", self._daemon, *words)) as started:
            yield started

    @contextlib.contextmanager
    def engine(self) -> Iterator[subprocess.Popen[bytes]]:
        """The engine, once it serves."""
        words = ["--listen", self._engine, "--model", str(BUNDLED_MODEL), "--kvcache", self._daemon]
        with self._started("engine", process("services.engine", self._engine, *words)) as started:
            yield started

    @contextlib.contextmanager
    def _started(self, name: str, starting: Any) -> Iterator[subprocess.Popen[bytes]]:
        began = time.perf_counter()
        with starting as started:
            self.starts[name].append(time.perf_counter() - began)
            yield started

    @contextlib.contextmanager
    def streams(self) -> Iterator[list[Stream]]:
        """Streams on the engine, each under way."""
        with grpc.insecure_channel(self._engine) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            streams = [Stream(stub, seed) for seed in range(STREAMS)]
            for stream in streams:
                stream.until(20)
            yield streams

    @contextlib.contextmanager
    def pool(self) -> Iterator[Callable[[], kvcache_pb2.PoolStats]]:
        """What asks for the counts of the daemon's pool."""
        with grpc.insecure_channel(self._daemon) as channel:
            stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)

            def ask() -> kvcache_pb2.PoolStats:
                [pool] = stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
                return pool

            yield ask


def kill(victim: subprocess.Popen[bytes]) -> float:
    """Kill a process; the moment of it."""
    moment = time.perf_counter()
    victim.kill()
    victim.wait()
    return moment


def engine_killed(pair: Pair) -> float:
    """Seconds until none of its pages is held or quarantined."""
    with pair.engine() as victim, pair.streams(), pair.pool() as pool:
        if not pool().held_pages:
            raise RuntimeError("the engine holds no page: nothing would be measured")
        moment = kill(victim)
        while (now := pool()).held_pages or now.quarantined_pages:
            if time.perf_counter() - moment > LIMIT_S:
                raise TimeoutError(f"pages are out of use {LIMIT_S:g} s after their engine was killed: {now}")
        return time.perf_counter() - moment


def daemon_killed(pair: Pair, daemon: subprocess.Popen[bytes], rest: contextlib.ExitStack) -> float:
    """Seconds until the last of the streams goes on. The new daemon runs until ``rest`` is closed."""
    with pair.engine(), pair.streams() as streams:
        moment = kill(daemon)
        rest.enter_context(pair.daemon())
        for stream in streams:
            stream.finish()
        return max(stream.silence_after(moment) for stream in streams)


def measure(rounds: int) -> Iterator[Row]:
    """A row for each service: the median of the rounds; its ratio is to the bar and the start of a process."""
    found: dict[str, list[float]] = {"engine": [], "daemon": []}
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as name:
        pair = Pair(Path(name))
        for _ in range(rounds):
            with pair.daemon() as daemon, contextlib.ExitStack() as rest:
                found["engine"].append(engine_killed(pair))
                found["daemon"].append(daemon_killed(pair, daemon, rest))
        what = {"engine": "its pages free for others", "daemon": "the next token of all streams"}
        for service, times in found.items():
            start = statistics.median(pair.starts[service])
            # A killed engine's pages wait for no new one.
            bar = BARS_S[service] + (start if service == "daemon" else 0.0)
            detail = f"{what[service]}; {min(times):.2f} to {max(times):.2f} s; a start takes {start:.2f} s"
            middle = statistics.median(times)
            yield Row("recovery", f"{service} killed", middle, "s", middle / bar, 1.0, most=True, detail=detail)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns the exit status: 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="kills of each service (default 5)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    flags = parser.parse_args(arguments)
    missed = False
    for row in measure(flags.rounds):
        print(as_json(row) if flags.json else line(row), flush=True)
        missed = missed or row.missed
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
