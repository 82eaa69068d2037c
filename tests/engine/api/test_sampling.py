"""Sampling settings of a request, over gRPC: penalties, biases, bans, log probabilities, several samples."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2 as kv
from services.engine.api import requests
from services.engine.config import BUNDLED_MODEL
from services.engine.model import decoder as engine_model
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from services.engine.scheduling.step import Chunk
from tests.engine.running import RunningEngine, refused, served_by_a_daemon
from tests.generation import collect, request

#: All of it at once.
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 11,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {199: -2.0, 33: 1.5},
    "logprobs": 3,
}
PROMPT = "ROMEO:\nIs the day so young? " * 3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    one = RunningEngine(tmp_path_factory.mktemp("e"), "--max-batch", "16", "--local-pages", "256")
    yield one.start()
    one.close()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(BUNDLED_MODEL)


def expected_logprobs(model: Model, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Log probabilities of every next token, ``[position, vocab]``, in double precision."""
    size = len(tokens)
    geometry = model.geometry(size)
    pages = np.zeros((1, geometry.layers, 2, geometry.kv_heads, size, geometry.head_dim), np.float32)
    logits = model.forward([Row(tokens, 0, [0], size)], pages).astype(np.float64)
    highest = logits.max(axis=1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))


def told(stream: Any) -> tuple[list[int], list[pb.TokenLogprob], list[pb.TokenLogprob]]:
    """Tokens, their log probabilities, and the prompt's."""
    tokens, logprobs, prompt = list[int](), list[pb.TokenLogprob](), list[pb.TokenLogprob]()
    for response in stream:
        assert len(response.logprobs) in (0, len(response.token_ids))
        assert not response.prompt_logprobs or not tokens, "told with the first response"
        tokens += response.token_ids
        logprobs += response.logprobs
        prompt += response.prompt_logprobs
    return tokens, logprobs, prompt


def samples_of(stream: Any) -> dict[int, tuple[list[int], str, pb.Finish]]:
    """Each sample's output, and its finish."""
    tokens, texts, finishes = dict[int, list[int]](), dict[int, str](), dict[int, pb.Finish]()
    for response in stream:
        assert response.sample not in finishes, "something came behind a sample's finish"
        tokens.setdefault(response.sample, []).extend(response.token_ids)
        texts[response.sample] = texts.get(response.sample, "") + response.text
        if response.HasField("finish"):
            finishes[response.sample] = response.finish
    assert set(finishes) == set(tokens)
    return {at: (tokens[at], texts[at], finishes[at]) for at in sorted(tokens)}


# --- penalties, biases, bans ------------------------------------------------------------------------------------------


def test_a_bias_decides(engine: RunningEngine) -> None:
    _, tokens, _ = collect(engine.stub.Generate(request(sampling={"logit_bias": {77: 100.0}})))
    assert tokens == [77] * 8
    _, tokens, _ = collect(engine.stub.Generate(request(max_tokens=30)))
    banned = dict.fromkeys(tokens, -100.0)
    _, others, _ = collect(engine.stub.Generate(request(max_tokens=30, sampling={"logit_bias": banned})))
    assert not set(others) & set(tokens)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_make_tokens_that_came_rarer(engine: RunningEngine, penalty: str) -> None:
    def most(**sampling: Any) -> int:
        biased = {"logit_bias": {77: 8.0}, **sampling}
        _, tokens, _ = collect(engine.stub.Generate(request(max_tokens=40, sampling=biased)))
        return tokens.count(77)

    assert most(**{penalty: 1.9}) < most()


def test_a_repetition_penalty_is_for_the_prompts_tokens_too(engine: RunningEngine) -> None:
    first = collect(engine.stub.Generate(request([40, 41, 42], max_tokens=1)))[1][0]
    ask = request([first, 41, 42], max_tokens=1, sampling={"repetition_penalty": 100.0})
    free = request([first, 41, 42], max_tokens=1)
    tokens = [collect(engine.stub.Generate(one))[1][0] for one in (ask, free)]
    biased = collect(
        engine.stub.Generate(
            request([first, 41, 42], 1, sampling={"repetition_penalty": 100.0, "logit_bias": {first: 20.0}})
        )
    )[1][0]
    unpenalised = collect(engine.stub.Generate(request([first, 41, 42], 1, sampling={"logit_bias": {first: 20.0}})))[1][
        0
    ]
    assert unpenalised == first and biased != first
    assert tokens[0] not in (first, 41, 42)


