"""Converts domain objects to proto messages: news, outcomes, usage and generations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from services.engine.delivery.generation import Generation, GenerationState
from services.engine.delivery.output import Output
from services.engine.delivery.streams import News
from services.engine.sampling.params import seed_of
from services.engine.sampling.result import Choice
from services.engine.scheduling.sequence import FinishReason, Outcome, Usage

DOMAIN = "rocmforge.engine"

_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_STATES = {
    GenerationState.QUEUED: pb.GENERATION_STATE_QUEUED,
    GenerationState.RUNNING: pb.GENERATION_STATE_RUNNING,
    GenerationState.DONE: pb.GENERATION_STATE_DONE,
    GenerationState.FAILED: pb.GENERATION_STATE_FAILED,
}


def fingerprint(message: Any) -> bytes:
    """Returns a 16-byte hash of a message, to compare messages of one type."""
    return hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()


def error_of(news: News) -> ServiceError | None:
    """Returns the error that ended the request, if any."""
    return news.outcome.error if news.outcome is not None else None


def status(error: ServiceError) -> Any:
    """Converts an error to a google.rpc.Status."""
    return rpc.status_of(error, DOMAIN)


def response(request_id: str, seed: int, news: News) -> pb.GenerateResponse | None:
    """Converts news to a GenerateResponse; None when there is nothing to send except perhaps an error.

    ``seed`` is the first sample's.
    """
    finish = finish_of(news.outcome, news.usage, seed_of(seed, news.sample))
    if finish is None and not news.token_ids:
        return None
    return pb.GenerateResponse(
        request_id=request_id,
        text=news.text,
        token_ids=news.token_ids,
        finish=finish,
        logprobs=logprobs_of(news.logprobs),
        sample=news.sample,
        prompt_logprobs=logprobs_of(news.prompt_logprobs),
    )


def logprobs_of(choices: Iterable[Choice]) -> list[pb.TokenLogprob]:
    """Converts the log probabilities of tokens."""
    return [
        pb.TokenLogprob(
            token_id=choice.token,
            logprob=choice.logprob or 0.0,
            rank=choice.rank or 0,
            top=[pb.TopToken(token_id=token, logprob=value) for token, value in choice.top],
        )
        for choice in choices
    ]


def finish_of(outcome: Outcome | None, usage: Usage | None, seed: int) -> pb.Finish | None:
    """Converts a request's outcome; None while it is live and when it ended with an error."""
    if outcome is None or outcome.reason is None:
        return None
    finish = pb.Finish(reason=_REASONS[outcome.reason], seed=seed, usage=usage_of(usage))
    if outcome.stop_token_id is not None:
        finish.stop_token_id = outcome.stop_token_id
    elif outcome.stop_text is not None:
        finish.stop_text = outcome.stop_text
    return finish


def usage_of(usage: Usage | None) -> pb.Usage | None:
    """Converts a request's usage."""
    if usage is None:
        return None
    message = pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
    )
    for field, seconds in (
        (message.queue_time, usage.queue_s),
        (message.time_to_first_token, usage.first_token_s),
        (message.total_time, usage.total_s),
    ):
        if seconds is not None:
            field.CopyFrom(duration_of(seconds))
    return message


def generation_of(generation: Generation, expires_in_s: float | None, now: float) -> pb.Generation:
    """Converts a generation with all of its output; ``now`` is the wall-clock time in seconds since the Unix epoch."""
    whole = [_said(output, seed_of(generation.seed, at)) for at, output in enumerate(generation.outputs)]
    message = pb.Generation(
        request_id=generation.request_id,
        state=_STATES[generation.state],
        prompt_logprobs=logprobs_of(generation.outputs[0].prompt_logprobs),
        **whole[0] if len(whole) == 1 else {"samples": [pb.GenerationSample(**one) for one in whole]},
    )
    error = generation.error
    if error is not None:
        message.error.CopyFrom(status(error))
    if expires_in_s is not None:
        expiry = timestamp_pb2.Timestamp()
        expiry.FromNanoseconds(int((now + expires_in_s) * 1e9))
        message.expire_time.CopyFrom(expiry)
    return message


def _said(output: Output, seed: int) -> dict[str, Any]:
    text, token_ids = output.read(0, output.num_tokens)
    usage = output.usage
    return {
        "text": text,
        "token_ids": token_ids,
        "finish": finish_of(output.outcome, usage, seed),
        "usage": usage_of(usage),
        "logprobs": logprobs_of(output.logprobs(0, output.num_tokens)),
    }


def duration_of(seconds: float) -> duration_pb2.Duration:
    """Converts seconds to a Duration; negative seconds become 0."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration
