"""Random checkpoints of every shape served, against the plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.references import plain_forward

SHAPES: dict[str, dict[str, Any]] = {
    "gqa 4:2": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "gqa 6:2": {"query_heads": 6, "kv_heads": 2},
    "gqa 10:2": {"query_heads": 10, "kv_heads": 2},
    "one head": {"query_heads": 1, "kv_heads": 1},
    "head_dim 64": {"head_dim": 64},
    "head_dim 80": {"head_dim": 80, "hidden": 320},
    "heads not as wide as hidden": {"head_dim": 24, "hidden": 56},
    "untied": {"tied": False},
    "odd sizes": {"hidden": 50, "intermediate": 37, "vocab": 101, "head_dim": 6},
}


def check(folder: Path, tokens: int = 300) -> None:
    """Compare logits, in one chunk and in two, and the parameters' count with the plain forward pass."""
    model = Model.load(folder)
    config = model.config
    ids = np.random.default_rng(5).integers(0, config.vocab_size, tokens).tolist()
    expected, _, _ = plain_forward.forward(folder, ids)
    page_size, table = 16, list(range(tokens // 16 + 1))
    pages = np.full((len(table), config.layers, 2, config.kv_heads, page_size, config.head_dim), np.nan, np.float32)
    whole = model.forward([Row(ids, 0, table, True)], pages)
    assert np.abs(whole[0] - expected[-1]).max() <= 1e-4 * np.abs(expected).max()
    first = model.forward([Row(ids[:111], 0, table, True)], pages)
    second = model.forward([Row(ids[111:], 111, table, True)], pages)
    assert np.abs(first[0] - expected[110]).max() <= 1e-4 * np.abs(expected).max()
    assert np.array_equal(second, whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_attention(tmp_path: Path, shape: str) -> None:
    config = llama_config(**SHAPES[shape])
    check(write_checkpoint(tmp_path, config, random_tensors(config)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_storage(tmp_path: Path, dtype: str, shards: int) -> None:
    config = llama_config(tied=False)
    check(write_checkpoint(tmp_path, config, random_tensors(config), dtype=dtype, shards=shards))


def test_the_rotary_base_is_read_wherever_it_stands(tmp_path: Path) -> None:
    usual = llama_config()
    nested = usual | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    del nested["rope_theta"]
    low = write_checkpoint(tmp_path / "low", usual, random_tensors(usual))
    high = write_checkpoint(tmp_path / "high", nested, random_tensors(usual))
    check(low)
    check(high)
    ids = list(range(100))
    difference = plain_forward.forward(low, ids)[0] - plain_forward.forward(high, ids)[0]
    assert np.abs(difference).max() > 0.1


def test_parameters_are_counted_once(tmp_path: Path) -> None:
    tied, untied = llama_config(tied=True), llama_config(tied=False)
    small = Model.load(write_checkpoint(tmp_path / "tied", tied, random_tensors(tied)))
    large = Model.load(write_checkpoint(tmp_path / "untied", untied, random_tensors(untied)))
    assert small.parameters == sum(tensor.size for tensor in random_tensors(tied).values())
    assert large.parameters - small.parameters == 128 * 64
