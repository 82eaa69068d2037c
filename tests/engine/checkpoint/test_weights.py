"""Checkpoints: what is read is what was stored, and a hostile file costs nothing but an error that names it."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.weights import shapes
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.loading import Loading
from tests.models.checkpoints import DTYPES, llama_config, random_tensors, write_checkpoint
from tests.models.families import FAMILIES, family_tensors

CONFIG = llama_config(layers=1)
TENSORS = random_tensors(CONFIG)
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint of one file."""
    return write_checkpoint(tmp_path, CONFIG, TENSORS)


def read(folder: Path) -> dict[str, Any]:
    """Every tensor, float32."""
    loading = Loading(Checkpoint.open(folder).weights())
    return {name: loading.take(name, dtype="f32") for name in Checkpoint.open(folder).weights()}


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(file: Path, header: dict[str, Any] | str, data: bytes) -> None:
    """Write a safetensors file, without any check."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refused(folder: Path, said: str) -> ModelInvalid:
    """Loading fails as it should: quickly, and without memory for what the file claims to hold."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        with pytest.raises(ModelInvalid, match=said) as caught:
            read(folder)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 30
    return caught.value


# --- sound -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_tensor_is_widened_without_loss(tmp_path: Path, dtype: str, shards: int) -> None:
    config = llama_config(layers=1, tied=False)
    tensors = random_tensors(config)
    found = read(write_checkpoint(tmp_path, config, tensors, dtype=dtype, shards=shards))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], tensor.astype(DTYPES[dtype]).astype(np.float32))


def test_one_checkpoint_may_mix_types(tmp_path: Path, folder: Path) -> None:
    header, data = split(folder / "model.safetensors")
    begin, end = header[NORM]["data_offsets"]
    norm = TENSORS[NORM].astype(ml_dtypes.bfloat16).tobytes()
    for entry in header.values():
        if isinstance(entry, dict) and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [at - len(norm) for at in entry["data_offsets"]]
    header[NORM] |= {"dtype": "BF16", "data_offsets": [begin, begin + len(norm)]}
    join(folder / "model.safetensors", header, data[:begin] + norm + data[end:])
    found = read(folder)
    assert np.array_equal(found[NORM], TENSORS[NORM].astype(ml_dtypes.bfloat16).astype(np.float32))
    assert all(np.array_equal(found[name], tensor) for name, tensor in TENSORS.items() if name != NORM)


def test_data_may_begin_at_any_byte(folder: Path) -> None:
    header, data = split(folder / "model.safetensors")
    for padding in range(4):
        join(folder / "model.safetensors", json.dumps(header) + " " * padding, data)
        assert all(np.array_equal(found, TENSORS[name]) for name, found in read(folder).items())


def test_what_follows_from_other_tensors_may_be_there(tmp_path: Path) -> None:
    extra = TENSORS | {
        "lm_head.weight": TENSORS["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    for shards in (1, 3):
        found = read(write_checkpoint(tmp_path / str(shards), CONFIG, extra, shards=shards))
        assert found.keys() == TENSORS.keys()


def test_the_bundled_model_has_the_tensors_its_configuration_asks_for() -> None:
    bundled = Path(__file__).parents[3] / "models/shakespeare"
    expected = shapes(ModelConfig.from_folder(bundled))
    assert {name: tensor.shape for name, tensor in read(bundled).items()} == expected


# --- incomplete ------------------------------------------------------------------------------------------------------


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"neither model\.safetensors nor model\.safetensors\.index\.json")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_missing_tensor_is_named(tmp_path: Path, shards: int) -> None:
    less = {name: tensor for name, tensor in TENSORS.items() if name != NORM}
    refused(write_checkpoint(tmp_path, CONFIG, less, shards=shards), rf"missing 1 tensors, the first {NORM}")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.bias"])
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    more = TENSORS | {name: np.zeros((128, 64), np.float32)}
    if name == "lm_head.weight":
        # Tied, it may be there (tests/models/test_heads.py); untied it is needed, and without it missing.
        refused(write_checkpoint(tmp_path, CONFIG | {"tie_word_embeddings": False}, TENSORS), f"first {name}")
    else:
        refused(write_checkpoint(tmp_path, config, more), f"unexpected tensor {name}")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
        ("llama2", "lm_head.weight"),
    ],
)
def test_a_family_has_its_own_tensors_and_no_others(tmp_path: Path, family: str, name: str) -> None:
    config, tensors = FAMILIES[family], family_tensors(FAMILIES[family], 0)
    assert read(write_checkpoint(tmp_path / "whole", config, tensors)).keys() == tensors.keys()
    less = {other: tensor for other, tensor in tensors.items() if other != name}
    refused(write_checkpoint(tmp_path / "less", config, less), f"missing 1 tensors, the first {name}")
    short = tensors | {name: tensors[name][:-1]}
    refused(write_checkpoint(tmp_path / "short", config, short), f"{name} has shape .*; the configuration requires")
    # What another family has is not left out in silence.
    foreign = {"qwen2": "self_attn.q_norm.weight", "qwen3": "self_attn.q_proj.bias", "llama2": "self_attn.q_proj.bias"}
    more = tensors | {f"model.layers.0.{foreign[family]}": np.zeros(64, np.float32)}
    refused(write_checkpoint(tmp_path / "more", config, more), f"unexpected tensor model.layers.0.{foreign[family]}")


