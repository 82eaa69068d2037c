"""Clients: they stream, batch, submit and watch, give up, read slowly, try again, and compare every token."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from tests.chaos.cluster import Cluster
from tests.chaos.schedule import ENGINES
from tests.chaos.verdict import Expected, Verdict

#: A stream that is not over by then hangs: every fault is over sooner, and so is what it delays.
STREAM_S = 150.0
#: What a client may be told while something is wrong with the services. Everything else is a finding.
PASSING = {"QUEUE_FULL", "NOT_READY", "DRAINING", "KVCACHE_DOWN", "REQUEST_UNKNOWN", "TOO_MANY_WATCHERS"}
#: ... and what gRPC itself says of an engine that is gone.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Failed(Exception):
    """A generation ended with an error that is the services' to explain."""


class Told:
    """What came of one attempt at a request, by sample."""

    def __init__(self, verdict: Verdict, expected: Expected, index: int, where: str) -> None:
        self._verdict, self._expected, self._index, self._where = verdict, expected, index, where
        self.samples = {sample: (list[int](), "", False) for at, sample in expected if at == index}
        self.is_wrong = False
        self.is_resumed = False  # text that the last watcher was not told any more is in no later message

    def take(self, response: pb.GenerateResponse) -> None:
        """Compare what a response adds."""
        if self.is_wrong:
            return  # once is enough
        tokens, text, _ = self.samples[response.sample]
        tokens.extend(response.token_ids)
        text += response.text
        over = response.HasField("finish")
        self.samples[response.sample] = (tokens, text, over)
        key = (self._index, response.sample)
        compared = text if over and not self.is_resumed else None
        if not self._verdict.compare(self._where, self._expected, key, tokens, whole=over, text=compared):
            self.is_wrong = True
        self._verdict.count("tokens", len(response.token_ids))

    @property
    def total(self) -> int:
        """Tokens of all samples so far."""
        return sum(len(tokens) for tokens, _, _ in self.samples.values())

    @property
    def is_over(self) -> bool:
        """Whether each sample has its finish, or a wrong token makes the rest pointless."""
        return self.is_wrong or all(over for _, _, over in self.samples.values())

    def unfinished(self) -> str:
        """Samples without a finish."""
        return ", ".join(str(sample) for sample, (_, _, over) in self.samples.items() if not over)


