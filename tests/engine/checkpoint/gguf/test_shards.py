"""Models in several GGUF files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from services.common.errors import ModelInvalid
from services.engine.config import default_pool_id, model_id
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from tests.models.families import FAMILIES, SEEDS, family_tensors, prompt_of
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf_models import logits_of

LLAMA = FAMILIES["llama2"]
TENSORS = family_tensors(LLAMA, SEEDS["llama2"])
IDS = prompt_of(SEEDS["llama2"])


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The files of a model, the first without tensors."""
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, split_max_tensors=8, small_first_shard=True)
    return sorted(tmp_path.glob("it-*.gguf"))


@pytest.mark.parametrize("first", [{}, {"small_first_shard": True}], ids=["tensors in each", "none in the first"])
def test_they_are_the_model_that_one_file_is(tmp_path: Path, first: dict[str, Any]) -> None:
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS)
    whole = Model.load(tmp_path / "it.gguf")
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, split_max_tensors=5, **first)
    files = sorted(tmp_path.glob("it-*.gguf"))
    assert files[0].name == f"it-00001-of-{len(files):05d}.gguf" and len(files) > 3
    model = Model.load(files[0])
    assert (model.config, model.parameters) == (whole.config, whole.parameters)
    assert np.array_equal(logits_of(model, IDS), logits_of(whole, IDS))


def test_the_name_is_the_model_s_and_a_change_in_any_part_is_another_model(parts: list[Path]) -> None:
    assert model_id(parts[0]) == "it"
    before = default_pool_id(parts[0])
    assert before.startswith("it@")
    with parts[-1].open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert default_pool_id(parts[0]) != before


def written(path: Path, tensors: dict[str, Any], **keys: Any) -> None:
    """A file of any keys, their dots underscores, and tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = key.replace("__", ".")
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Change = Callable[[list[Path]], Any]
ONE = {"a": np.ones(1, np.float32)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts[2].unlink(), r"it-00003-of-00004\.gguf is missing, a shard of .*it-00001-of-00004\.gguf"),
        (lambda parts: parts[2].write_bytes(b"no"), r"it-00003-of-00004\.gguf is truncated"),
        (
            lambda parts: shutil.copy(parts[1], parts[2]),
            r"it-00003-of-00004\.gguf: split\.no is 1: only 2 is supported",
        ),
        (lambda parts: written(parts[2], {}), r"it-00003-of-00004\.gguf: split\.no is missing: only 2 is supported"),
        (
            lambda parts: written(parts[2], {}, split__no=2, split__count=3),
            r"it-00003-of-00004\.gguf: split\.count is 3: only 4 is supported",
        ),
        (
            lambda parts: written(parts[2], {}, split__no=2, split__count=4, llama__block_count=1),
            r"it-00003-of-00004\.gguf: llama\.block_count is 1: it-00001-of-00004\.gguf has another value, or none",
        ),
        (
            lambda parts: written(parts[2], {"token_embd.weight": ONE["a"]}, split__no=2, split__count=4),
            r"it-00003-of-00004\.gguf has tensor 'token_embd\.weight', which is also in an earlier shard",
        ),
        (
            lambda parts: written(parts[2], ONE, split__no=2, split__count=4),
            r"it-00001-of-00004\.gguf: split\.tensors\.count is 21: its 4 shards have 14",
        ),
        (
            lambda parts: parts[0].rename(parts[0].with_name("it.gguf")),
            r"split\.count is 4: the files .* NAME-00001-of",
        ),
        (lambda parts: shutil.copy(parts[0], parts[1]), r"00002-of-00004\.gguf: split\.no is 0: only 1 is supported"),
    ],
    ids=range(10),
)
def test_parts_that_do_not_belong_together(parts: list[Path], change: Change, said: str) -> None:
    change(parts)
    path = next(path for path in (parts[0], parts[0].with_name("it.gguf")) if path.exists())
    with pytest.raises(ModelInvalid, match=said):
        Checkpoint.open(path)


def test_the_first_part_is_the_one_to_give(parts: list[Path]) -> None:
    with pytest.raises(
        ModelInvalid, match=r"00002-of-00004\.gguf: split\.no is 1: give the first shard, it-00001-of-00004"
    ):
        Checkpoint.open(parts[1])


def test_more_parts_than_are_read(tmp_path: Path) -> None:
    written(tmp_path / "it-00001-of-60000.gguf", ONE, split__no=0, split__count=60000)
    with pytest.raises(ModelInvalid, match=r"split\.count is 60000: it must be an integer from 0 to 1024"):
        Checkpoint.open(tmp_path / "it-00001-of-60000.gguf")
    assert default_pool_id(tmp_path / "it-00001-of-60000.gguf").startswith("it@")


def test_more_tensors_than_are_read(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.checkpoint.gguf.shards._MOST_TENSORS", 10)
    with pytest.raises(
        ModelInvalid, match=r"00003-of-00004\.gguf: the shards up to this one have 16 tensors; at most 10"
    ):
        Checkpoint.open(parts[0])
