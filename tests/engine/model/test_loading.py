"""Loading weights: progress is logged, and no weight is in memory twice."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kernels import ops_numpy
from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.gguf.quants import ENCODINGS
from services.engine.checkpoint.tensor import StoredTensor
from services.engine.checkpoint.weights import Weights, shapes
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from services.engine.model.loading import EVERY_S, Loading
from tests.models.checkpoints import DTYPES, llama_config, random_tensors, write_checkpoint
from tests.models.gguf_files import write_gguf

FILE = "model.safetensors"
CONFIG = llama_config(hidden=256, intermediate=512, vocab=4096, head_dim=64, layers=2)
TENSORS = random_tensors(CONFIG)
STORED = sum(tensor.size for tensor in TENSORS.values())


class Clock:
    """A clock that advances a second at every call."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def weights(folder: Path, dtype: str = "float32") -> Weights:
    return Checkpoint.open(write_checkpoint(folder, CONFIG, TENSORS, dtype=dtype)).weights()


def test_progress_is_told_at_the_start_every_few_seconds_and_at_the_end(
    tmp_path: Path, logged: list[MutableMapping[str, Any]]
) -> None:
    loading = Loading(weights(tmp_path), Clock())
    for name in TENSORS:
        loading.take(name, dtype="f32")
    loading.end()
    begun, *between, ended = logged
    total = {"total_bytes": 4 * STORED, "total_tensors": len(TENSORS)}
    same = {"model": str(tmp_path), "log_level": "info"}
    assert begun == {"event": "weights_loading", **total, **same}
    reads = sum(-(-tensor.size // (1 << 19)) for tensor in TENSORS.values())  # the embedding in pieces
    assert reads > len(TENSORS)
    seconds = reads + 1.0
    assert ended == {
        "event": "weights_loaded", "bytes": 4 * STORED, "tensors": len(TENSORS), "seconds": seconds, **same,
    }  # fmt: skip
    assert len(between) == reads // int(EVERY_S) > 2
    done = 0
    for nth, event in enumerate(between, 1):
        assert event.keys() == {"event", "bytes", "tensors", "eta_s", *total, *same}
        assert event["event"] == "weights_progress" and event.items() >= total.items()
        assert done < event["bytes"] <= 4 * STORED
        done = event["bytes"]
        # As long again as it took, in proportion.
        assert event["eta_s"] == np.ceil(nth * EVERY_S / done * (4 * STORED - done))


class Mixed(Weights):
    """Two tensors of as many numbers: one of seven times the bytes of the other."""

    def __init__(self, file: Path) -> None:
        shape, plain, packed = (1, 1 << 20), ENCODINGS[0], ENCODINGS[2]
        file.write_bytes(bytes((4 << 20) + (1 << 20) // packed.block_values * packed.block_bytes))
        self.path = file
        self._tensors = {
            "plain": StoredTensor(file, "plain", shape, 0, plain),
            "packed": StoredTensor(file, "packed", shape, 4 << 20, packed),
        }


def test_the_seconds_left_go_by_the_numbers(tmp_path: Path, logged: list[MutableMapping[str, Any]]) -> None:
    loading = Loading(Mixed(tmp_path / "it"), Clock(), every_s=2.0)
    loading.take("plain", dtype="f32")
    loading.take("packed", dtype="f32")
    # Each tensor is read in two pieces, of a second each.
    assert [event["eta_s"] for event in logged if event["event"] == "weights_progress"] == [2, 0]


def test_a_model_tells_its_progress(tmp_path: Path, logged: list[MutableMapping[str, Any]]) -> None:
    Model.load(write_checkpoint(tmp_path, CONFIG, TENSORS))
    assert [event["event"] for event in logged] == ["weights_loading", "weights_loaded"]
    assert logged[1]["bytes"] == logged[0]["total_bytes"]


def test_a_failure_is_told_by_its_error_alone(tmp_path: Path, logged: list[MutableMapping[str, Any]]) -> None:
    last = {"model.norm.weight": np.full(256, np.nan, np.float32)}
    with pytest.raises(ModelInvalid, match=r"model\.norm\.weight contains NaN"):
        Model.load(write_checkpoint(tmp_path, CONFIG, TENSORS | last))
    assert [event["event"] for event in logged] == ["weights_loading"]


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", ["f32", "f16", "bf16"])
def test_what_is_stored_as_it_is_asked_for_is_not_widened(tmp_path: Path, stored: str, asked: str) -> None:
    loading = Loading(weights(tmp_path, stored))
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("q", "k", "v")]
    found = loading.take(*names, dtype=asked)
    same = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[stored] == asked
    assert found.dtype == (DTYPES[stored] if same else np.float32)
    expected = np.concatenate([TENSORS[name] for name in names]).astype(DTYPES[stored])
    assert np.array_equal(found.astype(np.float32), expected.astype(np.float32))
    assert found.flags.c_contiguous and found.flags.owndata


class Elsewhere:
    """NumPy, with weights that leave host memory at once, as on a GPU."""

    def __init__(self) -> None:
        self.given: list[tuple[np.dtype[Any], tuple[int, ...]]] = []

    def weight(self, tensor: NDArray[Any], dtype: str) -> Any:
        self.given.append((tensor.dtype, tensor.shape))

    def __getattr__(self, name: str) -> Any:
        return getattr(ops_numpy, name)


def peak_of(load: Any) -> int:
    """The peak of the host memory in use, in bytes."""
    tracemalloc.start()
    try:
        load()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LARGE = llama_config(hidden=1024, intermediate=2816, vocab=8192, query_heads=16, kv_heads=4, head_dim=64, layers=4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of float32, all of them ones; its largest tensor is a sixth."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    expected = shapes(ModelConfig.from_folder(folder))
    ones = np.ones(max(map(math.prod, expected.values())), np.float32)
    save_file({name: ones[: math.prod(shape)].reshape(shape) for name, shape in expected.items()}, folder / FILE)
    return folder


def test_a_model_on_the_host_is_there_once(large: Path) -> None:
    size = (large / FILE).stat().st_size
    assert size > 200e6
    models: list[Model] = []
    peak = peak_of(lambda: models.append(Model.load(large)))
    assert size < peak < 1.1 * size
    assert models[0].parameters * 4 == pytest.approx(size, rel=1e-3)


def test_a_model_elsewhere_takes_the_host_one_tensor(large: Path) -> None:
    backend = Elsewhere()
    peak = peak_of(lambda: Model.load(large, backend))
    largest = max(math.prod(shape) * kind.itemsize for kind, shape in backend.given)
    assert largest < peak < largest + (8 << 20)


def test_what_was_quantised_is_widened_tensor_by_tensor(tmp_path: Path) -> None:
    config = llama_config(hidden=1024, intermediate=1024, vocab=4096, query_heads=16, kv_heads=4, head_dim=64)
    tensors = random_tensors(config)
    write_gguf(tmp_path / "it.gguf", config, tensors, kind=Kind.Q4_K)
    size = sum(tensor.nbytes for tensor in tensors.values())
    models: list[Model] = []
    peak = peak_of(lambda: models.append(Model.load(tmp_path / "it.gguf")))
    # Half a million numbers at a time are decoded, through some arrays of them.
    assert size < peak < size + (24 << 20)


def test_bfloat16_reaches_a_backend_of_bfloat16_as_it_is(tmp_path: Path) -> None:
    backend = Elsewhere()
    Model.load(write_checkpoint(tmp_path, CONFIG, TENSORS, dtype="bfloat16"), backend, "bf16")
    assert {kind for kind, _ in backend.given} == {np.dtype(ml_dtypes.bfloat16)}
