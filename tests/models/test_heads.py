"""Which matrix is the output's: the files decide, whatever ``tie_word_embeddings`` says, as for `transformers`."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from services.common.errors import ModelInvalid
from services.engine.model.batch import Row
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.references import plain_forward

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = llama_config()
TENSORS = random_tensors(TIED)
OWN = random_tensors(llama_config(tied=False), seed=1)[HEAD]
IDS = np.random.default_rng(2).integers(0, 128, 60).tolist()


def logits(path: Path) -> NDArray[np.float32]:
    """The logits at every position, of a folder or a GGUF file."""
    model = Model.load(path)
    g = model.geometry(len(IDS))
    pages = np.zeros((1, g.layers, 2, g.kv_heads, len(IDS), g.head_dim), np.float32)
    return model.forward([Row(IDS, 0, [0], len(IDS))], pages)


def expected(config: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> NDArray[np.float64]:
    return plain_forward.forward((config, tensors), IDS)[0]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_of_its_own_is_used_although_the_configuration_says_tied(tmp_path: Path, shards: int) -> None:
    tensors = TENSORS | {HEAD: OWN}
    folder = write_checkpoint(tmp_path, TIED, tensors, shards=shards)
    with capture_logs() as logs:
        found = logits(folder)
    own, tied = expected(TIED, tensors), expected(TIED, TENSORS)
    assert np.abs(found - own).max() <= 1e-4
    assert (found.argmax(1) == own.argmax(1)).all() and (found.argmax(1) != tied.argmax(1)).mean() > 0.9
    assert [entry for entry in logs if entry["event"] == "head_not_tied"] == [
        {
            "event": "head_not_tied",
            "log_level": "warning",
            "model": str(folder),
            "tie_word_embeddings": True,
            "used": HEAD,
        }
    ]
    assert Model.load(folder).parameters == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize("where", [0, 64 * 64 + 7, 128 * 64 - 1])
def test_one_number_makes_it_a_head_of_its_own(tmp_path: Path, where: int) -> None:
    head = TENSORS[EMBEDDING].copy()
    head.flat[where] += 3
    found = logits(write_checkpoint(tmp_path, TIED, TENSORS | {HEAD: head}))
    assert np.abs(found - expected(TIED, TENSORS | {HEAD: head})).max() <= 1e-4
    assert np.abs(found - expected(TIED, TENSORS)).max() > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_is_not_read(tmp_path: Path, tied: bool) -> None:
    config = TIED | {"tie_word_embeddings": tied}
    folder = write_checkpoint(tmp_path, config, TENSORS | {HEAD: TENSORS[EMBEDDING]})
    with capture_logs() as logs:
        weights = Checkpoint.open(folder).weights()
    assert weights.tied and HEAD not in weights and not logs
    assert Model.load(folder).parameters == sum(tensor.size for tensor in TENSORS.values())
    assert np.abs(logits(folder) - expected(TIED, TENSORS)).max() <= 1e-4


def test_numbers_are_compared_across_types(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TIED, TENSORS, dtype="bfloat16")
    stored = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in TENSORS.items()}
    widened = stored[EMBEDDING].astype(np.float32)
    save_file(stored | {HEAD: widened}, folder / "model.safetensors")
    assert Checkpoint.open(folder).weights().tied
    widened[-1, -1] *= 1 + 2**-20
    save_file(stored | {HEAD: widened}, folder / "model.safetensors")
    assert not Checkpoint.open(folder).weights().tied


def test_the_one_matrix_of_a_tied_model_may_be_called_head(tmp_path: Path) -> None:
    tensors = {HEAD if name == EMBEDDING else name: tensor for name, tensor in TENSORS.items()}
    found = logits(write_checkpoint(tmp_path / "tied", TIED, tensors))
    assert np.abs(found - expected(TIED, TENSORS)).max() <= 1e-4
    untied = TIED | {"tie_word_embeddings": False}
    with pytest.raises(ModelInvalid, match=f"missing 1 tensors, the first {EMBEDDING}"):
        Model.load(write_checkpoint(tmp_path / "untied", untied, tensors))


def test_a_head_is_checked_as_any_tensor_is(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"lm_head.weight has shape \[127, 64\]; .* requires \[128, 64\]"):
        Model.load(write_checkpoint(tmp_path, TIED, TENSORS | {HEAD: OWN[1:]}))
    bad = OWN.copy()
    bad[3, 4] = np.nan
    with pytest.raises(ModelInvalid, match=r"lm_head.weight contains NaN or infinity"):
        Model.load(write_checkpoint(tmp_path, TIED, TENSORS | {HEAD: bad}))


def test_comparing_takes_little_memory(tmp_path: Path) -> None:
    config = llama_config(vocab=65536, hidden=256)
    tensors = random_tensors(config)
    size = tensors[EMBEDDING].nbytes
    folder = write_checkpoint(tmp_path, config, tensors | {HEAD: tensors[EMBEDDING]})
    del tensors
    checkpoint = Checkpoint.open(folder)
    tracemalloc.start()
    try:
        assert checkpoint.weights().tied
        assert tracemalloc.get_traced_memory()[1] < size * 0.3
        tracemalloc.reset_peak()
        Model(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < size * 1.5
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0])
def test_a_gguf_file_decides_likewise(tmp_path: Path, kind: Kind) -> None:
    own, same, none = tmp_path / "own.gguf", tmp_path / "same.gguf", tmp_path / "none.gguf"
    kept = write_gguf(own, TIED, TENSORS | {HEAD: OWN}, kind=kind)
    write_gguf(same, TIED, TENSORS | {HEAD: TENSORS[EMBEDDING]}, kind=kind)
    write_gguf(none, TIED, TENSORS, kind=kind)
    assert np.abs(logits(own) - expected(TIED, kept)).max() <= 1e-4
    assert Checkpoint.open(same).weights().tied
    assert np.array_equal(logits(same), logits(none))
    assert Model.load(same).parameters == Model.load(none).parameters
