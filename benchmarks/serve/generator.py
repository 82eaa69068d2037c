"""Sends a share of a plan's requests to an engine, each when it is due, whatever became of those before it.

``python -m benchmarks.serve.generator JOB`` runs as a process of its own, so that neither the engine nor another
generator waits for its interpreter. JOB is a `Job` as JSON. It prints ``ready``, reads the start on the clock
``time.monotonic`` from standard input, and writes its `Record`s.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.serve import record
from benchmarks.serve.plan import Plan
from benchmarks.serve.record import Lag, Record
from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.serving import MAX_MESSAGE_BYTES
from services.engine.cli.client import Target, failure

#: How often the loop's own lateness is measured.
WAKE_S = 0.005
_METHOD = "/rocmforge.engine.v1.EngineService/Generate"


@dataclass(frozen=True, slots=True)
class Job:
    """A generator's work: the requests of ``plan`` whose number is ``part`` modulo ``parts``, over ``connections``.

    A request that takes more than ``limit_s`` seconds fails.
    """

    address: str
    plan: dict[str, Any]
    part: int
    parts: int
    connections: int
    limit_s: float
    out: str


def message(plan: Plan, prompt: tuple[int, ...], tokens: int) -> bytes:
    """A request, serialised before the run so that this costs no time during it."""
    return pb.GenerateRequest(
        prompt=pb.Prompt(tokens=pb.TokenIds(ids=prompt)),
        sampling=pb.Sampling(temperature=0),
        stopping=pb.Stopping(max_tokens=tokens, ignore_eos=True),
        cache_salt=plan.salt,
    ).SerializeToString()


async def follow(call: Any, one: Record, began: float, target: Target) -> None:
    """Read a call to its end."""
    try:
        async for response in call:
            if count := len(response.token_ids):
                one.arrivals.append((time.monotonic() - began, count))
            if response.HasField("finish"):
                one.prompt_tokens = response.finish.usage.prompt_tokens
                one.cached_tokens = response.finish.usage.cached_tokens
    except grpc.RpcError as error:
        one.error = failure(error, target).reason
    one.end = time.monotonic() - began
    if not one.error and one.tokens != one.wanted:
        one.error = "TOKENS_MISSING"


async def watch(lag: Lag) -> None:
    """Measure by how much the loop wakes late, until cancelled."""
    while True:
        due = time.monotonic() + WAKE_S
        await asyncio.sleep(WAKE_S)
        lag.wakes.append(time.monotonic() - due)


async def run(job: Job) -> None:
    """Do a job."""
    plan, target = Plan(**job.plan), Target(job.address)
    mine = list(enumerate(plan.requests()))[job.part :: job.parts]
    sent = [(Record(number, due, one.tokens), message(plan, one.prompt, one.tokens)) for number, (due, one) in mine]
    options = [
        # Channels to one address share a connection otherwise.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]
    channels = [grpc.aio.insecure_channel(job.address, options=options) for _ in range(job.connections)]
    for channel in channels:
        channel.get_state(try_to_connect=True)
    await asyncio.wait_for(asyncio.gather(*(channel.channel_ready() for channel in channels)), 60)
    calls = [
        channel.unary_stream(_METHOD, response_deserializer=pb.GenerateResponse.FromString) for channel in channels
    ]
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    began = float(await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline))
    lag, used = Lag(), time.process_time()
    watching = asyncio.create_task(watch(lag))
    async with asyncio.TaskGroup() as group:
        for place, (one, request) in enumerate(sent):
            # Also where it is late already: answers are read between any two requests. The loop may wake early.
            await asyncio.sleep(0)
            while (early := began + one.due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            one.sent = time.monotonic() - began
            lag.sends.append(one.sent - one.due)
            call = calls[place % len(calls)](request, timeout=job.limit_s)
            group.create_task(follow(call, one, began, target))
    watching.cancel()
    lag.busy = (time.process_time() - used) / max(time.monotonic() - began, 1e-9)
    record.write(Path(job.out), [one for one, _ in sent], lag)
    for channel in channels:
        await channel.close()


def main() -> int:
    """Returns the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(Job(**json.loads(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
