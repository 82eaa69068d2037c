"""The bundled model against what `transformers` computes for it (models/reference.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from services.engine.text.tokenizer import Tokenizer
from tests.models.references import plain_forward

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models/shakespeare"
PAGE_SIZE = 16
TABLE = list(range(40))[::-1]
CONTINUED = ["name", "line", "passage"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(FOLDER)


@pytest.fixture(scope="module")
def reference() -> Iterator[dict[str, NDArray]]:
    with np.load(Path(__file__).with_name("references") / "reference_logits.npz") as file:
        yield {name: file[name] for name in file.files}


def blank_pages(model: Model) -> NDArray[np.float32]:
    """An arena of NaN: reading what nobody wrote shows."""
    shape = (len(TABLE), model.config.layers, 2, model.config.kv_heads, PAGE_SIZE, model.config.head_dim)
    return np.full(shape, np.nan, np.float32)


def run(model: Model, ids: list[int], chunks: list[int]) -> dict[int, NDArray[np.float32]]:
    """Logits by position, of the last token of each chunk."""
    pages, start, found = blank_pages(model), 0, {}
    for count in chunks:
        found[start + count - 1] = model.forward([Row(ids[start : start + count], start, TABLE, True)], pages)[0]
        start += count
    return found


@pytest.mark.parametrize(
    "chunks",
    [[512], [1] * 512, [16] * 32, [7] * 73 + [1], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 137], [200, 1, 311]],
    ids=lambda chunks: f"{len(chunks)} chunks",
)
def test_logits_equal_transformers_in_any_chunking(
    model: Model, reference: dict[str, NDArray], chunks: list[int]
) -> None:
    found = run(model, reference["long_ids"].tolist(), chunks)
    assert 511 in found
    for position, logits in found.items():
        assert np.abs(logits - reference["long_logits"][position]).max() <= 1e-4


@pytest.mark.parametrize("prompt", CONTINUED)
def test_greedy_continuations_equal_transformers(model: Model, reference: dict[str, NDArray], prompt: str) -> None:
    ids = reference[f"{prompt}_ids"].tolist()
    pages = blank_pages(model)
    logits = model.forward([Row(ids, 0, TABLE, True)], pages)
    assert np.abs(logits[0] - reference[f"{prompt}_logits"][-1]).max() <= 1e-4
    continued: list[int] = []
    expected = reference[f"{prompt}_greedy"].tolist()
    while len(continued) < len(expected):
        continued.append(int(logits.argmax()))
        logits = model.forward([Row(continued[-1:], len(ids) + len(continued) - 1, TABLE, True)], pages)
    assert continued == expected


def test_the_prompts_are_what_the_tokenizer_makes_of_their_text(reference: dict[str, NDArray]) -> None:
    tokenizer = Tokenizer.load(FOLDER, 1024)
    assert tokenizer.encode("ROMEO:\n") == reference["name_ids"].tolist()
    assert tokenizer.encode("To be, or not to be") == reference["line_ids"].tolist()
    assert tokenizer.encode("<|endoftext|>") == reference["passage_ids"].tolist()
    long = tokenizer.decode(reference["long_ids"].tolist())
    assert long.startswith("Shall I compare thee to a summer's day?\n")


def test_the_plain_forward_pass_equals_transformers(reference: dict[str, NDArray]) -> None:
    logits, _, _ = plain_forward.forward(FOLDER, reference["long_ids"].tolist())
    assert np.abs(logits - reference["long_logits"]).max() <= 1e-4


def test_the_pages_hold_the_k_and_v_of_the_plain_forward_pass(model: Model, reference: dict[str, NDArray]) -> None:
    ids = reference["long_ids"].tolist()[:100]
    pages = blank_pages(model)
    model.forward([Row(ids[:37], 0, TABLE, False)], pages)
    model.forward([Row(ids[37:], 37, TABLE, False)], pages)
    _, k, v = plain_forward.forward(FOLDER, ids)
    for position in range(100):
        page, slot = TABLE[position // PAGE_SIZE], position % PAGE_SIZE
        for layer in range(model.config.layers):
            assert np.abs(pages[page, layer, 0, :, slot] - k[layer][position]).max() <= 1e-4
            assert np.abs(pages[page, layer, 1, :, slot] - v[layer][position]).max() <= 1e-4
    # And nothing else was written: 100 tokens of 640 slots.
    assert np.isnan(pages).mean() == 1 - 100 / (len(TABLE) * PAGE_SIZE)
