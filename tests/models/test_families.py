"""Every family served, against what `transformers` computes for it (make_references.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.engine.checkpoint import config as modelconfig
from services.engine.checkpoint.rope import Divisors, frequencies
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from services.engine.model.runner import Runner
from services.engine.pages.local import LocalPageSource
from services.engine.sampling.params import SamplingParams
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import FinishReason, Request, Sequence, Stopping
from tests.engine.checkpoint.test_config import read
from tests.engine.fakes import Clock, PlainText
from tests.models.checkpoints import write_checkpoint
from tests.models.families import (
    FAMILIES,
    GREEDY_TOKENS,
    LONG,
    LONG_POSITIONS,
    LONG_TOKENS,
    PROMPT_TOKENS,
    SEEDS,
    family_tensors,
    long_prompt_of,
    prompt_of,
)
from tests.models.references import plain_forward
from tests.models.ropes import ROPES

PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0)


@pytest.fixture(scope="module")
def references() -> Iterator[dict[str, NDArray]]:
    with np.load(Path(__file__).with_name("references") / "references.npz") as file:
        yield {name: file[name] for name in file.files}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FAMILIES[family]
    return write_checkpoint(tmp_path_factory.mktemp(family), config, family_tensors(config, SEEDS[family]))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder)


@pytest.mark.parametrize("chunks", [[PROMPT_TOKENS], [1] * PROMPT_TOKENS, [7] * 13 + [5]], ids=["one", "tokens", "7s"])
def test_logits_equal_transformers_in_any_chunking(
    family: str, model: Model, references: dict[str, NDArray], chunks: list[int]
) -> None:
    ids, expected = prompt_of(SEEDS[family]), references[f"{family}_logits"]
    g, table = model.geometry(PAGE_SIZE), list(range(PROMPT_TOKENS // PAGE_SIZE))[::-1]
    pages = np.full((len(table), g.layers, 2, g.kv_heads, PAGE_SIZE, g.head_dim), np.nan, np.float32)
    start = 0
    for count in chunks:
        logits = model.forward([Row(ids[start : start + count], start, table, True)], pages)
        start += count
        assert np.abs(logits[0] - expected[start - 1]).max() <= 1e-4
    assert start == PROMPT_TOKENS


def test_logits_stay_equal_to_transformers_over_thousands_of_tokens(
    family: str, tmp_path: Path, references: dict[str, NDArray]
) -> None:
    ids, config = long_prompt_of(SEEDS[family]), FAMILIES[family] | LONG
    tensors = family_tensors(config, SEEDS[family])
    expected, _, _ = plain_forward.forward((config, tensors), ids)
    # What transformers rounds on its way has a part in these.
    assert np.abs(expected[LONG_POSITIONS] - references[f"{family}_long"]).max() <= 4e-5
    long = Model.load(write_checkpoint(tmp_path, config, tensors))
    g, table = long.geometry(PAGE_SIZE), list(range(LONG_TOKENS // PAGE_SIZE))[::-1]
    pages = np.full((len(table), g.layers, 2, g.kv_heads, PAGE_SIZE, g.head_dim), np.nan, np.float32)
    start, found = 0, []
    for count in [1200, 793, *[1] * 7]:
        found.append(long.forward([Row(ids[start : start + count], start, table, count)], pages))
        start += count
    logits = np.concatenate(found)
    assert np.abs(logits - expected).max() <= 5e-5
    assert np.abs(logits[LONG_POSITIONS] - references[f"{family}_long"]).max() <= 5e-5


def test_the_plain_forward_pass_equals_transformers(family: str, folder: Path, references: dict[str, NDArray]) -> None:
    logits, _, _ = plain_forward.forward(folder, prompt_of(SEEDS[family]))
    assert np.abs(logits - references[f"{family}_logits"]).max() <= 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_family_from_every_storage(family: str, tmp_path: Path, dtype: str) -> None:
    config = FAMILIES[family]
    stored = write_checkpoint(tmp_path, config, family_tensors(config, 3), dtype=dtype, shards=2)
    ids = prompt_of(3)
    expected, _, _ = plain_forward.forward(stored, ids)
    loaded = Model.load(stored)
    g = loaded.geometry(PROMPT_TOKENS)
    pages = np.zeros((1, g.layers, 2, g.kv_heads, PROMPT_TOKENS, g.head_dim), np.float32)
    assert np.abs(loaded.forward([Row(ids, 0, [0], True)], pages)[0] - expected[-1]).max() <= 1e-4


# --- through the engine's loop ---------------------------------------------------------------------------------------


class Served:
    """A model in the engine's loop, driven by hand."""

    def __init__(self, model: Model, *, pages: int, max_step_tokens: int) -> None:
        g = model.geometry(PAGE_SIZE)
        memory = np.full((pages, g.layers, 2, g.kv_heads, PAGE_SIZE, g.head_dim), np.nan, np.float32)
        self.tokens: dict[str, list[int]] = {}
        self.sequences: dict[str, Sequence] = {}
        self.clock = Clock()
        source = LocalPageSource(pages, PAGE_SIZE)
        limits = Limits(8, max_step_tokens, 100)
        self.loop = EngineLoop(
            Runner(model, lambda: memory), source, limits, self._on_events, patience_s=60.0, clock=self.clock
        )

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.outcome is not None:
                assert event.outcome.reason is FinishReason.LENGTH and event.sequence is not None
                self.sequences[event.request_id] = event.sequence

    def submit(self, name: str, prompt: list[int]) -> None:
        self.loop.submit(Request(name, prompt, Stopping(GREEDY_TOKENS), GREEDY, PlainText()))

    def run(self) -> None:
        for _ in range(3000):
            self.clock.now += self.loop.iterate() + 0.001
            if not self.loop.scheduler.live:
                return
        raise AssertionError(self.loop.scheduler)


