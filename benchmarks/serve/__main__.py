"""Latency and goodput as users see them: real processes, gRPC streams over many connections, and requests that arrive
by a Poisson process, whatever became of those before (an open loop).

    python -m benchmarks.serve --json FILE --plot serve.svg

finds the engine's capacity with a burst, measures at rates around it until fewer than half of the requests are good,
and kills the daemon in the middle of another run. Latencies count from the planned arrival. ``--engine vllm`` drives
the real vLLM in the same way. The exit status is 1 if a killed daemon lost a stream.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.parts import shapes
from benchmarks.serve import engines, plot, report, summary
from benchmarks.serve.engines import Serving
from benchmarks.serve.load import Load
from benchmarks.serve.plan import Plan
from benchmarks.serve.report import Report
from benchmarks.serve.summary import Kill, Limits, Run
from services.engine.config import BUNDLED_MODEL
from services.kvcache.arena.host import default_directory

OURS, VLLM = "ours", "vllm"
#: Of the capacity; then more, by `_STEP`, until the engine is saturated.
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)
_STEP, _MOST_MORE = 1.2, 6


class Measurement:
    """The runs of one engine."""

    def __init__(self, load: Load, plan: Plan, limits: Limits) -> None:
        self._load, self._plan, self._limits = load, plan, limits

    def warm_up(self) -> None:
        """Run a few requests that nothing is learned from."""
        self._load.run(dataclasses.replace(self._plan, burst=min(8, self._plan.burst)).at(None, "warm"))

    def burst(self) -> tuple[Run, float]:
        """All requests at once, and the capacity."""
        records, lags = self._load.run(self._plan.at(None, "burst"))
        return Run.of(None, records, lags, self._limits), summary.capacity(records)

    def at(self, rate: float) -> Run:
        """Arrivals at a rate."""
        records, lags = self._load.run(self._plan.at(rate, f"rate-{rate:.4f}"))
        return Run.of(rate, records, lags, self._limits)

    def rates(self, given: list[float], capacity: float) -> Iterator[Run]:
        """The runs at given rates or, without any, at rates up to saturation."""
        yield from map(self.at, given)
        if given:
            return
        rate, run = 0.0, None
        for share in SHARES:
            rate = share * capacity
            run = self.at(rate)
            yield run
        for _ in range(_MOST_MORE):
            if run is not None and run.saturated:
                return
            rate *= _STEP
            run = self.at(rate)
            yield run

    def killed(self, serving: Serving, rate: float) -> Kill | None:
        """The daemon is killed in the middle of the arrivals; None for an engine without one."""
        if (kill_daemon := serving.kill_daemon) is None:
            return None
        killed_at = serving_at = 0.0

        def kill(began: float) -> None:
            nonlocal killed_at, serving_at
            time.sleep(max(0.0, began + self._plan.seconds / 2 - time.monotonic()))
            killed_at, serving_at = (moment - began for moment in kill_daemon())

        records, lags = self._load.run(self._plan.at(rate, "killed"), kill)
        return Kill.of(killed_at, serving_at, records, Run.of(rate, records, lags, self._limits))


def measure(flags: argparse.Namespace, model: Path, folder: Path) -> Report:
    """Run everything; prints lines as they come."""
    if flags.engine == VLLM:
        starting = engines.vllm(flags.python, flags.python_path, model, json.loads(flags.vllm_args), flags.log)
    else:
        starting = engines.ours(model, shlex.split(flags.flags), shlex.split(flags.daemon_flags), flags.log)
    limits = Limits(flags.ttft_limit_ms / 1e3, flags.itl_limit_ms / 1e3)
    with starting as serving:
        plan = Plan(
            rate=None, seconds=flags.seconds, burst=flags.burst, seed=flags.seed, divisor=flags.divisor,
            output_divisor=flags.output_divisor, context=serving.model.max_context,
            vocab_size=serving.model.vocab_size, salt="", trace=str(flags.trace.resolve()) if flags.trace else "",
        )  # fmt: skip
        load = Load(serving.address, flags.generators, flags.connections, flags.request_limit, folder)
        measurement = Measurement(load, plan, limits)
        measurement.warm_up()
        print(report.heading(), flush=True)
        burst, capacity = None, None
        if not flags.rates:
            burst, capacity = measurement.burst()
            print(report.line(burst), flush=True)
        runs = []
        for run in measurement.rates(flags.rates, capacity or 0.0):
            print(report.line(run), flush=True)
            runs.append(run)
        kill = None
        if not flags.no_kill:
            unsaturated = [run.rate for run in runs if run.rate and not run.saturated]
            rate = flags.kill_rate or max(unsaturated, default=runs[0].rate or 1.0)
            kill = measurement.killed(serving, rate)
        if kill is not None:
            print(report.line(kill.run), flush=True)
            print(report.told(kill), flush=True)
        return Report(
            engine=flags.engine, backend=serving.model.backend, model=flags.shape or model.name,
            trace=flags.trace.name if flags.trace else "invented", seed=flags.seed, divisor=flags.divisor,
            output_divisor=flags.output_divisor, seconds=flags.seconds, connections=flags.connections,
            generators=flags.generators, cores=os.cpu_count() or 0, limits=limits, capacity=capacity, burst=burst,
            runs=runs, kill=kill,
        )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """All flags."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    made.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it into an SVG or PNG file; needs the extra bench"
    )
    made.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="draw these reports and run nothing")
    made.add_argument("--engine", choices=(OURS, VLLM), default=OURS)
    made.add_argument("--model", type=Path, default=BUNDLED_MODEL, metavar="FOLDER", help="default: the bundled one")
    made.add_argument("--shape", choices=shapes.SHAPES, help="instead: random weights of a known shape")
    made.add_argument("--trace", type=Path, metavar="FILE", help="of conversations (default: invented by --seed)")
    made.add_argument("--divisor", type=positive, default=64, metavar="N", help="of its inputs (default 64)")
    made.add_argument("--output-divisor", type=positive, default=8, metavar="N", help="of its outputs (default 8)")
    made.add_argument("--rates", type=rate, nargs="+", default=[], metavar="R", help="per second (default: found)")
    made.add_argument("--seconds", type=rate, default=20.0, metavar="S", help="of arrivals, of a run (default 20)")
    made.add_argument("--burst", type=positive, default=64, metavar="N", help="requests that find the capacity")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and tokens (default 0)")
    made.add_argument("--ttft-limit-ms", type=rate, default=1000.0, metavar="MS", help="a good request's first token")
    made.add_argument("--itl-limit-ms", type=rate, default=100.0, metavar="MS", help="and its mean time between tokens")
    made.add_argument("--connections", type=positive, default=16, metavar="N", help="of clients (default 16)")
    made.add_argument("--generators", type=positive, default=1, metavar="N", help="processes that send (default 1)")
    made.add_argument("--request-limit", type=rate, default=300.0, metavar="S", help="a longer request fails")
    made.add_argument("--no-kill", action="store_true", help="leave the daemon alone")
    made.add_argument("--kill-rate", type=rate, metavar="R", help="of that run (default: the highest not saturated)")
    made.add_argument("--flags", default="", metavar="WORDS", help="more flags of our engine, in one argument")
    made.add_argument("--daemon-flags", default="", metavar="WORDS", help="more flags of the daemon")
    made.add_argument("--python", default=sys.executable, metavar="FILE", help="with --engine vllm, which runs it")
    made.add_argument("--python-path", default="", metavar="PATHS", help="its PYTHONPATH, before our protos")
    made.add_argument("--vllm-args", default="{}", metavar="JSON", help="arguments of vLLM's AsyncEngineArgs")
    made.add_argument("--log", type=Path, metavar="FILE", help="append what the services log")
    return made


def positive(text: str) -> int:
    """A flag's whole number. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 1 or more")
    return int(text)


def rate(text: str) -> float:
    """A flag's number. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 < (found := float(text)) < float("inf"):
            return found
    raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a stream was lost."""
    flags = parser().parse_args(arguments)
    if flags.read:
        reports = [report.read(path) for path in flags.read]
    else:
        # In memory: generators must not wait for a disk, nor a shape's weights.
        with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as name:
            model = flags.model.resolve()
            if flags.shape:
                model = Path(name) / "model"
                shapes.write_folder(shapes.SHAPES[flags.shape], model, BUNDLED_MODEL / "tokenizer.json")
            reports = [measure(flags, model, Path(name))]
        if flags.json:
            reports[0].write(flags.json)
    if flags.plot:
        plot.draw(reports, flags.plot)
    return int(any(one.kill is not None and one.kill.lost > 0 for one in reports))


if __name__ == "__main__":
    # Whoever ends this process ends its services with it: vLLM's would keep the GPU's memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