def test_ends_are_not_drawn_before_min_tokens(engine: RunningEngine) -> None:
    eos = engine.stub.GetModel(pb.GetModelRequest()).eos_token_ids[0]
    # Likelier than all others together, an end comes as soon as it may.
    wanted = {"logit_bias": {eos: 90.0, 77: 95.0}}
    stopping = {"ignore_eos": False, "stop_token_ids": [77], "min_tokens": 5}
    _, tokens, finish = collect(engine.stub.Generate(request(max_tokens=20, sampling=wanted, stopping=stopping)))
    assert len(tokens) == 6 and tokens[-1] == 77 and not {eos, 77} & set(tokens[:5])
    assert finish.stop_token_id == 77
    # Ignored, an end is a token like others.
    stopping = {"ignore_eos": True, "min_tokens": 5}
    _, tokens, _ = collect(engine.stub.Generate(request(max_tokens=6, sampling=wanted | {}, stopping=stopping)))
    assert tokens == [77] * 6
    only = {"logit_bias": {eos: 95.0}}
    assert collect(engine.stub.Generate(request(max_tokens=6, sampling=only, stopping=stopping)))[1] == [eos] * 6


@pytest.mark.parametrize(("least", "most"), [(0, 5), (1, 5), (4, 5), (5, 5)])
def test_min_tokens_is_min_new_tokens_of_transformers(engine: RunningEngine, least: int, most: int) -> None:
    eos = engine.stub.GetModel(pb.GetModelRequest()).eos_token_ids[0]
    # The end is the likeliest token wherever it is not masked.
    stopping = {"ignore_eos": False, "min_tokens": least}
    asked = request(max_tokens=most, sampling={"logit_bias": {eos: 95.0}}, stopping=stopping)
    _, tokens, finish = collect(engine.stub.Generate(asked))
    expected: list[str] = []
    while len(expected) < most and expected[-1:] != ["end"]:
        # MinNewTokensLengthLogitsProcessor: new_tokens_length < min_new_tokens masks the end.
        expected.append("other" if len(expected) < least else "end")
    assert ["end" if token == eos else "other" for token in tokens] == expected
    assert finish.reason == (pb.FINISH_REASON_EOS if least < most else pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize(
    ("field", "bad", "said"),
    [
        ("sampling.repetition_penalty", {"sampling": {"repetition_penalty": 0.0}}, "more than 0 and at most 100"),
        ("sampling.presence_penalty", {"sampling": {"presence_penalty": 2.5}}, "-2 to 2"),
        ("sampling.frequency_penalty", {"sampling": {"frequency_penalty": math.nan}}, "-2 to 2"),
        ("sampling.logit_bias[7]", {"sampling": {"logit_bias": {7: 101.0}}}, "-100 to 100"),
        ("sampling.logit_bias[99999]", {"sampling": {"logit_bias": {99999: 1.0}}}, "1024 tokens"),
        ("sampling.logit_bias", {"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "at most 1024"),
        ("sampling.logprobs", {"sampling": {"logprobs": 21}}, "0 to 20"),
        ("sampling.prompt_logprobs", {"sampling": {"prompt_logprobs": 21}}, "0 to 20"),
        ("n", {"n": 17}, "at most 16"),
    ],
)
def test_what_is_out_of_range_is_named(engine: RunningEngine, field: str, bad: Any, said: str) -> None:
    error = refused(lambda: engine.stub.Generate(request(**bad)))
    assert (error.reason, error.field) == ("FIELD_INVALID", field) and said in error.message


# --- log probabilities ------------------------------------------------------------------------------------------------


def check(one: pb.TokenLogprob, row: Any, top: int) -> None:
    order = np.argsort(-row, kind="stable")
    assert one.logprob == pytest.approx(row[one.token_id], abs=1e-4)
    assert one.rank == order.tolist().index(one.token_id) + 1
    assert [other.token_id for other in one.top] == order[:top].tolist()
    assert [other.logprob for other in one.top] == pytest.approx(row[order[:top]], abs=1e-4)


@pytest.mark.parametrize("top", [0, 4])
def test_log_probabilities_are_the_models(engine: RunningEngine, model: Model, top: int) -> None:
    sampling = {"temperature": 1.3, "seed": 5, "logprobs": top, "repetition_penalty": 1.5}
    tokens, logprobs, prompt = told(engine.stub.Generate(request([5, 6, 7], 12, sampling=sampling)))
    assert [one.token_id for one in logprobs] == tokens and not prompt
    rows = expected_logprobs(model, [5, 6, 7, *tokens])
    for at, one in enumerate(logprobs):
        check(one, rows[2 + at], top)


def test_unasked_nothing_is_told(engine: RunningEngine) -> None:
    _, logprobs, prompt = told(engine.stub.Generate(request()))
    assert not logprobs and not prompt


def long_prompt(engine: RunningEngine) -> list[int]:
    return list(engine.stub.Tokenize(pb.TokenizeRequest(text=PROMPT)).token_ids)


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_a_prompt(engine: RunningEngine, model: Model, top: int) -> None:
    prompt = long_prompt(engine)
    plain = collect(engine.stub.Generate(request(prompt)))
    for _ in range(2):  # what is cached is left alone
        stream = list(engine.stub.Generate(request(prompt, sampling={"prompt_logprobs": top})))
        tokens, logprobs, found = told(stream)
        assert tokens == plain[1] and not logprobs
        assert stream[-1].finish.usage.cached_tokens == 0
        assert [one.token_id for one in found] == prompt[1:]
        rows = expected_logprobs(model, prompt)
        for row, one in zip(rows, found, strict=False):
            check(one, row, top)


def test_a_prompt_of_one_token_has_none(engine: RunningEngine) -> None:
    tokens, logprobs, found = told(engine.stub.Generate(request([9], sampling={"prompt_logprobs": 1, "logprobs": 0})))
    assert len(tokens) == len(logprobs) == 8 and not found


def test_a_chunked_prompt_has_the_same_numbers(
    engine: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = long_prompt(engine)
    ask = request(prompt, sampling={"prompt_logprobs": 3, "logprobs": 3})
    whole = told(engine.stub.Generate(ask))
    small = RunningEngine(tmp_path, "--max-batch", "8", "--max-step-tokens", "16", "--local-pages", "64").start()
    try:
        assert told(small.stub.Generate(ask)) == whole
        monkeypatch.setattr(engine_model, "MOST_LOGITS", 3 * 1024)
        assert told(small.stub.Generate(ask)) == whole
        assert told(engine.stub.Generate(ask)) == whole
    finally:
        small.close()


@pytest.mark.parametrize(
    ("name", "limit", "fits", "beyond"),
    [
        ("prompt_logprobs", "MAX_PROMPT_LOGPROBS", {"prompt_logprobs": 3}, {"prompt_logprobs": 4}),
        ("logprobs", "MAX_OUTPUT_LOGPROBS", {"logprobs": 4}, {"logprobs": 5}),
    ],
)
def test_too_many_to_tell_are_refused(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch, name: str, limit: str, fits: Any, beyond: Any
) -> None:
    monkeypatch.setattr(requests, limit, 40)
    prompt, max_tokens = [1] * 10, 8
    assert len(collect(engine.stub.Generate(request(prompt, max_tokens, sampling=fits)))[1]) == 8
    error = refused(lambda: engine.stub.Generate(request(prompt, max_tokens, sampling=beyond)))
    assert (error.reason, error.field, error.metadata["limit"]) == ("FIELD_INVALID", f"sampling.{name}", "40")


def test_a_submitted_generation_keeps_them(engine: RunningEngine) -> None:
    prompt = long_prompt(engine)[:20]
    ask = request(prompt, 10, sampling={"prompt_logprobs": 1, "logprobs": 2})
    whole = told(engine.stub.Generate(ask))
    before = engine.stub.GetStats(pb.GetStatsRequest()).generation_bytes
    name = engine.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=ask)).generation.request_id

    def watched(at: int) -> Any:
        stream = engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=name, from_token=at))
        return told(one.response for one in stream)

    assert watched(0) == whole
    assert watched(4) == (whole[0][4:], whole[1][4:], [])
    kept = engine.stub.GetGeneration(pb.GetGenerationRequest(request_id=name)).generation
    assert (list(kept.token_ids), list(kept.logprobs), list(kept.prompt_logprobs)) == whole
    grown = engine.stub.GetStats(pb.GetStatsRequest()).generation_bytes - before
    assert grown > (10 * 2 + 19) * 100
    engine.stub.DeleteGeneration(pb.DeleteGenerationRequest(request_id=name))
    assert engine.stub.GetStats(pb.GetStatsRequest()).generation_bytes == before


