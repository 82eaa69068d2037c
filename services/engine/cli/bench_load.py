"""Generates load: requests of random lengths at random times, and the measurements of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import ServiceError
from services.engine.cli import client


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution over the integers from ``least`` to ``most``."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse ``N`` or ``N-M``. Raises ValueError."""
        first, dash, second = text.partition("-")
        if not (first.isdecimal() and (second.isdecimal() if dash else True)):
            raise ValueError(f"{text}: expected N or N-M")
        found = cls(int(first), int(second) if dash else int(first))
        if not 1 <= found.least <= found.most:
            raise ValueError(f"{text}: expected 1 or more, the smaller first")
        return found

    def draw(self, numbers: random.Random) -> int:
        """Draw one length."""
        return numbers.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when to send it, in seconds from the start."""

    at: float
    request: pb.GenerateRequest


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. The same plan and vocabulary size give the same requests; ``rate`` is in requests per second."""

    requests: int
    inputs: Lengths
    outputs: Lengths
    seed: int
    shared: int = 0
    rate: float | None = None
    ignore_eos: bool = False
    temperature: float | None = None

    def arrivals(self, vocab_size: int) -> Iterator[Arrival]:
        """The requests in order: random tokens, the first ``shared`` of which are common to all.

        With a rate, arrivals form a Poisson process; without one, all requests are due at once.
        """
        numbers = random.Random(self.seed)
        shared = [numbers.randrange(vocab_size) for _ in range(self.shared)]
        at = 0.0
        for _ in range(self.requests):
            length = self.inputs.draw(numbers)
            own = [numbers.randrange(vocab_size) for _ in range(max(0, length - self.shared))]
            request = pb.GenerateRequest(prompt=pb.Prompt(tokens=pb.TokenIds(ids=(shared + own)[:length])))
            request.stopping.max_tokens = self.outputs.draw(numbers)
            request.stopping.ignore_eos = self.ignore_eos
            request.sampling.seed = numbers.getrandbits(63)
            if self.temperature is not None:
                request.sampling.temperature = self.temperature
            if self.rate is not None:
                at += numbers.expovariate(self.rate)
            yield Arrival(at, request)


@dataclass(slots=True)
class Measured:
    """The measurements of one request. Times are in seconds; the first two count from when it was due.

    ``gaps`` are the inter-token latencies: tokens that arrive together split the time since the previous ones evenly.
    """

    first_token_s: float | None = None
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    usage: pb.Usage | None = None
    error: ServiceError | None = None


async def send(
    stub: Any, request: pb.GenerateRequest, target: client.Target, due: float, clock: Callable[[], float]
) -> Measured:
    """Send one request and measure it; latencies count from ``due``, a time on ``clock``."""
    sample, last = Measured(), due
    try:
        async for response in stub.Generate(request):
            now, came = clock(), len(response.token_ids)
            if came and sample.first_token_s is None:
                sample.first_token_s = now - due
                sample.gaps += [0.0] * (came - 1)
                last = now
            elif came:
                sample.gaps += [(now - last) / came] * came
                last = now
            sample.tokens += came
            if response.HasField("finish"):
                sample.usage = response.finish.usage
    except grpc.RpcError as error:
        sample.error = client.failure(error, target)
    sample.total_s = clock() - due
    return sample


async def run(
    arrivals: Iterator[Arrival],
    answer: Callable[[pb.GenerateRequest, float], Awaitable[Measured]],
    concurrency: int | None,
    done: Callable[[Measured], None],
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> float:
    """Send all arrivals and pass each measurement to ``done``. Returns the total duration in seconds.

    With ``concurrency``, at most that many requests are in flight, and one is due as soon as a slot is free. Without,
    each is sent when it is due, however many are in flight.
    """
    began = clock()

    async def one(request: pb.GenerateRequest, due: float) -> None:
        done(await answer(request, due))

    async def worker() -> None:
        for arrival in arrivals:
            await one(arrival.request, clock())

    async with asyncio.TaskGroup() as group:
        if concurrency is not None:
            for _ in range(concurrency):
                group.create_task(worker())
        else:
            for arrival in arrivals:
                await wait(max(0.0, began + arrival.at - clock()))
                group.create_task(one(arrival.request, began + arrival.at))
    return clock() - began