def test_greedy_tokens_equal_transformers_in_chunks_and_after_a_prefix_hit(
    family: str, model: Model, references: dict[str, NDArray]
) -> None:
    prompt, expected = prompt_of(SEEDS[family]), references[f"{family}_greedy"].tolist()
    served = Served(model, pages=64, max_step_tokens=13)
    served.submit("first", prompt)
    served.run()
    assert served.tokens["first"] == expected
    served.submit("second", prompt)
    served.run()
    assert served.tokens["second"] == expected
    assert served.sequences["second"].cached_tokens == PROMPT_TOKENS - PAGE_SIZE


def test_greedy_tokens_equal_transformers_in_a_mixed_batch_and_after_a_preemption(
    family: str, model: Model, references: dict[str, NDArray]
) -> None:
    prompt, expected = prompt_of(SEEDS[family]), references[f"{family}_greedy"].tolist()
    others = [prompt_of(100 + nth)[: 20 + 30 * nth] for nth in range(3)]
    # Room for one and a half of them all: whoever came last makes way.
    served = Served(model, pages=15, max_step_tokens=24)
    for nth, other in enumerate(others):
        served.submit(f"other {nth}", other)
    served.submit("it", prompt)
    served.run()
    assert served.tokens["it"] == expected
    assert served.sequences["it"].preemptions > 0
    for nth, other in enumerate(others):
        alone = Served(model, pages=15, max_step_tokens=512)
        alone.submit("it", other)
        alone.run()
        assert served.tokens[f"other {nth}"] == alone.tokens["it"]


# --- rotary embeddings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(tmp_path: Path, references: dict[str, NDArray], name: str) -> None:
    config = read(tmp_path, **ROPES[name])
    found = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert found.dtype == np.float32
    # The same operations in float32, but for the power, which torch rounds to either of two neighbours.
    expected = references[f"frequencies_{name}"]
    np.testing.assert_array_max_ulp(found, expected, maxulp=1)
    assert (found == expected).mean() >= 0.98


def test_divisors_of_another_number_are_refused() -> None:
    assert np.array_equal(frequencies(4, 100.0, Divisors((1.0, 4.0))), np.array([1, 0.025], np.float32))
    with pytest.raises(ValueError, match="there are 3 frequency divisors for 2 frequencies"):
        frequencies(4, 100.0, Divisors((1.0, 1.0, 1.0)))


def test_every_architecture_has_a_reference() -> None:
    assert {config["architectures"][0] for config in FAMILIES.values()} == set(modelconfig.FAMILIES)
