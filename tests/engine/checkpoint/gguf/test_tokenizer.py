"""Tokenizers out of GGUF files: the same tokens as the ``tokenizer.json`` that the file was made of."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ModelInvalid
from services.engine.config import BUNDLED_MODEL
from services.engine.model.checkpoint import Checkpoint
from services.engine.text.tokenizer import Tokenizer
from tests.models.families import FAMILIES, family_tensors
from tests.models.gguf_files import write_gguf

JSON = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
VOCAB: dict[str, int] = JSON["model"]["vocab"]
CONFIG = FAMILIES["llama2"] | {"vocab_size": len(VOCAB), "num_hidden_layers": 1}
TENSORS = family_tensors(CONFIG, 0)
END = 0  # <|endoftext|>, the bundled model's one special token
KEYS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": sorted(VOCAB, key=VOCAB.__getitem__),
    "tokenizer.ggml.token_type": [3] + [1] * (len(VOCAB) - 1),
    "tokenizer.ggml.merges": [" ".join(pair) for pair in JSON["model"]["merges"]],
    "tokenizer.ggml.bos_token_id": END,
    "tokenizer.ggml.eos_token_id": END,
}


def tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    """Of a file with these keys changed, underscores for dots."""
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write_gguf(folder / "it.gguf", CONFIG, TENSORS, metadata=KEYS | changed)
    return Checkpoint.open(folder / "it.gguf").tokenizer()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("built"))


BUNDLED = Tokenizer.load(BUNDLED_MODEL, len(VOCAB))


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text("abcdefgh ETO'slld123\n\t.,!é"))
def test_every_text_has_the_same_tokens(built: Tokenizer, text: str) -> None:
    ids = built.encode(text)
    assert ids == BUNDLED.encode(text)
    assert built.decode(ids) == text


def test_special_tokens_are_special(built: Tokenizer) -> None:
    text = "<|endoftext|>ROMEO:\nBut soft<|endoftext|>"
    ids = built.encode(text)
    assert ids == BUNDLED.encode(text) and ids[0] == ids[-1] == END
    assert built.decode(ids) == "ROMEO:\nBut soft"
    assert built.decode(ids, keep_special=True) == text


def test_the_end_of_a_turn_is_known_by_its_name(tmp_path: Path) -> None:
    tokens, kinds = KEYS["tokenizer.ggml.tokens"].copy(), KEYS["tokenizer.ggml.token_type"].copy()
    tokens[-1], kinds[-1] = "<|im_end|>", 4
    merges = [line for line in KEYS["tokenizer.ggml.merges"] if line.replace(" ", "") in tokens]
    found = tokenizer(tmp_path, tokens=tokens, token_type=kinds, merges=merges)
    assert Checkpoint.open(tmp_path / "it.gguf").config.eos_token_ids == (END, len(tokens) - 1)
    assert found.decode(found.encode("Hark<|im_end|>")) == "Hark"


def test_user_defined_tokens_are_whole_and_stay_in_the_text(tmp_path: Path) -> None:
    kinds = KEYS["tokenizer.ggml.token_type"].copy()
    kinds[VOCAB["th"]] = 4
    found = tokenizer(tmp_path, token_type=kinds)
    ids = found.encode("other")
    assert ids == [VOCAB["o"], VOCAB["th"], VOCAB["er"]] != BUNDLED.encode("other")
    assert found.decode(ids) == "other"


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"add_bos_token": True}, [END], []),
        ({"add_eos_token": True, "eos_token_id": 7}, [], [7]),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token_id": 7}, [END], [7]),
        ({"add_bos_token": False, "add_eos_token": False}, [], []),
    ],
)
def test_what_a_text_begins_and_ends_with(
    tmp_path: Path, changes: dict[str, Any], before: list[int], after: list[int]
) -> None:
    assert tokenizer(tmp_path, **changes).encode("ROMEO:") == before + BUNDLED.encode("ROMEO:") + after


def words(found: Tokenizer, text: str) -> list[str]:
    """Where a text is cut before anything is merged."""
    pre = found.inner.pre_tokenizer
    assert pre is not None
    return [text[begin:end] for _, (begin, end) in pre.pre_tokenize_str(text)]


TEXT = "He'll say I'M 12345, twice!!\n\n  Ok"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["He", "'ll", " say", " I", "'", "M", " 12345", ",", " twice", "!!", "\n\n ", " Ok"]),
        ("smollm", ["He", "'ll", " say", " I", "'", "M", " ", *"12345", ",", " twice", "!!", "\n\n ", " Ok"]),
        ("llama-bpe", ["He", "'ll", " say", " I", "'M", " ", "123", "45", ",", " twice", "!!\n\n", " ", " Ok"]),
        ("qwen2", ["He", "'ll", " say", " I", "'M", " ", *"12345", ",", " twice", "!!\n\n", " ", " Ok"]),
    ],
)
def test_texts_are_cut_as_the_model_was_trained(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert words(tokenizer(tmp_path, pre=pre), TEXT) == expected


def test_qwen_composes_and_llama_3_takes_whole_words_first(tmp_path: Path) -> None:
    decomposed = "e\u0301"
    assert tokenizer(tmp_path, pre="qwen2").encode(decomposed) == BUNDLED.encode("é")
    assert tokenizer(tmp_path, pre="gpt-2").encode(decomposed) == BUNDLED.encode(decomposed) != BUNDLED.encode("é")
    # A token that no merges lead to is found all the same.
    tokens = KEYS["tokenizer.ggml.tokens"].copy()
    tokens[-1] = "xqxqxq"
    merges = [line for line in KEYS["tokenizer.ggml.merges"] if line.replace(" ", "") in tokens]
    assert tokenizer(tmp_path, pre="llama-bpe", tokens=tokens, merges=merges).encode("xqxqxq") == [len(tokens) - 1]
    assert len(tokenizer(tmp_path, pre="gpt-2", tokens=tokens, merges=merges).encode("xqxqxq")) > 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": None},
            "tokenizer.ggml.model is missing: it must be gpt2, byte-level BPE, or llama, ",
        ),
        ({"model": "t5"}, r'model is "t5": it must be gpt2.* put the model\'s tokenizer.json next to the file'),
        ({"pre": "tekken"}, r'pre is "tekken": supported are gpt-2, .*; or put the model\'s tokenizer.json'),
        ({"pre": None}, "pre is missing: supported are gpt-2"),
        ({"tokens": None}, "tokens is missing: it must be a list of strings"),
        ({"tokens": [1, 2, 3]}, "it must be a list of strings"),
        ({"tokens": ["a", "b", "a"]}, "there is a duplicate token"),
        (
            {"tokens": [f"t{n}" for n in range(len(VOCAB) + 1)], "merges": ["t t"]},
            "token_type is .* one entry per token",
        ),
        ({"token_type": [1, 2]}, f"it must be a list with one entry per token, {len(VOCAB)}"),
        ({"merges": ["nothing joined"]}, "'nothing joined' does not merge two tokens into a third"),
        ({"merges": None}, "merges is missing"),
        ({"add_bos_token": 1}, "add_bos_token is 1: it must be true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "there is no bos_token_id"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_tokenizer_that_cannot_be_built(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelInvalid, match=said) as caught:
        tokenizer(tmp_path, **changes)
    assert "it.gguf" in caught.value.message and len(caught.value.message) < 500 + len(str(tmp_path))


def test_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    more = [*KEYS["tokenizer.ggml.tokens"], "one more"]
    kinds = [*KEYS["tokenizer.ggml.token_type"], 1]
    with pytest.raises(ModelInvalid, match=f"has token id {len(VOCAB)}; the model's vocab_size is {len(VOCAB)}"):
        tokenizer(tmp_path, tokens=more, token_type=kinds)


def test_another_tokenizer_beside_the_file_is_for_files_whose_own_cannot_be_built(
    tmp_path: Path, logged: list[MutableMapping[str, Any]]
) -> None:
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    other.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer(tmp_path).encode("a") == BUNDLED.encode("a") != [0]
    assert not logged
    for changes in ({"model": "t5"}, {"model": "llama"}, {"pre": None}, {"pre": "tekken"}):
        assert tokenizer(tmp_path, **changes).encode("a") == [0]
        assert logged[-1]["event"] == "tokenizer_beside" and logged[-1]["file"] == str(tmp_path / "tokenizer.json")
    assert 'tokenizer.ggml.pre is "tekken"' in logged[-1]["instead_of"]


def test_the_bundled_model_as_a_file_says_the_same(tmp_path: Path) -> None:
    """Its own weights and tokenizer, through GGUF and back."""
    from safetensors.numpy import load_file

    from services.engine.model.batch import Row
    from services.engine.model.decoder import Model

    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config |= {"model_type": "llama", "rope_theta": 10000.0}
    tensors = {name: t.astype(np.float32) for name, t in load_file(BUNDLED_MODEL / "model.safetensors").items()}
    write_gguf(tmp_path / "it.gguf", config, tensors, metadata=KEYS)
    checkpoint = Checkpoint.open(tmp_path / "it.gguf")
    ids = checkpoint.tokenizer().encode("JULIET:\nO Romeo")
    found, expected = Model(checkpoint), Model.load(BUNDLED_MODEL)
    g = expected.geometry(64)
    assert found.parameters == expected.parameters
    assert (found.config.eos_token_ids, found.config.max_context) == ((END,), expected.config.max_context)
    logits = []
    for model in (found, expected):
        pages = np.zeros((1, g.layers, 2, g.kv_heads, 64, g.head_dim), np.float32)
        logits.append(model.forward([Row(ids, 0, [0], True)], pages))
    # The eps of the norm is float32 in a GGUF file.
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
