"""A checkpoint's tensors: safetensors files, one or sharded, read into float32 arrays.

The files are hostile until proven otherwise: nothing is allocated for a tensor before the header's lengths, shapes and
offsets were checked against the size of the file, in Python integers.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from services.engine.modelconfig import ModelConfig
from services.errors import ModelInvalid

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 100_000_000
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load(path: Path | str, config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Return every tensor of the checkpoint in folder ``path``, float32, under its Hugging Face name.

    A float32 tensor is a read-only view of the file, the others are widened copies. A tied ``lm_head.weight`` is left
    out if present. Raises ``ModelInvalid`` naming the file and the tensor for anything missing, unexpected, of another
    shape than ``config`` says, of another type than F32, F16 and BF16, not finite, or damaged.
    """
    folder = Path(path)
    expected = shapes(config)
    tensors: dict[str, NDArray[np.float32]] = {}
    for file, wanted in _files(folder):
        found = set()
        for tensor in _headers(file):
            if _derived(tensor.name, config):
                continue
            if tensor.name not in expected:
                raise ModelInvalid(f"{file}: unexpected tensor {tensor.name[:100]}")
            if tensor.shape != expected[tensor.name]:
                raise ModelInvalid(
                    f"{file}: tensor {tensor.name} has shape {list(tensor.shape)}, "
                    f"config.json asks for {list(expected[tensor.name])}"
                )
            if tensor.name in tensors:
                raise ModelInvalid(f"{file}: tensor {tensor.name} is in two files")
            tensors[tensor.name] = tensor.read()
            found.add(tensor.name)
        for name in sorted(wanted - found):
            if not _derived(name, config):
                raise ModelInvalid(f"{file}: missing tensor {name[:100]}, which {_INDEX} places there")
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelInvalid(f"{folder}: missing {len(missing)} tensors, the first {missing[0]}")
    return tensors


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of ``config`` must hold; matrices are ``[outputs, inputs]``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    every_layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        found.update({f"model.layers.{layer}.{name}": shape for name, shape in every_layer.items()})
    found["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def _derived(name: str, config: ModelConfig) -> bool:
    """Whether the tensor follows from others: a tied head, and the rotary frequencies older checkpoints carry."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


def _files(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield each file with the names the index places in it, none for a checkpoint of a single file."""
    if (folder / _SINGLE).exists():
        yield folder / _SINGLE, set()
        return
    index = folder / _INDEX
    if not index.exists():
        raise ModelInvalid(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    if _size(index) > _MAX_INDEX_BYTES:
        raise ModelInvalid(f"{index} is larger than {_MAX_INDEX_BYTES} bytes")
    weight_map = _parse(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{index}: weight_map is not an object of tensors")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # The index must not lead out of the folder.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ModelInvalid(
                f"{index}: tensor {name} is in {str(file)[:100]!r}, not a safetensors file of the folder"
            )
        shards.setdefault(file, set()).add(name)
    for file, names in sorted(shards.items()):
        yield folder / file, names


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One entry of a header, its bounds checked."""

    file: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # in the file

    def read(self) -> NDArray[np.float32]:
        count = math.prod(self.shape)
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (count * self.dtype.itemsize,))
        array = np.asarray(raw).view(self.dtype).reshape(self.shape).astype(np.float32, copy=False)
        # One number tells whether all are finite: their sum in float64 cannot overflow.
        with np.errstate(invalid="ignore"):
            total = np.sum(array, dtype=np.float64)
        if not np.isfinite(total):
            raise ModelInvalid(f"{self.file}: tensor {self.name} holds NaN or infinity")
        return array


def _headers(file: Path) -> list[_Tensor]:
    """Read and check the header: 8 bytes of length, JSON, then the tensors' bytes without gap or overlap."""
    size = _size(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelInvalid(f"{file}: a header of {length} bytes does not fit the file of {size} bytes")
        header = _parse(stream.read(length), file)
    header.pop("__metadata__", None)
    tensors = []
    spans = []
    for name, entry in header.items():
        label = f"{file}: tensor {name[:100]}"
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ModelInvalid(f"{label} lacks dtype, shape or data_offsets") from None
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ModelInvalid(f"{label} is of type {str(dtype)[:20]}, served are {', '.join(_DTYPES)}")
        if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, [*shape, begin, end])):
            raise ModelInvalid(f"{label} has a shape or an offset that is no size of anything in a file")
        if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ModelInvalid(f"{label} of shape {shape} does not fill its {end - begin} bytes")
        spans.append((begin, end, label))
        tensors.append(_Tensor(file, name, _DTYPES[dtype], tuple(shape), 8 + length + begin))
    at = 0
    for begin, end, label in sorted(spans):
        if begin != at:
            raise ModelInvalid(f"{label} begins at {begin}, not at {at} where the one before it ends")
        at = end
    if at != size - 8 - length:
        raise ModelInvalid(f"{file}: truncated or padded: tensors end at {at}, the data at {size - 8 - length}")
    return tensors


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63


def _size(file: Path) -> int:
    try:
        status = file.stat()
    except OSError as error:
        raise ModelInvalid(f"{file} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelInvalid(f"{file} is not a regular file")
    return status.st_size


def _parse(raw: bytes, file: Path) -> dict[str, Any]:
    """Parse a JSON object in which no key comes twice: two readers could take two different tensors by one name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key comes twice")
        return found

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelInvalid(f"{file}: its header is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelInvalid(f"{file}: its header is not a JSON object")
    return parsed
