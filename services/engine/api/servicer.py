"""The gRPC methods. Each validates its message, calls the domain, and converts the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common import rpc
from services.common.access.identity import CALLER
from services.common.access.policy import Policy
from services.common.errors import Draining, FieldInvalid, NotReady, RequestExists, ServiceError
from services.engine.api.requests import (
    check_batch,
    check_name,
    check_tokens,
    inside,
    named_inside,
    read_span,
    text_limit,
    tokenize,
)
from services.engine.api.responses import (
    DOMAIN,
    duration_of,
    error_of,
    fingerprint,
    generation_of,
    response,
    status,
)
from services.engine.api.roles import NEEDED
from services.engine.api.served import Served
from services.engine.api.tracing import traced_request
from services.engine.delivery.generation import Generation
from services.engine.delivery.registry import GenerationRegistry
from services.engine.delivery.streams import Bundle, Listener, Stream, Streams
from services.engine.delivery.throttle import Throttle
from services.engine.scheduling.sequence import Request
from services.version import VERSION

SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"].full_name

MAX_TOKENIZE_BYTES = 1 << 20
MAX_DETOKENIZE_TOKENS = 1 << 17
INLINE_TOKENS = 4096
MAX_TIMEOUT_S = 86400.0

maps_errors = rpc.maps_errors(DOMAIN)


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """The service. It answers UNAVAILABLE to every call before ``serve``, and to new requests after ``drain``.

    ``clock`` is the engine's monotonic clock, ``wall`` the wall clock, both in seconds. Without a ``throttle`` each
    message is sent at once. The owner in ``policy`` may do with everybody's requests what others may with their own.
    ``begin_drain`` begins a drain, unless one has begun, and returns what is done once new requests are rejected.
    """

    def __init__(
        self,
        streams: Streams,
        generations: GenerationRegistry,
        policy: Policy,
        begin_drain: Callable[[], asyncio.Future[None]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        throttle: Throttle | None = None,
    ) -> None:
        self.policy = policy
        self._begin_drain = begin_drain
        self.streams = streams
        self.generations = generations
        self._throttle = throttle
        self.draining = False
        self._clock = clock
        self._wall = wall
        self._served: Served | None = None

    def serve(self, served: Served) -> None:
        """Start accepting requests."""
        self._served = served

    def drain(self) -> None:
        """Reject new requests from now on."""
        self.draining = True

    def _model(self) -> Served:
        if self._served is None:
            raise NotReady("the engine is starting: the model is not loaded yet")
        return self._served

    def _check_open(self) -> None:
        if self.draining:
            raise Draining("the engine is shutting down")

    def _whose(self) -> str | None:
        """Whose requests the caller may name; None for everybody's."""
        caller = CALLER.get()
        return None if caller == self.policy.owner else caller.text

    def _deadline(self, context: Any) -> float | None:
        left = context.time_remaining()
        return None if left is None else self._clock() + left

    # --- attached calls: the request ends when its call does -----------------------------------------------------

    async def _begin(self, message: Any, listener: Listener, deadline: float | None) -> Request:
        """Validate a GenerateRequest and submit it to the engine; ``listener`` receives its events."""
        served = self._model()
        asked = await served.read(message, self._clock(), deadline)
        # No await from here to the submission: a drain cannot come between the check and the submission.
        self._check_open()
        if asked.request_id in self.generations:
            raise RequestExists(f"a submitted generation has the id {asked.request_id!r}", field="request_id")
        self.streams.check_free(asked.request_id)
        asked, listener = traced_request(served.model_id, message, asked, listener)
        self.streams.open(asked.request_id, listener, 1 + len(asked.others), CALLER.get().text)
        served.loop.submit(asked)
        return asked

    @maps_errors
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """See the proto. The request is cancelled when the call ends, however it ends."""
        stream = Stream(samples=max(1, request.n), throttle=self._throttle)
        asked = await self._begin(request, stream, self._deadline(context))
        over, error = False, None
        try:
            while not over:
                news = await stream.next()
                over, error = news.over, error or error_of(news)
                message = response(asked.request_id, asked.sampling.seed, news)
                if message is not None:
                    yield message
        finally:
            if not over:
                self._model().loop.cancel(asked.request_id)
        if error is not None:
            # Many requests may share one error object; do not accumulate their frames in its traceback.
            raise error.with_traceback(None)

    @maps_errors
    async def BatchGenerate(
        self, request: pb.BatchGenerateRequest, context: Any
    ) -> AsyncIterator[pb.BatchGenerateResponse]:
        """See the proto. The requests are cancelled when the call ends, however it ends."""
        self._model()
        check_batch(request)
        self._check_open()
        items = Bundle(len(request.requests), self._throttle)
        begun, errors = dict[int, Request](), dict[int, ServiceError]()
        beginning = asyncio.ensure_future(self._begin_all(request.requests, items, begun, self._deadline(context)))
        try:
            while items.remaining:
                index, news = await items.next()
                asked = begun.pop(index, None) if news.over else begun.get(index)
                message = response(asked.request_id, asked.sampling.seed, news) if asked is not None else None
                if message is not None:
                    yield pb.BatchGenerateResponse(index=index, response=message)
                error = error_of(news)
                if error is not None:  # sent once, after the last sample has ended
                    errors.setdefault(index, error if asked is None else named_inside(f"requests[{index}]", error))
                if news.over and index in errors:
                    yield pb.BatchGenerateResponse(index=index, error=status(errors.pop(index)))
        finally:
            beginning.cancel()
            for asked in begun.values():
                self._model().loop.cancel(asked.request_id)

    async def _begin_all(self, messages: Any, items: Bundle, begun: dict[int, Request], deadline: float | None) -> None:
        for index, message in enumerate(messages):
            try:
                with inside(f"requests[{index}]"):
                    begun[index] = await self._begin(message, items.stream(index, max(1, message.n)), deadline)
            except ServiceError as error:
                items.fail(index, error.bare())
            except Exception:
                items.fail(index, rpc.unexpected("BatchGenerate"))
            await asyncio.sleep(0)  # let other calls run between two prompts

    # --- submitted generations: identified by request id ---------------------------------------------------------

    @maps_errors
    async def SubmitGeneration(self, request: pb.SubmitGenerationRequest, context: Any) -> pb.SubmitGenerationResponse:
        """See the proto. Once submitted, the generation continues even if the caller disconnects."""
        served, now, mark = self._model(), self._clock(), fingerprint(request)
        timeout_s = read_span(request, "timeout", MAX_TIMEOUT_S)
        retention_s = read_span(request, "retention", self.generations.retention.ttl_s)
        with inside("request"):
            wanted = request.request.request_id
            owner = CALLER.get().text
            generation = self.generations.again(wanted, mark, owner) if wanted else None
            if generation is None:
                deadline = None if timeout_s is None else now + timeout_s
                asked = await served.read(request.request, now, deadline)
                # The same request may have arrived concurrently. No await from here to the submission.
                generation = self.generations.again(asked.request_id, mark, owner)
                if generation is None:
                    generation = self._submit(served, request.request, asked, mark, retention_s, owner)
            await generation.accepted()
        return pb.SubmitGenerationResponse(generation=self._shown(generation))

    def _submit(
        self, served: Served, message: Any, asked: Request, mark: bytes, retention_s: float | None, owner: str
    ) -> Generation:
        self._check_open()
        self.streams.check_free(asked.request_id)
        samples = 1 + len(asked.others)
        generation = self.generations.open(asked.request_id, mark, asked.sampling.seed, retention_s, samples, owner)
        asked, listener = traced_request(served.model_id, message, asked, generation)
        self.streams.open(asked.request_id, listener, samples, owner)
        served.loop.submit(asked)
        return generation

    def _shown(self, generation: Generation) -> pb.Generation:
        return generation_of(generation, self.generations.expires_in(generation), self._wall())

    def _find(self, request_id: str) -> Generation:
        self._model()
        check_name(request_id, "request_id")
        return self.generations.find(request_id, self._whose())

    @maps_errors
    async def WatchGeneration(
        self, request: pb.WatchGenerationRequest, context: Any
    ) -> AsyncIterator[pb.WatchGenerationResponse]:
        """See the proto."""
        generation = self._find(request.request_id)
        samples = generation.samples if generation.samples > 1 else 0
        starts = request.from_token, request.from_tokens, request.without_samples
        with generation.watch(*starts, self._throttle) as watch:
            over, error = False, None
            while not over:
                news = await watch.next()
                over, error = news.over, error or error_of(news)
                message = response(generation.request_id, generation.seed, news)
                if message is not None:
                    yield pb.WatchGenerationResponse(response=message, samples=samples)
        if error is not None:
            yield pb.WatchGenerationResponse(error=status(error), samples=samples)

    @maps_errors
    async def GetGeneration(self, request: pb.GetGenerationRequest, context: Any) -> pb.GetGenerationResponse:
        """See the proto."""
        return pb.GetGenerationResponse(generation=self._shown(self._find(request.request_id)))

    @maps_errors
    async def CancelGeneration(self, request: pb.CancelGenerationRequest, context: Any) -> pb.CancelGenerationResponse:
        """See the proto."""
        served, name, by = self._model(), request.request_id, self._whose()
        check_name(name, "request_id")
        generation = self.generations.get(name, by)
        over = generation is not None and generation.over
        if not over and self.streams.is_live(name, by):
            served.loop.cancel(name)
        return pb.CancelGenerationResponse(request_id=name)

    @maps_errors
    async def DeleteGeneration(self, request: pb.DeleteGenerationRequest, context: Any) -> pb.DeleteGenerationResponse:
        """See the proto."""
        self._find(request.request_id)
        self.generations.delete(request.request_id)
        return pb.DeleteGenerationResponse()

    @maps_errors
    async def PurgeGenerations(self, request: pb.PurgeGenerationsRequest, context: Any) -> pb.PurgeGenerationsResponse:
        """See the proto."""
        self._model()
        older_than_s = read_span(request, "older_than", zero=True)
        if older_than_s is None:
            raise FieldInvalid("older_than is missing; 0 purges every finished generation", field="older_than")
        return pb.PurgeGenerationsResponse(purged=self.generations.purge(older_than_s, self._whose()))

    # --- text, model, counts -------------------------------------------------------------------------------------

    @maps_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """See the proto."""
        served, size = self._model(), len(request.text.encode())
        if request.WhichOneof("input") == "messages":
            rendered = await served.chat.read(request.messages, text_limit(served.config))
            return pb.TokenizeResponse(token_ids=rendered.token_ids, text=rendered.text)
        if size > MAX_TOKENIZE_BYTES:
            raise FieldInvalid(f"text has {size} bytes; at most {MAX_TOKENIZE_BYTES}", field="text")
        return pb.TokenizeResponse(token_ids=await tokenize(request.text, served.tokenizer, "text"))

    @maps_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """See the proto."""
        served, count = self._model(), len(request.token_ids)
        if count > MAX_DETOKENIZE_TOKENS:
            raise FieldInvalid(f"token_ids has {count} ids; at most {MAX_DETOKENIZE_TOKENS}", field="token_ids")
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
            matrix_units=served.matrix_units,
            page_size=served.geometry.page_size,
            page_bytes=served.geometry.page_bytes,
            has_chat_template=served.chat.has_template,
            chat_template_error=served.chat.error,
        )

    @maps_errors
    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """See the proto."""
        served = self._model()
        self.generations.expire()
        totals, now = served.loop.totals, served.loop.snapshot()
        return pb.GetStatsResponse(
            running_requests=now.running_requests,
            queued_requests=now.waiting_requests,
            queue_limit=served.limits.max_queue,
            finished_requests=totals.finished_requests,
            failed_requests=totals.failed_requests,
            cancelled_requests=totals.cancelled_requests,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=now.cached_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=now.preemptions,
            steps=totals.steps,
            page_calls=totals.page_calls,
            page_wait=duration_of(totals.page_wait_s),
            held_pages=now.held_pages,
            recoveries=totals.recoveries,
            draining=self.draining,
            kvcache_epoch=served.source.epoch,
            queued_tokens=now.waiting_tokens,
            queue_token_limit=served.limits.max_queue_tokens,
            retained_generations=self.generations.retained,
            generation_bytes=self.generations.bytes,
            generation_byte_limit=self.generations.retention.memory,
            first_tokens=served.loop.stats.first_token.count,
            first_token_time=duration_of(served.loop.stats.first_token.sum),
            version=VERSION,
        )

    @maps_errors
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """See the proto. A drain continues when its caller is gone."""
        self.policy.require(NEEDED["Drain"])
        self._model()
        rejecting = self._begin_drain()
        if request.wait:
            await rejecting
            await self.streams.until_none()
        return pb.DrainResponse(live_requests=len(self.streams))
