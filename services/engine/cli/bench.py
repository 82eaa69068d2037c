"""``python -m services.engine bench``: load a running engine and report throughput and latency."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import threading
import time
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.engine.cli import bench_load, client
from services.engine.cli.bench_load import Lengths, Measured, Plan
from services.engine.cli.bench_report import lines, report
from services.engine.cli.progress import Progress
from services.engine.cli.request_flags import Unfit

NAME = "bench"

MAX_REQUESTS, MAX_CONCURRENCY = 1_000_000, 4096
MAX_SEED = 1 << 64


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if a request failed."""
    flags = _parser().parse_args(arguments)
    try:
        plan = _plan(flags)
    except Unfit as unfit:
        client.say(NAME, str(unfit))
        return 2

    def body(stub: Any) -> int:
        model = stub.GetModel(pb.GetModelRequest())
        if plan.inputs.most >= model.max_context:
            client.say(NAME, f"--input-len {flags.input_len}: the context of {model.model_id} is {model.max_context}")
            return 2
        progress = Progress(sys.stderr, plan.requests)
        try:
            samples, seconds = asyncio.run(
                _run(client.reached(flags), plan, model.vocab_size, _concurrency(flags), progress)
            )
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error
        finally:
            progress.close()
        summary = report(samples, seconds)
        print(json.dumps(summary, indent=2) if flags.json else "\n".join(lines(summary)))
        failures = [sample.error for sample in samples if sample.error is not None]
        if failures:
            client.say(NAME, f"{len(failures)} of {len(samples)} failed; the first: {client.describe(failures[0])}")
        return 1 if failures else 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


async def _run(
    target: client.Target, plan: Plan, vocab_size: int, concurrency: int | None, progress: Progress
) -> tuple[list[Measured], float]:
    samples: list[Measured] = []
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)

    def done(sample: Measured) -> None:
        samples.append(sample)
        progress.add(failed=sample.error is not None, tokens=sample.tokens, running=True)

    async with client.connect_async(target) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        arrivals = plan.arrivals(vocab_size)

        async def answer(request: pb.GenerateRequest, due: float) -> Measured:
            progress.begin()
            return await bench_load.send(stub, request, target, due, time.monotonic)

        seconds = await bench_load.run(arrivals, answer, concurrency, done)
    return samples, seconds


def _concurrency(flags: argparse.Namespace) -> int | None:
    if flags.rate is not None:
        return None
    return min(flags.concurrency or 8, flags.requests)


def _plan(flags: argparse.Namespace) -> Plan:
    for name, least, most in (
        ("requests", 1, MAX_REQUESTS),
        ("concurrency", 1, MAX_CONCURRENCY),
        ("seed", 0, MAX_SEED - 1),
        ("shared", 0, math.inf),
    ):
        value = getattr(flags, name)
        if value is not None and not least <= value <= most:
            raise Unfit(f"--{name} {value}: expected {least}" + (f" to {most}" if most < math.inf else " or more"))
    if flags.rate is not None and not 0 < flags.rate < math.inf:
        raise Unfit(f"--rate {flags.rate:g}: expected more than 0 requests a second")
    if flags.temperature is not None and not 0 <= flags.temperature <= 100:
        raise Unfit(f"--temperature {flags.temperature:g}: expected 0 to 100")
    found = {}
    for name in ("input_len", "output_len"):
        try:
            found[name] = Lengths.parse(getattr(flags, name))
        except ValueError as error:
            raise Unfit(f"--{name.replace('_', '-')} {error}") from error
    if flags.shared > found["input_len"].least:
        raise Unfit(f"--shared {flags.shared}: exceeds the minimum of --input-len {flags.input_len}")
    return Plan(
        requests=flags.requests,
        inputs=found["input_len"],
        outputs=found["output_len"],
        seed=flags.seed,
        shared=flags.shared,
        rate=flags.rate,
        ignore_eos=flags.ignore_eos,
        temperature=flags.temperature,
    )


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(
        NAME,
        "Send requests with random tokens to a running engine and report throughput, time to first token, "
        "inter-token latency, end-to-end latency and queue time (mean, p50, p90, p99), the share of prompt tokens "
        "served from the prefix cache, and errors by reason. Latencies count from when a request was due.",
    )
    parser.add_argument(
        "--requests", type=int, default=100, metavar="N", help="number of requests (default %(default)s)"
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=int, metavar="N", help="requests in flight at a time (default 8)")
    pace.add_argument(
        "--rate", type=float, metavar="X", help="X requests a second, Poisson arrivals, however many are in flight"
    )
    parser.add_argument(
        "--input-len", default="128", metavar="N[-M]", help="prompt tokens, drawn uniformly (default %(default)s)"
    )
    parser.add_argument(
        "--output-len", default="64", metavar="N[-M]", help="maximum output tokens (default %(default)s)"
    )
    parser.add_argument(
        "--shared",
        type=int,
        default=0,
        metavar="N",
        help="length of the prefix that all prompts share (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed gives the same load (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="ignore end-of-sequence: generate exactly --output-len tokens"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, times in seconds")
    return parser
