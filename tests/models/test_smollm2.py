"""SmolLM2-135M-Instruct from its file, through both services: what llama.cpp and `transformers` make of it.

The references are those of `make_smollm2.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.engine.model.checkpoint import Checkpoint
from services.engine.text.tokenizer import Tokenizer
from tests.generation import collect
from tests.models.references.smollm2 import (
    CHATS,
    EXCERPT,
    LOGPROBS,
    MODEL,
    MOST_TOKENS,
    REFERENCES,
    TEXTS,
    random_texts,
)
from tests.processes import ROOT, Service, engine, kvcache

pytestmark = [
    pytest.mark.needs("smollm2"),
    pytest.mark.timeout(600),
]

PAGE = 16
END, END_OF_TEXT = 2, 0  # <|im_end|>, <|endoftext|>
#: What an answer has to say, for people.
SAYS = {"capital": "Paris", "capitals": "Rome", "license": "Apache License"}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return json.loads(REFERENCES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Checkpoint.open(MODEL).tokenizer()


@dataclass
class Served:
    """The model served by an engine and a daemon in processes of their own."""

    daemon: Service
    engine: Service

    @property
    def stub(self) -> Any:
        return engine_pb2_grpc.EngineServiceStub(self.engine.channel)

    @property
    def cache(self) -> Any:
        return kvcache_pb2_grpc.KvCacheServiceStub(self.daemon.channel)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        with kvcache(Path(name)) as daemon, engine(Path(name), daemon.address, model=MODEL) as started:
            yield Served(daemon, started)


def messages(name: str) -> pb.Messages:
    return pb.Messages(items=[pb.Message(**one) for one in CHATS[name]])


def asked(name: str, **fields: Any) -> pb.GenerateRequest:
    """A greedy request that the model itself ends."""
    sampling = pb.Sampling(temperature=0.0, **fields.pop("sampling", {}))
    stopping = pb.Stopping(max_tokens=MOST_TOKENS[name])
    return pb.GenerateRequest(prompt=pb.Prompt(messages=messages(name)), sampling=sampling, stopping=stopping, **fields)


@pytest.mark.parametrize("nth", range(len(TEXTS)))
def test_a_text_has_the_tokens_of_llama_cpp(tokenizer: Tokenizer, references: dict[str, Any], nth: int) -> None:
    ids = tokenizer.encode(TEXTS[nth])
    assert ids == references["texts"][nth]
    assert tokenizer.decode(ids, keep_special=True) == TEXTS[nth]


def test_random_texts_have_the_tokens_of_llama_cpp(tokenizer: Tokenizer, references: dict[str, Any]) -> None:
    texts, expected = random_texts(), references["texts"][len(TEXTS) :]
    assert [tokenizer.encode(text) for text in texts] == expected
    assert len({token for ids in expected for token in ids}) > 100


def test_the_model_is_what_its_file_says(served: Served) -> None:
    told = served.stub.GetModel(pb.GetModelRequest())
    assert (told.model_id, told.architecture) == (MODEL.stem, "LlamaForCausalLM")
    assert (told.parameters, told.vocab_size, told.max_context) == (134515008, 49152, 8192)
    assert list(told.eos_token_ids) == [END, END_OF_TEXT]
    assert told.has_chat_template and not told.chat_template_error
    [begun], [loaded] = served.engine.events("weights_loading"), served.engine.events("weights_loaded")
    assert loaded["bytes"] == begun["total_bytes"] < MODEL.stat().st_size
    assert loaded["tensors"] == begun["total_tensors"] == 272


def test_the_weights_are_never_in_memory_twice(served: Served) -> None:
    status = Path(f"/proc/{served.engine.pid}/status").read_text()
    [peak] = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")]
    weights = 4 * served.stub.GetModel(pb.GetModelRequest()).parameters
    # All of them, the largest tensor once more while it is unpacked (a fifth), and the process itself (a quarter).
    assert weights < peak < 1.5 * weights


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_written_as_transformers_writes_it(served: Served, references: dict[str, Any], name: str) -> None:
    told = served.stub.Tokenize(pb.TokenizeRequest(messages=messages(name)))
    assert told.text == references["chats"][name]["prompt"]
    assert list(told.token_ids) == references["chats"][name]["token_ids"]


def test_answers_of_one_batch_have_the_tokens_of_transformers(served: Served, references: dict[str, Any]) -> None:
    """The longest prompt takes several steps, and the others are decoded meanwhile."""
    tokens: dict[str, list[int]] = {name: [] for name in CHATS}
    for item in served.stub.BatchGenerate(pb.BatchGenerateRequest(requests=[asked(name) for name in CHATS])):
        assert not item.HasField("error"), item.error
        tokens[[*CHATS][item.index]] += item.response.token_ids
    assert tokens == {name: chat["greedy"] for name, chat in references["chats"].items()}
    assert len(references["chats"]["license"]["token_ids"]) > 1024


@pytest.mark.parametrize("name", SAYS)
def test_an_answer_on_cached_pages_has_them_too(served: Served, references: dict[str, Any], name: str) -> None:
    expected = references["chats"][name]
    text, tokens, finish = collect(served.stub.Generate(asked(name)))
    assert tokens == expected["greedy"]
    assert SAYS[name] in text and "<|" not in text
    ended = tokens[-1] == END
    assert finish.reason == (pb.FINISH_REASON_EOS if ended else pb.FINISH_REASON_LENGTH)
    assert finish.usage.cached_tokens == (len(expected["token_ids"]) - 1) // PAGE * PAGE > 0


def test_a_texts_log_probabilities_are_those_of_transformers(served: Served) -> None:
    sampling, stopping = pb.Sampling(temperature=0.0, prompt_logprobs=3), pb.Stopping(max_tokens=1)
    request = pb.GenerateRequest(prompt=pb.Prompt(text=EXCERPT), sampling=sampling, stopping=stopping)
    told = next(iter(served.stub.Generate(request))).prompt_logprobs
    with np.load(LOGPROBS) as expected:
        assert [one.token_id for one in told] == expected["token_ids"][1:].tolist()
        found = np.array([one.logprob for one in told])
        assert np.abs(found - expected["logprobs"]).max() < 1e-3
        likeliest = np.array([[top.logprob for top in one.top] for one in told])
        assert np.abs(likeliest - expected["top_logprobs"]).max() < 1e-3
        # Where none is as likely as the next, they come in the same order.
        clear = (-np.diff(expected["top_logprobs"], axis=1) > 2e-3).all(axis=1)
        same = np.array([[top.token_id for top in one.top] for one in told]) == expected["top_ids"]
        assert same[clear, :2].all() and clear.mean() > 0.95
    # Tokens drawn evenly would have a mean of -10.8.
    assert found.mean() > -4


def test_a_conversation_on_the_command_line(served: Served) -> None:
    command = [sys.executable, "-m", "services.engine", "chat", "--target", served.engine.address]
    done = subprocess.run(
        [*command, "--temperature", "0", "--stats"],
        cwd=ROOT,
        input="Count from 1 to 10.\nWhat is the capital of Spain?\n",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    *counted, last = done.stdout.splitlines()
    assert len(counted) == 10 and counted[-1] == "10. 10"
    assert "Madrid" in last
    turns = [line for line in done.stderr.splitlines() if "cached" in line]
    # The second turn finds the pages of the first: its question, 39 tokens, and its answer, 51 before its end.
    assert len(turns) == 2 and "(80 cached)" in turns[1]


def test_nothing_is_left_behind(served: Served) -> None:
    """The last test of the module."""
    now = served.stub.GetStats(pb.GetStatsRequest())
    assert (now.running_requests, now.queued_requests, now.held_pages, now.failed_requests) == (0, 0, 0, 0)
    assert not served.cache.Fsck(kvcache_pb2.FsckRequest()).violations