def test_a_wrong_shape_is_said_with_both(tmp_path: Path) -> None:
    turned = TENSORS | {"model.layers.0.mlp.up_proj.weight": np.zeros((64, 96), np.float32)}
    refused(
        write_checkpoint(tmp_path, CONFIG, turned),
        r"up_proj.* has shape \[64, 96\]; the configuration requires \[96, 64\]",
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, bad: float, dtype: str) -> None:
    broken = TENSORS[NORM].copy()
    broken[7] = bad
    refused(
        write_checkpoint(tmp_path, CONFIG, TENSORS | {NORM: broken}, dtype=dtype), f"{NORM} contains NaN or infinity"
    )


# --- damaged or hostile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content,said",
    [
        (b"", "does not fit in the file of 0 bytes"),
        (b"\x01\0\0", "does not fit in the file of 3 bytes"),
        ((10 << 30).to_bytes(8, "little") + b"{}", "a header of 10737418240 bytes"),
        (b"\xff" * 100, "does not fit"),
        (b"\x03" + b"\0" * 7 + b"{}", "a header of 3 bytes does not fit in the file of 10 bytes"),
        (b"\0" * 8, "not JSON"),
        (b"\x02" + b"\0" * 7 + b"[]", "not a JSON object"),
        (b"\x04" + b"\0" * 7 + b"null", "not a JSON object"),
        (b"\x02" + b"\0" * 7 + b"\xff\xfe", "not JSON"),
        (b"\x03" + b"\0" * 7 + b"{]}", "not JSON"),
    ],
    ids=range(10),
)
def test_a_file_that_is_no_safetensors(folder: Path, content: bytes, said: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused(folder, said).message


def test_a_header_larger_than_the_format_allows_is_not_read(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write((150_000_000).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse: takes no space
    refused(folder, "a header of 150000000 bytes")


def test_a_deeply_nested_header(folder: Path) -> None:
    join(folder / "model.safetensors", '{"a":' * 100_000 + "1" + "}" * 100_000, b"")
    refused(folder, "not JSON")


def test_a_name_given_twice(folder: Path) -> None:
    header, data = split(folder / "model.safetensors")
    text = json.dumps(header)
    join(folder / "model.safetensors", text[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}', data)
    refused(folder, "duplicate key")


@pytest.mark.parametrize("cut", [1, 1000, -1])
def test_a_truncated_file_and_a_padded_one(folder: Path, cut: int) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-cut] if cut > 0 else raw + b"\0")
    refused(folder, "truncated or padded")


def change(entry: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return entry | keys


@pytest.mark.parametrize(
    "edit,said",
    [
        (lambda e: change(e, dtype="F64"), "is of type F64; supported types are F32, F16, BF16"),
        (lambda e: change(e, dtype="I32"), "is of type I32"),
        (lambda e: change(e, dtype=["F32"]), "is of type"),
        (lambda e: change(e, dtype=None), "is of type None"),
        (lambda e: change(e, dtype="F16"), "does not fill its 256 bytes"),
        (lambda e: change(e, shape=[32]), "does not fill"),
        (lambda e: change(e, shape=[2**62, 2**62, 2**62]), "does not fill"),
        (lambda e: change(e, shape=[2**64 + 64]), "invalid shape or offset"),
        (lambda e: change(e, shape=[-1, -64]), "invalid shape or offset"),
        (lambda e: change(e, shape=[64.0]), "invalid shape or offset"),
        (lambda e: change(e, shape=[True] * 6 + [64]), "invalid shape or offset"),
        (lambda e: change(e, shape=[1] * 1000 + [64]), "invalid shape or offset"),
        (lambda e: change(e, shape="64"), "invalid shape or offset"),
        (lambda e: change(e, shape=[64, 1]), r"has shape \[64, 1\]"),
        (lambda e: change(e, data_offsets=[-256, 0]), "invalid shape or offset"),
        (lambda e: change(e, data_offsets=[256, 0]), "does not fill its -256 bytes"),
        (lambda e: change(e, data_offsets=[0, 256]), "begins at 0"),
        (lambda e: change(e, data_offsets=[at + 4 for at in e["data_offsets"]]), "begins at|truncated"),
        (lambda e: change(e, data_offsets=[10**15, 10**15 + 256]), "begins at 1000000000000000"),
        (lambda e: change(e, data_offsets=[0.0, 256.0]), "invalid shape or offset"),
        (lambda e: change(e, data_offsets=[0]), "lacks"),
        (lambda e: change(e, data_offsets=None), "lacks"),
        (lambda e: {"dtype": "F32"}, "lacks dtype, shape or data_offsets"),
        (lambda e: [], "lacks"),
        (lambda e: None, "lacks"),
        (lambda e: 7, "lacks"),
    ],
)
def test_an_entry_that_lies(folder: Path, edit: Callable[[Any], Any], said: str) -> None:
    header, data = split(folder / "model.safetensors")
    header[NORM] = edit(header[NORM])
    join(folder / "model.safetensors", header, data)
    refused(folder, said)


def test_two_tensors_on_the_same_bytes(folder: Path) -> None:
    header, data = split(folder / "model.safetensors")
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"
    header[second]["data_offsets"] = header[first]["data_offsets"]
    join(folder / "model.safetensors", header, data)
    refused(folder, "begins at .*, not at .*, where the previous one ends")


def test_a_gap_between_tensors(folder: Path) -> None:
    header, data = split(folder / "model.safetensors")
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [at + 4 for at in entry["data_offsets"]]
    join(folder / "model.safetensors", header, b"gap!" + data)
    refused(folder, "begins at 4, not at 0")


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_no_damaged_byte_of_the_header_does_more_than_fail(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_checkpoint(folder, CONFIG, TENSORS)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[at] = value
    file.write_bytes(raw)
    try:
        found = read(folder)
    except ModelInvalid:
        return
    # Blanks, the metadata and the data itself may change without anybody's noticing.
    assert {name: tensor.shape for name, tensor in found.items()} == shapes(ModelConfig.from_folder(folder))


def test_what_is_no_file_is_not_opened(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.unlink()
    os.mkfifo(file)  # opening it would wait for a writer
    refused(folder, "not a regular file")
    file.unlink()
    file.mkdir()
    refused(folder, "not a regular file")


# --- the index -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound checkpoint of two files and an index."""
    return write_checkpoint(tmp_path, CONFIG, TENSORS, shards=2)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(edit(index)))


def placed(file: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index | {"weight_map": index["weight_map"] | {NORM: file}}


@pytest.mark.parametrize(
    "edit,said",
    [
        (lambda index: [], "not a JSON object"),
        (lambda index: {}, "weight_map is not"),
        (lambda index: {"weight_map": {}}, "weight_map is not"),
        (lambda index: {"weight_map": []}, "weight_map is not"),
        (placed("../model.safetensors"), "not a safetensors file of the folder"),
        (placed("/etc/passwd"), "not a safetensors file of the folder"),
        (placed("a/b.safetensors"), "not a safetensors file of the folder"),
        (placed("config.json"), "not a safetensors file of the folder"),
        (placed(3), "not a safetensors file of the folder"),
        (placed(".safetensors"), "cannot be read"),
        (placed("absent.safetensors"), r"absent\.safetensors cannot be read"),
        (
            lambda index: {"weight_map": index["weight_map"] | {"more": "model-00001-of-00002.safetensors"}},
            "tensor more",
        ),
    ],
    ids=range(12),
)
def test_an_index_that_lies(sharded: Path, edit: Callable[[Any], Any], said: str) -> None:
    edit_index(sharded, edit)
    refused(sharded, said)


def test_a_tensor_that_is_not_where_the_index_says(sharded: Path) -> None:
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[NORM])
    edit_index(sharded, placed(other))
    refused(sharded, f"missing tensor {NORM}, which model.safetensors.index.json places in it|in two files")


def test_a_tensor_in_two_files(sharded: Path) -> None:
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        header, data = split(sharded / file)
        if NORM not in header:
            header[NORM] = {"dtype": "F32", "shape": [64], "data_offsets": [len(data), len(data) + 256]}
            join(sharded / file, header, data + TENSORS[NORM].tobytes())
    refused(sharded, f"tensor {NORM} is in two files")


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, r"model-00002-of-00002\.safetensors cannot be read")