# --- the same, however it is run --------------------------------------------------------------------------------------


def test_with_everything_on_it_is_the_same_alone_in_a_batch_and_after_a_restart(
    engine: RunningEngine, tmp_path: Path
) -> None:
    prompt = long_prompt(engine)
    ask = request(prompt, 40, sampling=EVERYTHING)
    alone = told(engine.stub.Generate(ask))
    assert len(set(alone[0])) > 10
    others = [request([at, 2, 3], 60, sampling=EVERYTHING | {"seed": at}) for at in range(5)]
    answers = list(engine.stub.BatchGenerate(pb.BatchGenerateRequest(requests=[*others, ask])))
    assert told(one.response for one in answers if one.index == 5) == alone
    again = RunningEngine(tmp_path, "--local-pages", "64", "--page-size", "4").start()
    try:
        assert told(again.stub.Generate(ask)) == alone
    finally:
        again.close()


def test_with_everything_on_it_is_the_same_after_a_preemption(engine: RunningEngine, tmp_path: Path) -> None:
    asks = [
        request([at, 7, 8, 9], 50, sampling=EVERYTHING | {"seed": at, "prompt_logprobs": 1}, request_id=f"p{at}")
        for at in range(3)
    ]
    alone = [told(engine.stub.Generate(ask)) for ask in asks]
    small = RunningEngine(tmp_path, "--local-pages", "24", "--page-size", "4").start()
    try:
        answers = list(small.stub.BatchGenerate(pb.BatchGenerateRequest(requests=asks)))
        assert small.stub.GetStats(pb.GetStatsRequest()).preemptions > 0
        for at in range(3):
            assert told(one.response for one in answers if one.index == at) == alone[at]
    finally:
        small.close()