class Clients:
    """``run`` keeps so many requests going until ``stop``; each is tried until it is whole."""

    def __init__(
        self, cluster: Cluster, messages: Sequence[pb.GenerateRequest], expected: Expected, verdict: Verdict, seed: int
    ) -> None:
        self._cluster, self._messages, self._expected, self._verdict = cluster, messages, expected, verdict
        self._seed = seed
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopping.set()

    async def run(self, workers: int) -> None:
        """Work until `stop`, and until what was begun then is whole."""
        await asyncio.gather(*(self._work(random.Random(f"client {self._seed} {at}")) for at in range(workers)))

    async def _work(self, draw: random.Random) -> None:
        while not self._stopping.is_set():
            how = draw.choice((self._stream, self._stream, self._submit, self._submit, self._batch))
            await how(draw)

    async def _tried(self, draw: random.Random, attempt: Any) -> None:
        """Make attempts until one returns, each at an engine of its own, with the pauses that the services ask for."""
        tries = 0
        while True:
            name, error = draw.choice(ENGINES), None
            try:
                await attempt(name, self._cluster.engine(name))
                return
            except grpc.aio.AioRpcError as failure:
                error = rpc.error_from(failure)
                if not (error.reason in PASSING or (error.reason == "UNKNOWN" and failure.code() in GONE)):
                    self._verdict.find("bad error", f"{name}: {failure.code().name} {error.reason}: {error.message}")
                    return
            except Failed:
                pass
            self._verdict.count("attempts cut")
            tries += 1
            if tries == 2000:
                self._verdict.find("starved", f"{tries} attempts came to nothing; the last at {name}: {error}")
                return
            await asyncio.sleep(min(1.0, (error.retry_after_s if error is not None else None) or 0.2))

    def _is_passing(self, name: str, status: Any) -> bool:
        error = rpc.error_from_status(status)
        if error.reason not in PASSING:
            self._verdict.find("bad error", f"{name}, in a message: {error.reason}: {error.message}")
        return error.reason in PASSING

    def _ended(self, told: Told, where: str) -> None:
        if told.is_wrong:
            return
        if not told.is_over:
            self._verdict.find("cut short", f"{where}: the stream ended well, and without samples {told.unfinished()}")
        self._verdict.count("streams whole")

    async def _stream(self, draw: random.Random) -> None:
        """Generate; some give up in the middle, some read slowly."""
        index = draw.randrange(len(self._messages))
        gives_up_at = draw.randint(1, 40) if draw.random() < 0.2 else None
        pause_s = draw.choice((0.0, 0.0, 0.0, 0.05))

        async def attempt(name: str, stub: Any) -> None:
            told = Told(self._verdict, self._expected, index, f"streamed from {name}")
            call = stub.Generate(self._messages[index], timeout=STREAM_S)
            async for response in call:
                told.take(response)
                if told.is_wrong or (gives_up_at is not None and told.total >= gives_up_at):
                    call.cancel()
                    self._verdict.count("streams given up")
                    return
                if pause_s:
                    await asyncio.sleep(pause_s)
            self._ended(told, f"request {index} streamed from {name}")

        await self._tried(draw, attempt)

    async def _batch(self, draw: random.Random) -> None:
        """BatchGenerate; what an item failed with is its own."""
        indexes = [draw.randrange(len(self._messages)) for _ in range(draw.randint(2, 4))]

        async def attempt(name: str, stub: Any) -> None:
            told = [Told(self._verdict, self._expected, index, f"in a batch of {name}") for index in indexes]
            failed = False
            request = pb.BatchGenerateRequest(requests=[self._messages[index] for index in indexes])
            async for item in stub.BatchGenerate(request, timeout=STREAM_S):
                if item.HasField("error"):
                    failed = self._is_passing(name, item.error) or failed
                    told[item.index].is_wrong = True
                else:
                    told[item.index].take(item.response)
            if failed:
                raise Failed
            for index, one in zip(indexes, told, strict=True):
                self._ended(one, f"request {index} in a batch of {name}")

        await self._tried(draw, attempt)

    async def _submit(self, draw: random.Random) -> None:
        """SubmitGeneration, and watchers that come back for the rest; at last the whole again, at once."""
        index = draw.randrange(len(self._messages))
        leaves_at = [draw.randint(1, 30) for _ in range(draw.randint(0, 2))]

        async def attempt(name: str, stub: Any) -> None:
            message = pb.GenerateRequest()
            message.CopyFrom(self._messages[index])
            message.request_id = uuid.uuid4().hex
            submission = pb.SubmitGenerationRequest(request=message)
            try:
                await stub.SubmitGeneration(submission, timeout=STREAM_S)
            except grpc.aio.AioRpcError as failure:
                if failure.code() not in GONE:
                    raise
                await asyncio.sleep(0.2)
                await stub.SubmitGeneration(submission, timeout=STREAM_S)  # the same, if it arrived
            told = Told(self._verdict, self._expected, index, f"submitted to {name}")
            leaving = list(leaves_at)
            while not told.is_over:
                await self._watch(name, stub, message.request_id, told, leaving)
            if told.is_wrong:
                return
            kept = await stub.GetGeneration(pb.GetGenerationRequest(request_id=message.request_id), timeout=STREAM_S)
            outputs = kept.generation.samples or [kept.generation]
            for sample, output in enumerate(outputs):
                where = f"kept by {name}"
                key, tokens = (index, sample), output.token_ids
                self._verdict.compare(where, self._expected, key, tokens, whole=True, text=output.text)
            self._ended(told, f"request {index} submitted to {name}")
            await stub.DeleteGeneration(pb.DeleteGenerationRequest(request_id=message.request_id), timeout=STREAM_S)

        await self._tried(draw, attempt)

    async def _watch(self, name: str, stub: Any, request_id: str, told: Told, leaving: list[int]) -> None:
        """Resume the watch after what was received, until the end or until it is time to leave."""
        told.samples = {sample: (tokens, text, False) for sample, (tokens, text, _) in told.samples.items()}
        counts = [len(tokens) for _, (tokens, _, _) in sorted(told.samples.items())]
        request = pb.WatchGenerationRequest(request_id=request_id)
        if len(counts) == 1:
            request.from_token = counts[0]
        else:
            request.from_tokens.extend(counts)
        leaves_at = told.total + leaving.pop() if leaving else None
        call = stub.WatchGeneration(request, timeout=STREAM_S)
        async for answer in call:
            if answer.HasField("error"):
                if not self._is_passing(name, answer.error):
                    told.is_wrong = True
                    return
                raise Failed
            told.take(answer.response)
            if told.is_wrong or (leaves_at is not None and told.total >= leaves_at):
                call.cancel()
                told.is_resumed = True
                self._verdict.count("watchers left")
                return
        if not told.is_over:
            self._verdict.find("cut short", f"{name}: a watch ended well, without samples {told.unfinished()}")
            told.is_wrong = True
