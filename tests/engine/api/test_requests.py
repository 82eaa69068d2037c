"""What a GenerateRequest becomes. Its refusals are test_servicer's."""

from __future__ import annotations

import asyncio
import math
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import FieldInvalid, PromptTooLong
from services.engine.api.requests import DEFAULT_MAX_TOKENS, INLINE_TEXT_BYTES, _prompt, read_request, tokenize
from services.engine.checkpoint.config import ModelConfig
from services.engine.config import BUNDLED_MODEL
from services.engine.pages.source import (
    MAX_CATEGORY,
    MAX_EXPECTED_RETURN_S,
    MAX_RETENTION_PRIORITY,
    MAX_RETENTION_S,
    MAX_TURN,
    Retention,
    ReuseHint,
)
from services.engine.sampling.params import validate
from services.engine.scheduling.sequence import Request
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import TextStream, Tokenizer

CONFIG = ModelConfig.from_folder(BUNDLED_MODEL)
TOKENIZER = Tokenizer.load(BUNDLED_MODEL, CONFIG.vocab_size)
CHAT = Chat({}, TOKENIZER)


def read(retains: bool = True, **fields: Any) -> Request:
    fields.setdefault("prompt", pb.Prompt(tokens=pb.TokenIds(ids=[1, 2, 3])))
    message = pb.GenerateRequest(**fields)
    return asyncio.run(read_request(message, CONFIG, TOKENIZER, CHAT, now=7.0, retains=retains))


def test_defaults() -> None:
    request = read()
    assert list(request.prompt) == [1, 2, 3] and request.submitted_at == 7.0 and request.salt == ""
    assert len(request.request_id) == 32 and request.request_id != read().request_id
    assert request.stopping.max_tokens == DEFAULT_MAX_TOKENS and request.stopping.min_tokens == 0
    assert request.stopping.eos_token_ids == frozenset(CONFIG.eos_token_ids) != frozenset()
    assert request.sampling.seed != read().sampling.seed


def test_priorities_to_both_limits() -> None:
    assert [read(priority=at).priority for at in (-100, 0, 100)] == [-100, 0, 100] and read().priority == 0
    with pytest.raises(FieldInvalid, match="priority is 101; it must be -100 to 100"):
        read(priority=101)


def retention(seconds: float | None = None, **fields: Any) -> pb.CacheRetention:
    message = pb.CacheRetention(**fields)
    if seconds is not None:
        message.ttl.FromNanoseconds(round(seconds * 1e9))
    return message


def test_what_is_asked_of_the_cache() -> None:
    assert read().retention is None
    assert read(cache_retention=retention(1.5)).retention == Retention(1.5, 50)
    for seconds, priority in ((1e-9, 1), (MAX_RETENTION_S, MAX_RETENTION_PRIORITY)):
        assert read(cache_retention=retention(seconds, priority=priority)).retention == Retention(seconds, priority)
    several = read(cache_retention=retention(9), n=3)
    assert [one.retention for one in several.others] == [several.retention] * 2 != [None] * 2


@pytest.mark.parametrize(
    ("asked", "more", "field", "says"),
    [
        (retention(), {}, ".ttl", "^cache_retention.ttl is missing"),
        (retention(0), {}, ".ttl", "ttl is 0 s; it must be more than 0 and at most 86400 s"),
        (retention(-1), {}, ".ttl", "ttl is -1 s"),
        (retention(86400.5), {}, ".ttl", "at most 86400 s"),
        (retention(1, priority=0), {}, ".priority", "^cache_retention.priority is 0; it must be 1 to 100"),
        (retention(1, priority=101), {}, ".priority", "^cache_retention.priority is 101; it must be 1 to 100"),
        (
            retention(1),
            {"sampling": pb.Sampling(prompt_logprobs=0)},
            "",
            "the pages of such a request are not reusable",
        ),
        (retention(1), {"retains": False}, "", "cache_retention needs a KV-cache daemon"),
    ],
)
def test_what_cannot_be_asked_of_it(asked: pb.CacheRetention, more: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(FieldInvalid, match=says) as caught:
        read(cache_retention=asked, **more)
    assert caught.value.field == f"cache_retention{field}"


def hint(seconds: float | None = None, **fields: Any) -> pb.ReuseHint:
    message = pb.ReuseHint(**fields)
    if seconds is not None:
        message.expected_return.FromNanoseconds(round(seconds * 1e9))
    return message


def test_what_is_said_of_its_return() -> None:
    assert read().reuse_hint is None
    assert read(reuse_hint=hint()).reuse_hint == ReuseHint()
    most = hint(MAX_EXPECTED_RETURN_S, category="ä" * MAX_CATEGORY, turn=MAX_TURN, tool_call_pending=True)
    said = ReuseHint("ä" * MAX_CATEGORY, MAX_TURN, True, MAX_EXPECTED_RETURN_S)
    assert read(reuse_hint=most, retains=False).reuse_hint == said
    assert [one.reuse_hint for one in read(reuse_hint=most, n=3).others] == [said] * 2


def test_pages_that_cannot_come_back_have_no_hint() -> None:
    assert read(reuse_hint=hint(1), sampling=pb.Sampling(prompt_logprobs=0)).reuse_hint is None


@pytest.mark.parametrize(
    ("asked", "field", "says"),
    [
        (hint(category="x" * 65), "category", "^reuse_hint.category has 65 characters; it may have 64"),
        (hint(turn=MAX_TURN + 1), "turn", "^reuse_hint.turn is 1000001; it may be 1000000 at most"),
        (hint(0), "expected_return", "expected_return is 0 s; it must be more than 0 and at most 86400 s"),
        (hint(-1), "expected_return", "expected_return is -1 s"),
        (hint(86400.5), "expected_return", "at most 86400 s"),
    ],
)
def test_what_cannot_be_said_of_it(asked: pb.ReuseHint, field: str, says: str) -> None:
    with pytest.raises(FieldInvalid, match=says) as caught:
        read(reuse_hint=asked)
    assert caught.value.field == f"reuse_hint.{field}"


def test_eos_can_be_ignored() -> None:
    assert read(stopping=pb.Stopping(ignore_eos=True)).stopping.eos_token_ids == frozenset()


def test_zero_is_a_value_and_not_unset() -> None:
    request = read(sampling=pb.Sampling(temperature=0, top_k=0, seed=0))
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0, 0, 0)


