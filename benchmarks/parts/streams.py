"""The cost of streaming: the engine's throughput with one streaming call per request, against the same requests
submitted and read by no one.

Runs real processes: a daemon, an engine, and the client of ``python -m services.engine bench``. Nothing is computed: a
step takes a fixed time with the interpreter lock released, as while a GPU computes, and its tokens are made up. Steps
are asynchronous, as they are with a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from benchmarks.parts.rows import Row
from benchmarks.parts.stand import ROOT, daemon, process
from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.engine import __main__ as engine_main
from services.engine import server
from services.engine.config import BUNDLED_MODEL
from services.engine.model.backend import ON
from services.engine.pages.source import PageCopy
from services.engine.sampling.result import Result
from services.engine.scheduling.step import Chunk
from services.kvcache.arena.host import default_directory

STREAMS, TOKENS, PROMPT, STEP_MS = 256, 400, 64, 10.0
#: More messages than tokens, so that each token has its own.
ALL = 1 << 20


class TimedFlight:
    """A step that is over at ``ends_at``, on the clock ``time.monotonic``."""

    #: Nothing here needs to know the tokens of the step before.
    leads = True

    def __init__(self, results: list[Result], ends_at: float) -> None:
        self._results, self._ends_at = results, ends_at

    def wait(self) -> list[Result]:
        """Returns once the step is over."""
        self.discard()
        return self._results

    def discard(self) -> None:
        """Returns once the step is over."""
        time.sleep(max(0.0, self._ends_at - time.monotonic()))


class TimedRunner:
    """Takes ``step_s`` for a step, one after another, and returns made-up tokens."""

    def __init__(self, step_s: float, *_: Any) -> None:
        self._step_s = step_s
        self._free_at = 0.0
        self._draw = random.Random(0)

    def run(self, step: Sequence[Chunk]) -> list[Result]:
        """Returns a token for each chunk that needs one."""
        return self.launch(step).wait()

    def launch(self, step: Sequence[Chunk]) -> TimedFlight:
        """A step that begins when those in flight are over, as on a device."""
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        results: list[Result] = [self._draw.randrange(300, 900) if chunk.samples else None for chunk in step]
        return TimedFlight(results, self._free_at)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Does nothing: the pages hold nothing."""


def measure(streams: int = STREAMS, tokens: int = TOKENS, step_ms: float = STEP_MS, pairs: int = 3) -> Iterator[Row]:
    """Run the three ways ``pairs`` times each, alternating. Returns medians; raises RuntimeError if a request fails."""
    ways: dict[str, tuple[int | None, Callable[[str, int, int], float]]] = {
        "submitted, read by nobody": (None, submitted),
        "streamed": (None, streamed),
        "streamed, a message a token": (ALL, streamed),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with daemon("--memory", "2GiB") as cache:
        for _ in range(pairs):
            for name, (messages, ask) in ways.items():
                with timed_engine(cache, streams, step_ms, messages) as address:
                    found[name].append(streams * tokens / ask(address, streams, tokens))
    unread = statistics.median(found["submitted, read by nobody"])
    for name, rates in found.items():
        rate = statistics.median(rates)
        detail = (
            f"to read by nobody; {streams} at once, steps of {step_ms:g} ms; {min(rates):,.0f} to {max(rates):,.0f}"
        )
        yield Row("streams", name, rate, "tokens/s", rate / unread, detail=detail)


@contextlib.contextmanager
def timed_engine(cache: str, streams: int, step_ms: float, messages_per_s: int | None) -> Iterator[str]:
    """The address of an engine that runs such steps."""
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as folder:
        address = f"unix:{folder}/engine.sock"
        words = [f"{step_ms:g}", "--listen", address, "--model", str(BUNDLED_MODEL), "--kvcache", cache]
        words += ["--max-batch", str(streams), "--max-step-tokens", "8192", "--async-steps", ON]
        words += [] if messages_per_s is None else ["--messages-per-s", str(messages_per_s)]
        with process("benchmarks.parts.streams", address, *words):
            yield address


def streamed(address: str, streams: int, tokens: int) -> float:
    """Seconds until each of this many calls has received its tokens."""
    words = ["--requests", str(streams), "--concurrency", str(streams), "--input-len", str(PROMPT)]
    command = [sys.executable, "-m", "services.engine", "bench", "--target", address, "--json", *words]
    done = subprocess.run([*command, "--output-len", str(tokens)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the client ended with {done.returncode}: {done.stderr[-400:]}")
    return float(json.loads(done.stdout)["seconds"])


def submitted(address: str, streams: int, tokens: int) -> float:
    """Seconds until each of this many submitted generations has ended. They run concurrently and are watched one after
    another, the last one first: by then the others have ended, or nearly so.
    """
    with grpc.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        requests = [
            pb.GenerateRequest(
                request_id=f"submitted-{at}",
                prompt=pb.Prompt(tokens=pb.TokenIds(ids=[at % 1000 + 1] * PROMPT)),
                stopping=pb.Stopping(max_tokens=tokens, ignore_eos=True),
            )
            for at in range(streams)
        ]
        began = time.perf_counter()
        asked = [stub.SubmitGeneration.future(pb.SubmitGenerationRequest(request=one)) for one in requests]
        for future in asked:
            future.result(60)
        for one in reversed(requests):
            *_, last = stub.WatchGeneration(pb.WatchGenerationRequest(request_id=one.request_id))
            if last.response.finish.usage.completion_tokens != tokens:
                raise RuntimeError(f"{one.request_id}: {last}")
        return time.perf_counter() - began


if __name__ == "__main__":
    step_s = float(sys.argv.pop(1)) / 1e3
    server.Engine = functools.partial(server.Engine, make_runner=functools.partial(TimedRunner, step_s))  # type: ignore[assignment,misc]
    sys.exit(engine_main.main())
