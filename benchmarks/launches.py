"""The host time of launching kernels and products, per operation and per step, whatever the GPU time.

    eval "$(python -m tests.simulators.rocm.standin idle)"; python -m benchmarks.launches

measures it without a GPU, with CuPy's own ROCm wheel on a stand-in runtime that checks launches and runs none of them;
without the first command it measures on this machine's GPU. Times are CPU times of the launching thread. On the
stand-in, only ratios are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import logging
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import structlog

from benchmarks.parts import rows, shapes
from benchmarks.parts.rows import Row as Found
from benchmarks.parts.stand import PAGE_SIZE, Pages, Stand
from benchmarks.step import GREEDY
from kernels.device import module
from kernels.device.recording import Tape, writing
from kernels.linear import gemm
from services.engine.model.backend import OFF, TAPES
from services.engine.model.batch import Row
from services.engine.sampling.params import sample

CONTEXT, WARM, STEPS, ROUNDS, LAYERS = 1024, 5, 200, 5, 4
#: Rows of a step, and tokens of each.
KINDS = {"decode of 1": (1, 1), "decode of 16": (16, 1), "a prompt's last 16 tokens": (1, 16)}
#: An embedding's size costs the host nothing.
VOCAB_SIZE = 8192


class TimedOps(shapes.RandomOps):
    """A backend that measures the host's time to queue the layers of the last step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.queued_s = 0.0

    def computed(self, compute: Callable[[], Any], pages: Any, model: Hashable) -> Any:
        """A step."""
        began = time.thread_time()
        try:
            return super().computed(compute, pages, model)
        finally:
            self.queued_s = time.thread_time() - began


@dataclasses.dataclass(frozen=True, slots=True)
class Took:
    """Medians of steps, in seconds: to queue the layers, and in all until the tokens are known."""

    queued_s: float
    step_s: float


class Steps:
    """At most ``steps`` steps of ``batch`` rows of ``tokens`` each, after at least `CONTEXT` keys."""

    def __init__(self, stand: Stand, pages: Pages, batch: int, tokens: int, steps: int) -> None:
        """``stand`` is of `TimedOps`."""
        self._stand, self._ops, self._pages, self._tokens = stand, cast(TimedOps, stand.backend.ops), pages, tokens
        each = pages_of(1, tokens, steps)
        self._tables = [range(row * each, (row + 1) * each) for row in range(batch)]
        self._done = 0

    def step(self) -> Took:
        """One step."""
        at, batch, model = CONTEXT + self._done, len(self._tables), self._stand.model
        tokens = range(at % 900, at % 900 + self._tokens)
        step = [Row(tokens, at, table, 1) for table in self._tables]
        began = time.thread_time()
        logits = model.forward(step, self._pages.memory())
        sample(logits, [GREEDY] * batch, [at + self._tokens] * batch, draw=self._stand.draw)
        self._stand.backend.finish()
        self._done += 1
        return Took(self._ops.queued_s, time.thread_time() - began)

    def steps(self, count: int) -> Took:
        """The medians of this many steps."""
        took = [self.step() for _ in range(count)]
        return Took(statistics.median(one.queued_s for one in took), statistics.median(one.step_s for one in took))


def pages_of(batch: int, tokens: int, steps: int) -> int:
    """Pages for `Steps`."""
    return batch * -(-(CONTEXT + tokens + steps) // PAGE_SIZE)


def operations(steps: Steps) -> int:
    """The numbers of kernels and products that a step queues: for its layers, for the logits and for sampling."""
    writing.tape = Tape()
    try:
        steps.step()
        return len(writing.tape)
    finally:
        writing.tape = None


def bare() -> Iterator[Found]:
    """Single kernels and products, launched as in eager steps."""
    import cupy

    x, weight, out = (cupy.empty(shape, cupy.uint16) for shape in ((1, 2048), (1024, 1024), (1, 1024)))
    compiled, few = module.load("activation", {"RF_TYPE": "BF16"}), x[:, :1024]
    for name, call in (
        ("a kernel", lambda: compiled.launch("silu_mul", (1, 1), 256, [x, out, np.int32(1024)])),
        ("a product", lambda: gemm.linear(few, weight, out)),
    ):
        yield Found("launches", f"{name} alone", _least(call) * 1e6, "us")


def _least(call: Callable[[], None], times: int = 500, runs: int = 9) -> float:
    """Seconds of a call."""
    took = []
    for _ in range(runs):
        began = time.thread_time()
        for _ in range(times):
            call()
        took.append((time.thread_time() - began) / times)
    return min(took)


def measure(layers: int, steps: int, profile: cProfile.Profile | None = None) -> Iterator[Found]:
    """Rows for each of `KINDS`: eager steps and steps from tapes, alternating. ``profile`` profiles the latter."""
    shape = dataclasses.replace(shapes.QWEN3_600M, layers=layers, vocab_size=VOCAB_SIZE)
    eager, taped = (Stand.on_gpu(shape, replay=how, make_ops=TimedOps) for how in (OFF, TAPES))
    each = -(-steps // ROUNDS)
    most = 2 + WARM + ROUNDS * each
    for kind, (batch, tokens) in KINDS.items():
        with eager.local(pages_of(batch, tokens, most)) as pages:
            plain, replayed = (Steps(stand, pages, batch, tokens, most) for stand in (eager, taped))
            plain.steps(WARM)
            count = operations(plain)
            replayed.steps(1 + WARM)
            before, after = list[Took](), list[Took]()
            for _ in range(ROUNDS):
                before.append(plain.steps(each))
                with profile or contextlib.nullcontext():
                    after.append(replayed.steps(each))
        slow, fast = _least_of(before), _least_of(after)
        name = f"{kind}, {layers} layers"
        for how, took in (("one by one", slow), ("from tapes", fast)):
            per, detail = took.queued_s / count * 1e6, f"{count} operations; a whole step {took.step_s * 1e6:.0f} us"
            yield Found("launches", f"{name}, {how}", per, "us", slow.queued_s / took.queued_s, detail=detail)


def _least_of(took: Sequence[Took]) -> Took:
    return Took(min(one.queued_s for one in took), min(one.step_s for one in took))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help=f"of the model (default {LAYERS})")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each kind (default {STEPS})")
    parser.add_argument("--profile", action="store_true", help="tell where the time of the replayed steps goes, too")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")
    flags = parser.parse_args(arguments)
    for name in ("layers", "steps"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name} {getattr(flags, name)}: must be at least 1")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    profile = cProfile.Profile() if flags.profile else None
    for found in (*bare(), *measure(flags.layers, flags.steps, profile)):
        print(rows.as_json(found) if flags.json else rows.line(found), flush=True)
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