@pytest.mark.parametrize("generated", [0, 1, 9])
def test_with_everything_on_it_is_the_same_after_a_lost_session(
    engine: RunningEngine, tmp_path: Path, generated: int
) -> None:
    single = request(long_prompt(engine), 30, sampling=EVERYTHING | {"prompt_logprobs": 0})
    alone = told(engine.stub.Generate(single))
    ask = request(long_prompt(engine), 30, sampling=EVERYTHING | {"prompt_logprobs": 0}, n=3)
    with_daemon, daemon = served_by_a_daemon(tmp_path, "--max-batch", "8", "--max-step-tokens", "16")
    try:
        lost = threading.Event()

        def lose(step: Sequence[Chunk]) -> None:
            first = step[0]
            if not lost.is_set() and first.start and first.sequence.num_generated_tokens == generated:
                lost.set()
                [session] = daemon.session_ids()
                daemon.stub.CloseSession(kv.CloseSessionRequest(session_id=session))

        with_daemon.steps.fault = lose
        answers = list(with_daemon.stub.Generate(ask))
        assert lost.is_set() and with_daemon.stub.GetStats(pb.GetStatsRequest()).recoveries == 1
        assert told(one for one in answers if one.sample == 0) == alone
        ask.sampling.ClearField("prompt_logprobs")
        found = samples_of(answers)
        assert [(tokens, text) for tokens, text, _ in found.values()] == singles(engine, ask, 3)
    finally:
        with_daemon.close()
        daemon.close()


# --- several samples --------------------------------------------------------------------------------------------------


def singles(engine: RunningEngine, ask: pb.GenerateRequest, n: int) -> list[tuple[list[int], str]]:
    """The results of the samples as separate requests."""
    found = []
    for at in range(n):
        one = pb.GenerateRequest()
        one.CopyFrom(ask)
        one.n, one.request_id = 0, ""
        one.sampling.seed = (ask.sampling.seed + at) % 2**64
        text, tokens, _ = collect(engine.stub.Generate(one))
        found.append((tokens, text))
    return found


@pytest.mark.parametrize("seed", [7, 2**64 - 2])
def test_each_sample_is_the_request_with_the_next_seed(engine: RunningEngine, seed: int) -> None:
    ask = request(PROMPT, 20, sampling=EVERYTHING | {"seed": seed}, n=4)
    found = samples_of(engine.stub.Generate(ask))
    assert [(tokens, text) for tokens, text, _ in found.values()] == singles(engine, ask, 4)
    assert [finish.seed for _, _, finish in found.values()] == [(seed + at) % 2**64 for at in range(4)]
    assert len({text for _, text, _ in found.values()}) == 4


def test_the_prompt_is_computed_once_and_its_pages_are_held_once(engine: RunningEngine, tmp_path: Path) -> None:
    prompt = (long_prompt(engine) * 2)[:37]
    ask = request(prompt, 8, sampling={"temperature": 1.0, "seed": 3}, n=4)
    expected = singles(engine, ask, 4)
    with_daemon, daemon = served_by_a_daemon(tmp_path)
    try:
        ran, held = list[int](), list[tuple[int, int]]()

        def watch(step: Sequence[Chunk]) -> None:
            ran.append(sum(chunk.count for chunk in step))
            if len(step) == 4 and not held:
                tables = [chunk.sequence.pages for chunk in step]
                assert all(table[:2] == tables[0][:2] for table in tables), "whole pages are shared"
                memory = with_daemon.engine.loop._source.memory
                tails = [memory[table[2]][..., :5, :].tobytes() for table in tables]
                assert len({table[2] for table in tables}) == 4 and len(set(tails)) == 1
                assert any(np.frombuffer(tails[0], np.float32))
                [pool] = daemon.stub.GetStats(kv.GetStatsRequest()).pools
                held.append((pool.held_pages, pool.active_sequences))

        with_daemon.steps.fault = watch
        found = samples_of(with_daemon.stub.Generate(ask))
        assert [(tokens, text) for tokens, text, _ in found.values()] == expected
        assert sum(ran) == 37 + 4 * 7
        # Two whole pages, a tail for each, and the tail they were copied from until all have gone on.
        assert held == [(2 + 4 + 1, 4)]
        with_daemon.idle()
        [pool] = daemon.stub.GetStats(kv.GetStatsRequest()).pools
        assert (pool.held_pages, pool.active_sequences) == (0, 0)
        assert not daemon.stub.Fsck(kv.FsckRequest()).violations
    finally:
        with_daemon.close()
        daemon.close()


@pytest.mark.parametrize(
    "flags", [("--local-pages", "20"), ("--max-batch", "2"), ("--max-batch", "8", "--max-step-tokens", "16")]
)
def test_samples_are_the_same_where_there_is_little_room(
    engine: RunningEngine, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    ask = request(long_prompt(engine)[:21], 30, sampling=EVERYTHING, n=4)
    small = RunningEngine(tmp_path, "--page-size", "4", *flags).start()
    try:
        found = samples_of(small.stub.Generate(ask))
        assert [(tokens, text) for tokens, text, _ in found.values()] == singles(engine, ask, 4)
        small.idle()
        preempted = small.stub.GetStats(pb.GetStatsRequest()).preemptions
        assert (preempted > 0) == (flags[0] == "--local-pages")
    finally:
        small.close()


def test_items_of_a_batch_may_have_samples(engine: RunningEngine) -> None:
    ask = request(PROMPT, 6, sampling={"temperature": 1.0, "seed": 3}, n=3)
    bad = request(n=40)
    answers = list(engine.stub.BatchGenerate(pb.BatchGenerateRequest(requests=[request(), ask, bad])))
    found = samples_of(one.response for one in answers if one.index == 1)
    assert [(tokens, text) for tokens, text, _ in found.values()] == singles(engine, ask, 3)
    [error] = [one.error for one in answers if one.WhichOneof("result") == "error"]
    assert "n is 40" in error.message


def test_prompt_log_probabilities_come_once_with_several_samples(engine: RunningEngine) -> None:
    prompt = long_prompt(engine)[:20]
    responses = list(engine.stub.Generate(request(prompt, 4, sampling={"prompt_logprobs": 0, "logprobs": 0}, n=3)))
    told_of = [one for one in responses if one.prompt_logprobs]
    assert len(told_of) == 1 and told_of[0].sample == 0 and len(told_of[0].prompt_logprobs) == 19
    for sample in range(3):
        mine = [one for one in responses if one.sample == sample]
        assert sum(len(one.logprobs) for one in mine) == sum(len(one.token_ids) for one in mine) == 4


def test_a_caller_that_leaves_takes_all_samples_along(engine: RunningEngine) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests
    stream = engine.stub.Generate(request(PROMPT, 200, sampling={"temperature": 1.0}, n=5))
    next(stream)
    stream.cancel()
    engine.idle()
    assert engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests == before + 5


def test_cancelling_finishes_every_sample(engine: RunningEngine) -> None:
    stream = engine.stub.Generate(request(PROMPT, 200, sampling={"temperature": 1.0}, n=3, request_id="several"))
    first = next(stream)
    engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="several"))
    found = samples_of(iter([first, *stream]))
    assert [finish.reason for _, _, finish in found.values()] == [pb.FINISH_REASON_CANCELLED] * 3
    engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="several"))
