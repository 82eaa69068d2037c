"""Validates a GenerateRequest and builds a Request. Each error names the field and its limit."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import uuid
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
from google.protobuf.message import Message

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import FieldInvalid, PromptTooLong, ServiceError
from services.engine.checkpoint.config import ModelConfig
from services.engine.pages.source import (
    MAX_CATEGORY,
    MAX_EXPECTED_RETURN_S,
    MAX_RETENTION_PRIORITY,
    MAX_RETENTION_S,
    MAX_TURN,
    Retention,
    ReuseHint,
)
from services.engine.sampling.params import SamplingParams, seed_of, validate
from services.engine.scheduling.sequence import MAX_SAMPLES, Request, Stopping
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import TextStream, Tokenizer

MAX_NAME = 128
DEFAULT_MAX_TOKENS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_ITEMS = 1024
MAX_PRIORITY = 100
#: The default priority of a retention.
RETENTION_PRIORITY = 50

#: Most log probabilities returned for one request: for its output, over all samples, and for its prompt. A gRPC
#: message has a size limit.
MAX_OUTPUT_LOGPROBS = 1 << 20
MAX_PROMPT_LOGPROBS = 1 << 18

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_MORE_SAMPLING = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs")

#: Text of more than this many bytes per context token is rejected before it is tokenized.
TEXT_BYTES_PER_TOKEN = 64
#: Longer text is tokenized in a thread, so that it does not block the event loop.
INLINE_TEXT_BYTES = 4 * 1024


async def read_request(
    message: pb.GenerateRequest,
    config: ModelConfig,
    tokenizer: Tokenizer,
    chat: Chat,
    now: float,
    deadline: float | None = None,
    *,
    retains: bool,
) -> Request:
    """Validate a GenerateRequest and fill in its defaults. Times are seconds of the engine's clock.

    ``retains`` is `PageSource.retains`. Raises FieldInvalid naming the field, and PromptTooLong.
    """
    check_name(message.request_id, "request_id", least=0)
    check_name(message.cache_salt, "cache_salt", least=0)
    _check_priority(message.priority)
    given = {
        name: getattr(message.sampling, name)
        for name in (*_SAMPLING, *_MORE_SAMPLING)
        if message.sampling.HasField(name)
    }
    drawn = validate(**dict.fromkeys(_SAMPLING) | given, defaults=config, logit_bias=message.sampling.logit_bias)
    if message.n > MAX_SAMPLES:
        raise FieldInvalid(f"n is {message.n}; it must be at most {MAX_SAMPLES}", field="n", limit=MAX_SAMPLES)
    limits = _stopping(message.stopping, config)
    prompt = await _prompt(message.prompt, config, tokenizer, chat)
    room = _room(len(prompt), config)
    if room < limits.max_tokens:
        limits = dataclasses.replace(limits, max_tokens=room)
    _check_logprobs(drawn, len(prompt), limits.max_tokens, max(1, message.n))
    retention = _retention(message, retains)
    hint = _reuse_hint(message)

    def text() -> TextStream:
        return TextStream(tokenizer, message.stopping.stop, message.stopping.include_stop, limits.min_tokens)

    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt=prompt,
        stopping=limits,
        sampling=drawn,
        text=text(),
        # A prefix cache hit would skip the tokens whose log probabilities are requested. A unique salt rules out hits,
        # except on the request's own pages after a preemption, whose log probabilities it already has.
        salt=message.cache_salt if drawn.prompt_logprobs is None else secrets.token_hex(16),
        retention=retention,
        # Pages under a unique salt do not come back: their hint would be wrong.
        reuse_hint=hint if drawn.prompt_logprobs is None else None,
        submitted_at=now,
        deadline=deadline,
        priority=message.priority,
    )
    others = [
        dataclasses.replace(
            request,
            sample=sample,
            sampling=dataclasses.replace(drawn, seed=seed_of(drawn.seed, sample), prompt_logprobs=None),
            text=text(),
        )
        for sample in range(1, message.n)
    ]
    return dataclasses.replace(request, others=tuple(others)) if others else request


def _room(prompt_tokens: int, config: ModelConfig) -> int:
    """Returns the context tokens that the prompt leaves for the completion, at least 1. Raises PromptTooLong."""
    room = config.max_context - prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens; the context is {config.max_context}, and the completion needs at "
            "least 1",
            field="prompt",
            prompt_tokens=prompt_tokens,
            limit=config.max_context - 1,
        )
    return room


def _check_logprobs(sampling: SamplingParams, prompt_tokens: int, max_tokens: int, samples: int) -> None:
    completion = "the completion may have" if samples == 1 else f"the {samples} completions may have"
    of = {
        "prompt_logprobs": (sampling.prompt_logprobs, prompt_tokens, "the prompt has", MAX_PROMPT_LOGPROBS),
        "logprobs": (sampling.logprobs, max_tokens * samples, completion, MAX_OUTPUT_LOGPROBS),
    }
    for name, (top, tokens, whose, limit) in of.items():
        if top is not None and tokens * (top + 1) > limit:
            raise FieldInvalid(
                f"{name} is {top} and {whose} {tokens} tokens, which makes {tokens * (top + 1)} log probabilities; "
                f"at most {limit} can be returned",
                field=f"sampling.{name}",
                limit=limit,
            )


def _check_priority(priority: int) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise FieldInvalid(
            f"priority is {priority}; it must be -{MAX_PRIORITY} to {MAX_PRIORITY}",
            field="priority",
            limit=MAX_PRIORITY,
        )


def _retention(message: pb.GenerateRequest, retains: bool) -> Retention | None:
    """Returns the request's cache retention, if any. Raises FieldInvalid."""
    if not message.HasField("cache_retention"):
        return None
    if not retains:
        raise FieldInvalid(
            "cache_retention needs a KV-cache daemon; this engine uses local pages (--kvcache local)",
            field="cache_retention",
        )
    if message.sampling.HasField("prompt_logprobs"):
        raise FieldInvalid(
            "cache_retention cannot be combined with prompt_logprobs: the pages of such a request are not reusable",
            field="cache_retention",
        )
    asked = message.cache_retention
    with inside("cache_retention"):
        ttl_s = read_span(asked, "ttl", MAX_RETENTION_S)
        if ttl_s is None:
            raise FieldInvalid("cache_retention.ttl is missing", field="ttl")
        priority = asked.priority if asked.HasField("priority") else RETENTION_PRIORITY
        if not 1 <= priority <= MAX_RETENTION_PRIORITY:
            raise FieldInvalid(
                f"cache_retention.priority is {priority}; it must be 1 to {MAX_RETENTION_PRIORITY}",
                field="priority",
                limit=MAX_RETENTION_PRIORITY,
            )
    return Retention(ttl_s, priority)


