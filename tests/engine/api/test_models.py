"""An engine on models of other families and formats, through its socket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import ModelInvalid, ServiceError
from services.engine.config import BUNDLED_MODEL
from tests.engine.checkpoint.gguf.sentencepieces import metadata_of, trained
from tests.engine.checkpoint.gguf.test_tokenizer import CONFIG, KEYS, TENSORS, VOCAB
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request
from tests.models.checkpoints import write_checkpoint
from tests.models.families import FAMILIES, GREEDY_TOKENS, SEEDS, family_tensors, prompt_of
from tests.models.gguf_files import write_gguf


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


def write(directory: Path, family: str, form: str) -> Path:
    """A model of the family, with a tokenizer; what it makes of text does not matter here."""
    config, tensors = FAMILIES[family], family_tensors(FAMILIES[family], SEEDS[family])
    if form == "gguf":
        letters = [chr(33 + nth) for nth in range(94)]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*letters, "!!"],
        }
        metadata |= {"tokenizer.ggml.merges": ["! !"]}
        write_gguf(directory / "tiny.gguf", config, tensors, metadata=metadata)
        return directory / "tiny.gguf"
    folder = write_checkpoint(directory / "tiny", config, tensors)
    (folder / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 5}, "unk_token": "a"}}'
    )
    return folder


@pytest.mark.parametrize(("family", "form"), [("qwen3", "folder"), ("qwen2", "gguf"), ("llama3", "gguf")])
def test_the_tokens_are_those_of_transformers(directory: Path, family: str, form: str) -> None:
    model = write(directory, family, form)
    with np.load(Path(__file__).parents[2] / "models" / "references" / "references.npz") as references:
        expected = references[f"{family}_greedy"].tolist()
    engine = RunningEngine(directory, "--model", str(model), "--max-step-tokens", "40").start()
    try:
        for _ in range(2):
            _, tokens, _ = collect(engine.stub.Generate(request(prompt_of(SEEDS[family]), GREEDY_TOKENS)))
            assert tokens == expected
        told = engine.stub.GetModel(pb.GetModelRequest())
        assert (told.model_id, told.max_context) == ("tiny", 512)
        assert engine.engine.pool_id.startswith("tiny@")
        engine.idle()
    finally:
        engine.close()


def test_a_smaller_context_is_all_there_is(directory: Path) -> None:
    engine = RunningEngine(
        directory, "--model", str(write(directory, "qwen3", "folder")), "--max-context", "20"
    ).start()
    try:
        assert engine.stub.GetModel(pb.GetModelRequest()).max_context == 20
        assert len(collect(engine.stub.Generate(request([1] * 19, 1)))[1]) == 1
        error = refused(lambda: engine.stub.Generate(request([1] * 20, 1)))
        assert "20" in error.message
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": len(VOCAB) - 1}, "the model's vocab_size is"),
        ({"num_hidden_layers": 2}, "missing 9 tensors"),
        ({"intermediate_size": 95}, r"has shape \[64, 96\]; the configuration requires \[64, 95\]"),
    ],
    ids=["tokenizer", "layers", "shape"],
)
def test_a_model_that_contradicts_itself_is_not_served(directory: Path, change: dict[str, int], said: str) -> None:
    folder = write_checkpoint(directory / "bad", CONFIG | change, TENSORS)
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", folder)
    engine = RunningEngine(directory, "--model", str(folder))
    try:
        with pytest.raises(ServiceError, match=said) as caught:
            engine.start()
        assert isinstance(caught.value, ModelInvalid)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["byte-level", "pieces"])
def test_text_through_a_tokenizer_of_gguf(directory: Path, kind: str) -> None:
    metadata = KEYS if kind == "byte-level" else metadata_of(trained())
    write_gguf(directory / "it.gguf", CONFIG, TENSORS, metadata=metadata)
    engine = RunningEngine(directory, "--model", str(directory / "it.gguf")).start()
    try:
        ids = list(engine.stub.Tokenize(pb.TokenizeRequest(text="ROMEO: hark")).token_ids)
        text, tokens, _ = collect(engine.stub.Generate(request("ROMEO: hark", 12)))
        assert len(tokens) == 12
        assert collect(engine.stub.Generate(request(ids, 12)))[:2] == (text, tokens)
    finally:
        engine.close()