def test_the_context_is_shared_by_prompt_and_completion() -> None:
    def of(length: int, max_tokens: int = 10) -> Request:
        prompt = pb.Prompt(tokens=pb.TokenIds(ids=[1] * length))
        return read(prompt=prompt, stopping=pb.Stopping(max_tokens=max_tokens))

    assert of(CONFIG.max_context - 10).stopping.max_tokens == 10
    assert of(CONFIG.max_context - 9).stopping.max_tokens == 9
    assert of(CONFIG.max_context - 1).stopping.max_tokens == 1
    with pytest.raises(PromptTooLong) as caught:
        of(CONFIG.max_context)
    assert caught.value.metadata == {"prompt_tokens": str(CONFIG.max_context), "limit": str(CONFIG.max_context - 1)}


def test_a_large_max_tokens_is_cut_not_refused() -> None:
    assert read(stopping=pb.Stopping(max_tokens=2**32 - 1)).stopping.max_tokens == CONFIG.max_context - 3


def test_limits_count_characters_and_their_edges_are_inside() -> None:
    read(request_id="ä" * 128, cache_salt="ä" * 128, stopping=pb.Stopping(stop=["ä" * 256] * 16))
    with pytest.raises(FieldInvalid, match="request_id has 129 characters"):
        read(request_id="ä" * 129)


def test_long_text_is_tokenised_as_short_text_is() -> None:
    line = "Now is the winter of our discontent. "
    text = line * (2 * INLINE_TEXT_BYTES // len(line))
    assert asyncio.run(tokenize(text, TOKENIZER, "text")) == TOKENIZER.encode(text)


def test_a_long_text_holds_nobody_up_while_it_is_tokenised() -> None:
    text = "O that this too too solid flesh would melt, thaw and resolve itself into a dew! " * 13_000

    async def body() -> tuple[float, float]:
        began, turns = time.monotonic(), list[float]()
        work = asyncio.ensure_future(tokenize(text, TOKENIZER, "text"))
        while not work.done():
            turns.append(time.monotonic())
            await asyncio.sleep(0.001)
        gaps = (after - before for before, after in pairwise(turns))
        return time.monotonic() - began, max(gaps, default=math.inf)

    for _ in range(10):  # others may have no turn for the machine's sake, but not each time
        took, longest = asyncio.run(body())
        if longest < took / 3:
            break
    else:
        raise AssertionError(f"it took {took:.3g} s, and others had no turn for {longest:.3g} s")


class Untouched:
    """A repeated field of which only the length may be read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_what_is_too_long_is_refused_by_its_length() -> None:
    ids: Any = SimpleNamespace(WhichOneof=lambda name: "tokens", tokens=SimpleNamespace(ids=Untouched(5_000_000)))
    with pytest.raises(PromptTooLong, match="the prompt has 5000000 tokens; the context"):
        asyncio.run(_prompt(ids, CONFIG, TOKENIZER, CHAT))
    with pytest.raises(FieldInvalid, match="logit_bias has 1000000 tokens; at most 1024"):
        validate(None, None, None, None, None, CONFIG, logit_bias=Untouched(1_000_000))  # type: ignore[arg-type]
    # ... and the message's own map is what is asked.
    sampling = pb.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(FieldInvalid, match="logit_bias has 1025 tokens"):
        read(sampling=sampling)


def test_stop_strings_match_only_what_comes_after_min_tokens() -> None:
    ids = TOKENIZER.encode("Give thy thoughts no tongue, nor any unproportioned thought his act. Give it, give it.")
    whole, plain = "", TextStream(TOKENIZER, (), False)
    texts = [plain.push(token) for token in ids]
    whole = "".join(texts)
    stop, least = "Give", 6
    stream, shown, taken = read(stopping=pb.Stopping(stop=[stop], min_tokens=least)).text, "", 0
    for token in ids:
        shown += stream.push(token)
        taken += 1
        if stream.stopped is not None:
            break
    assert taken > least and stream.stopped == stop
    deferred = len("".join(texts[:least]))
    assert shown == whole[: whole.index(stop, deferred)]


@pytest.mark.parametrize(("least", "taken"), [(0, 1), (1, 2), (2, 3), (3, 3)])
def test_the_last_of_min_tokens_completes_no_stop_string(least: int, taken: int) -> None:
    [token] = TOKENIZER.encode("\n")
    stream = read(stopping=pb.Stopping(stop=["\n"], min_tokens=least, max_tokens=9)).text
    texts = [stream.push(token) for _ in range(taken)]
    assert (stream.stopped, texts) == (("\n", ["\n"] * least + [""]) if least < 3 else (None, ["\n"] * 3))