def _reuse_hint(message: pb.GenerateRequest) -> ReuseHint | None:
    """Returns what the request says of its return, if anything. Raises FieldInvalid."""
    if not message.HasField("reuse_hint"):
        return None
    hint = message.reuse_hint
    with inside("reuse_hint"):
        if len(hint.category) > MAX_CATEGORY:
            raise FieldInvalid(
                f"reuse_hint.category has {len(hint.category)} characters; it may have {MAX_CATEGORY}",
                field="category",
                limit=MAX_CATEGORY,
            )
        if hint.turn > MAX_TURN:
            raise FieldInvalid(
                f"reuse_hint.turn is {hint.turn}; it may be {MAX_TURN} at most", field="turn", limit=MAX_TURN
            )
        expected_s = read_span(hint, "expected_return", MAX_EXPECTED_RETURN_S)
    return ReuseHint(hint.category, hint.turn, hint.tool_call_pending, expected_s)


def _stopping(message: pb.Stopping, config: ModelConfig) -> Stopping:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    if max_tokens < 1:
        raise FieldInvalid("max_tokens is 0; it must be at least 1", field="stopping.max_tokens")
    if message.min_tokens > max_tokens:
        raise FieldInvalid(
            f"min_tokens is {message.min_tokens}; max_tokens is {max_tokens}", field="stopping.min_tokens"
        )
    if len(message.stop) > MAX_STOPS:
        raise FieldInvalid(f"stop has {len(message.stop)} strings; at most {MAX_STOPS}", field="stopping.stop")
    for at, stop in enumerate(message.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise FieldInvalid(
                f"stop[{at}] has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARS}",
                field=f"stopping.stop[{at}]",
            )
    if len(message.stop_token_ids) > MAX_STOP_TOKENS:
        raise FieldInvalid(
            f"stop_token_ids has {len(message.stop_token_ids)} ids; at most {MAX_STOP_TOKENS}",
            field="stopping.stop_token_ids",
        )
    check_tokens(message.stop_token_ids, "stopping.stop_token_ids", config.vocab_size)
    eos = () if message.ignore_eos else config.eos_token_ids
    return Stopping(max_tokens, message.min_tokens, frozenset(eos), frozenset(message.stop_token_ids))


async def _prompt(message: pb.Prompt, config: ModelConfig, tokenizer: Tokenizer, chat: Chat) -> Items[int]:
    match message.WhichOneof("input"):
        case "text":
            size, limit = len(message.text.encode()), text_limit(config)
            if size > limit:
                raise PromptTooLong(f"prompt.text has {size} bytes; at most {limit}", field="prompt.text", limit=limit)
            return tuple(await tokenize(message.text, tokenizer, "prompt.text"))
        case "tokens":
            if not message.tokens.ids:
                raise FieldInvalid("the prompt has no tokens; it needs at least 1", field="prompt.tokens.ids")
            _room(len(message.tokens.ids), config)  # first: checking millions of ids is slow
            ids = np.asarray(message.tokens.ids, np.uint32)  # one bulk copy: ten times as fast as id by id
            check_tokens(ids, "prompt.tokens.ids", config.vocab_size)
            return array("I", ids.tobytes())
        case "messages":
            with inside("prompt"):
                return (await chat.read(message.messages, text_limit(config))).token_ids
        case _:
            raise FieldInvalid("the prompt is missing: give text, tokens or messages", field="prompt")


def text_limit(config: ModelConfig) -> int:
    """Returns the most bytes of a prompt's text."""
    return config.max_context * TEXT_BYTES_PER_TOKEN


async def tokenize(text: str, tokenizer: Tokenizer, field: str) -> list[int]:
    """Returns the token ids of a text, at least one. Raises FieldInvalid."""
    if not text:
        raise FieldInvalid(f"{field} is empty", field=field)
    long = len(text.encode()) > INLINE_TEXT_BYTES
    try:
        ids = await asyncio.to_thread(tokenizer.encode, text) if long else tokenizer.encode(text)
    except FieldInvalid as error:
        error.field = field
        raise
    if not ids:
        raise FieldInvalid(f"{field} encodes to no tokens", field=field)
    return ids


def check_batch(message: pb.BatchGenerateRequest) -> None:
    """Raises FieldInvalid when a BatchGenerateRequest has no items or too many."""
    count = len(message.requests)
    if not 1 <= count <= MAX_ITEMS:
        raise FieldInvalid(
            f"requests has {count} items; it must have 1 to {MAX_ITEMS}", field="requests", limit=MAX_ITEMS
        )


def read_span(message: Message, field: str, most: float = math.inf, *, zero: bool = False) -> float | None:
    """Returns the seconds of a Duration field, None when it is unset.

    Raises FieldInvalid unless they are above 0 (0 included with ``zero``) and at most ``most``.
    """
    if not message.HasField(field):
        return None
    duration = getattr(message, field)
    if abs(duration.nanos) >= 10**9 or duration.seconds * duration.nanos < 0:
        raise FieldInvalid(
            f"{field} has {duration.seconds} seconds and {duration.nanos} nanos; both must have the same sign, and "
            "nanos must be less than a second",
            field=field,
        )
    seconds = float(duration.seconds + duration.nanos / 1e9)
    if not (0 < seconds <= most or (zero and seconds == 0)):
        limit = ("0 or more" if zero else "more than 0") + (f" and at most {most:g} s" if most < math.inf else "")
        raise FieldInvalid(f"{field} is {seconds:g} s; it must be {limit}", field=field)
    return seconds


def named_inside(field: str, error: ServiceError) -> ServiceError:
    """Returns a copy of an error with its field prefixed by ``field``. Several callers may share the original."""
    named = copy(error)
    named.field = f"{field}.{error.field}" if error.field else ""
    return named


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Prefix the field of every ServiceError raised within with ``field``."""
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = f"{field}.{error.field}"
        raise


def check_tokens(ids: Any, field: str, vocab_size: int) -> None:
    """Raises FieldInvalid naming the first id outside the vocabulary. ``ids``: a repeated uint32 field or an array."""
    if not len(ids):
        return
    found = np.asarray(ids)
    if found.max() >= vocab_size:
        at = int(np.argmax(found >= vocab_size))
        raise FieldInvalid(
            f"{field}[{at}] is {found[at]}; the vocabulary has {vocab_size} tokens", field=f"{field}[{at}]"
        )


def check_name(name: str, field: str, *, least: int = 1) -> None:
    """Raises FieldInvalid unless the name has ``least`` to `MAX_NAME` characters."""
    if not least <= len(name) <= MAX_NAME:
        raise FieldInvalid(
            f"{field} has {len(name)} characters; it must have {least} to {MAX_NAME}", field=field, limit=MAX_NAME
        )
