"""Proto to domain and back; nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import duration_pb2

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services import rpc
from services.engine.arena import page_bytes_of
from services.engine.intake import check_name, check_tokens, read_request, tokenize
from services.engine.loop import EngineLoop, Event
from services.engine.modelconfig import ModelConfig
from services.engine.pagesource import Geometry
from services.engine.sequence import FinishReason, Sequence
from services.engine.streams import Streams
from services.engine.tokenizer import Tokenizer
from services.errors import Draining, FieldInvalid, NotImplementedYet, NotReady

DOMAIN = "rocmforge.engine"
SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"].full_name

MAX_TOKENIZE_BYTES = 1 << 20
MAX_DETOKENIZE_TOKENS = 1 << 17
INLINE_TOKENS = 4096

_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

maps_errors = rpc.maps_errors(DOMAIN)


@dataclass(frozen=True, slots=True)
class Served:
    """What the servicer needs of a loaded model. ``epoch`` tells the daemon's run, 0 without one."""

    model_id: str
    config: ModelConfig
    parameters: int
    geometry: Geometry
    backend: str
    tokenizer: Tokenizer
    loop: EngineLoop
    max_queue: int
    epoch: Callable[[], int]


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """The service. It answers UNAVAILABLE until ``serve`` and again, to new requests, from ``drain`` on."""

    def __init__(self, streams: Streams, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams = streams
        self._clock = clock
        self._served: Served | None = None
        self._draining = False

    def serve(self, served: Served) -> None:
        """Begin to take requests."""
        self._served = served

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def _model(self) -> Served:
        if self._served is None:
            raise NotReady("the engine is starting and has no model yet")
        return self._served

    @maps_errors
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """See the proto. However the call ends, its request does."""
        served = self._model()
        asked = await read_request(request, served.config, served.tokenizer, self._clock())
        # From here to the submission nothing is awaited, so none slips in behind the thread's end.
        if self._draining:
            raise Draining("the engine is shutting down")
        stream = self.streams.open(asked.request_id)
        served.loop.submit(asked)
        last: Event | None = None
        try:
            while last is None:
                news = await stream.next()
                last = news.last
                finish = _finish(last) if last is not None else None
                if news.token_ids or finish is not None:
                    yield pb.GenerateResponse(
                        request_id=asked.request_id, text=news.text, token_ids=news.token_ids, finish=finish
                    )
        finally:
            if last is None:
                served.loop.cancel(asked.request_id)
        if last.outcome is not None and last.outcome.error is not None:
            # One error may end many requests: each must not add its frames to the traceback of all.
            raise last.outcome.error.with_traceback(None)

    @maps_errors
    async def CancelGeneration(self, request: pb.CancelGenerationRequest, context: Any) -> pb.CancelGenerationResponse:
        """See the proto."""
        served = self._model()
        check_name(request.request_id, "request_id")
        if self.streams.is_live(request.request_id):
            served.loop.cancel(request.request_id)
        return pb.CancelGenerationResponse(request_id=request.request_id)

    @maps_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """See the proto."""
        served, size = self._model(), len(request.text.encode())
        if size > MAX_TOKENIZE_BYTES:
            raise FieldInvalid(f"text has {size} bytes; it may have {MAX_TOKENIZE_BYTES}", field="text")
        return pb.TokenizeResponse(token_ids=await tokenize(request.text, served.tokenizer, "text"))

    @maps_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """See the proto."""
        served, count = self._model(), len(request.token_ids)
        if count > MAX_DETOKENIZE_TOKENS:
            raise FieldInvalid(f"token_ids has {count} ids; it may have {MAX_DETOKENIZE_TOKENS}", field="token_ids")
        check_tokens(request.token_ids, "token_ids", served.config.vocab_size)
        decode, ids = served.tokenizer.decode, list(request.token_ids)
        if count > INLINE_TOKENS:
            text = await asyncio.to_thread(decode, ids, request.keep_special_tokens)
        else:
            text = decode(ids, request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)

    @maps_errors
    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """See the proto."""
        served = self._model()
        return pb.GetModelResponse(
            model_id=served.model_id,
            architecture=served.config.architecture,
            parameters=served.parameters,
            vocab_size=served.config.vocab_size,
            max_context=served.config.max_context,
            eos_token_ids=served.config.eos_token_ids,
            backend=served.backend,
            page_size=served.geometry.page_size,
            page_bytes=page_bytes_of(served.geometry),
        )

    @maps_errors
    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """See the proto."""
        served = self._model()
        totals, scheduler = served.loop.totals, served.loop.scheduler
        running = len(scheduler.running) + len(scheduler.leaving)
        return pb.GetStatsResponse(
            running_requests=running,
            queued_requests=max(0, len(self.streams) - running),
            queue_limit=served.max_queue,
            finished_requests=totals.finished_requests,
            failed_requests=totals.failed_requests,
            cancelled_requests=totals.cancelled_requests,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=scheduler.preemptions,
            steps=totals.steps,
            page_calls=totals.page_calls,
            page_wait=_duration(totals.page_wait_s),
            held_pages=scheduler.held_pages,
            recoveries=totals.recoveries,
            draining=self._draining,
            kvcache_epoch=served.epoch(),
        )

    @maps_errors
    async def BatchGenerate(self, request: pb.BatchGenerateRequest, context: Any) -> pb.BatchGenerateResponse:
        """Not served yet."""
        raise NotImplementedYet("BatchGenerate is not served by this version")

    @maps_errors
    async def SubmitGeneration(self, request: pb.SubmitGenerationRequest, context: Any) -> pb.SubmitGenerationResponse:
        """Not served yet."""
        raise NotImplementedYet("SubmitGeneration is not served by this version")

    @maps_errors
    async def WatchGeneration(self, request: pb.WatchGenerationRequest, context: Any) -> pb.WatchGenerationResponse:
        """Not served yet."""
        raise NotImplementedYet("WatchGeneration is not served by this version")

    @maps_errors
    async def GetGeneration(self, request: pb.GetGenerationRequest, context: Any) -> pb.GetGenerationResponse:
        """Not served yet."""
        raise NotImplementedYet("GetGeneration is not served by this version")

    @maps_errors
    async def DeleteGeneration(self, request: pb.DeleteGenerationRequest, context: Any) -> pb.DeleteGenerationResponse:
        """Not served yet."""
        raise NotImplementedYet("DeleteGeneration is not served by this version")

    @maps_errors
    async def PurgeGenerations(self, request: pb.PurgeGenerationsRequest, context: Any) -> pb.PurgeGenerationsResponse:
        """Not served yet."""
        raise NotImplementedYet("PurgeGenerations is not served by this version")


def _finish(last: Event) -> pb.Finish | None:
    """How a request ended; None when it was by an error."""
    outcome, sequence = last.outcome, last.sequence
    if outcome is None or outcome.reason is None or sequence is None:
        return None
    finish = pb.Finish(reason=_REASONS[outcome.reason], seed=sequence.request.sampling.seed, usage=_usage(sequence))
    if outcome.stop_token_id is not None:
        finish.stop_token_id = outcome.stop_token_id
    elif outcome.stop_text is not None:
        finish.stop_text = outcome.stop_text
    return finish


def _usage(sequence: Sequence) -> pb.Usage:
    began = sequence.request.submitted_at
    usage = pb.Usage(
        prompt_tokens=len(sequence.request.prompt),
        cached_tokens=sequence.cached_tokens,
        completion_tokens=sequence.num_generated_tokens,
        preemptions=sequence.preemptions,
    )
    for field, at in (
        (usage.queue_time, sequence.admitted_at),
        (usage.time_to_first_token, sequence.first_token_at),
        (usage.total_time, sequence.finished_at),
    ):
        if at is not None:
            field.CopyFrom(_duration(at - began))
    return usage


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration
