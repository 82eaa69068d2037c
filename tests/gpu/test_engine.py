"""The product on a GPU: engines that generate, on pages that the daemon has in the GPU's memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from services.engine.pages.private import private_pages
from services.engine.text.tokenizer import Tokenizer
from tests.generation import collect, request
from tests.gpu.conftest import MODEL, World
from tests.processes import Service

TOKENS = 16
#: Of a prompt that was answered before, which is asked again for its pages.
FEW = 8
#: Longer than a step of 64 tokens, and than some pages; and shorter than one page.
LONG = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 2
PROMPTS = [LONG, "ROMEO:", "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n"]

pytestmark = pytest.mark.timeout(600)


@functools.cache
def reference(prompt: str) -> tuple[int, ...]:
    """What NumPy generates from a prompt, greedily, one token after another and nothing else."""
    model = Model.load(MODEL)
    tokens = Tokenizer.load(MODEL, model.config.vocab_size).encode(prompt)
    count = len(tokens)
    pages = private_pages(model.geometry(16), 1 + (count + TOKENS) // 16)
    table = range(len(pages))
    logits = model.forward([Row(tokens, 0, table, True)], pages)
    while len(tokens) < count + TOKENS:
        tokens.append(int(np.argmax(logits[-1])))
        logits = model.forward([Row(tokens[-1:], len(tokens) - 1, table, True)], pages)
    return tuple(tokens[count:])


def stub(engine: Service) -> Any:
    return engine_pb2_grpc.EngineServiceStub(engine.channel)


def assert_all_clean(daemon: Service, *engines: Service) -> None:
    cache = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    [pool] = cache.GetStats(kvcache_pb2.GetStatsRequest()).pools
    assert pool.active_sequences == pool.held_pages == pool.quarantined_pages == 0
    assert not cache.Fsck(kvcache_pb2.FsckRequest()).violations
    for engine in engines:
        stats = stub(engine).GetStats(engine_pb2.GetStatsRequest())
        assert (stats.running_requests, stats.queued_requests, stats.held_pages) == (0, 0, 0)


def test_the_same_tokens_as_numpy_and_a_cache_that_engines_share(one: World) -> None:
    daemon = one.daemon("--memory", "32MiB")
    first = one.serving(daemon, "first", "--dtype", "f32", "--max-step-tokens", "64")
    assert stub(first).GetModel(engine_pb2.GetModelRequest()).backend in ("rocm", "cuda")
    # All at once: prompts in chunks beside tokens of the others.
    streams = [stub(first).Generate(request(prompt, TOKENS)) for prompt in PROMPTS]
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        _, tokens, finish = collect(stream)
        assert tuple(tokens) == reference(prompt)
        assert finish.usage.cached_tokens == 0
    # Another process, on the same memory: it computes nothing of the prompt but its last tokens.
    second = one.serving(daemon, "second", "--dtype", "f32")
    for engine in (first, second):
        _, tokens, finish = collect(stub(engine).Generate(request(LONG, FEW)))
        assert tuple(tokens) == reference(LONG)[:FEW]
        assert finish.usage.cached_tokens == (finish.usage.prompt_tokens - 1) // 16 * 16 > 0
    assert_all_clean(daemon, first, second)
    # One dies with a request under way; the other goes on, and what was cached stays.
    assert next(iter(stub(first).Generate(request(LONG, 200)))) is not None
    first.kill()
    _, tokens, finish = collect(stub(second).Generate(request(LONG, FEW)))
    assert tuple(tokens) == reference(LONG)[:FEW] and finish.usage.cached_tokens > 0
    assert second.stop() == 0
    third = one.serving(daemon, "third", "--dtype", "f32")
    _, tokens, finish = collect(stub(third).Generate(request(LONG, FEW)))
    assert tuple(tokens) == reference(LONG)[:FEW] and finish.usage.cached_tokens > 0
    assert_all_clean(daemon, third)
    assert third.stop() == 0 and daemon.stop() == 0


def test_samples_copy_pages_on_the_gpu_and_log_probabilities_are_numpys(one: World) -> None:
    daemon = one.daemon("--memory", "32MiB")
    engine = one.serving(daemon, "first", "--dtype", "f32", "--max-step-tokens", "64")
    asked = request(LONG, TOKENS, n=3, sampling={"logprobs": 1, "prompt_logprobs": 2})
    tokens, logprobs = dict[int, list[int]](), dict[int, list[Any]]()
    told: list[Any] = []
    for response in stub(engine).Generate(asked):
        tokens.setdefault(response.sample, []).extend(response.token_ids)
        logprobs.setdefault(response.sample, []).extend(response.logprobs)
        told += response.prompt_logprobs
    # Greedy, so that every sample is the same, each in pages of its own behind the prompt.
    assert {sample: tuple(found) for sample, found in tokens.items()} == dict.fromkeys(range(3), reference(LONG))
    model = Model.load(MODEL)
    ids = [*Tokenizer.load(MODEL, model.config.vocab_size).encode(LONG), *reference(LONG)]
    pages = private_pages(model.geometry(16), 1 + len(ids) // 16)
    logits = model.forward([Row(ids, 0, range(len(pages)), len(ids))], pages).astype(np.float64)
    highest = logits.max(axis=1, keepdims=True)
    expected = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    for sample in range(3):
        for at, found in enumerate([*told, *logprobs[sample]], 1):
            assert found.token_id == ids[at]
            assert found.logprob == pytest.approx(expected[at - 1, ids[at]], abs=1e-3)
    assert_all_clean(daemon, engine)
    assert engine.stop() == 0 and daemon.stop() == 0
