"""Reads the headers of a Hugging Face folder's safetensors files, single or sharded.

The files are untrusted: the header's lengths, shapes and offsets are checked against the file size, in Python integers,
before anything is allocated for a tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.errors import ModelInvalid
from services.engine.checkpoint.files import file_size
from services.engine.checkpoint.placeholders import HEAD_BYTES, refuse_placeholder
from services.engine.checkpoint.tensor import BF16, F16, F32, StoredTensor

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 100_000_000
_ENCODINGS = {encoding.name: encoding for encoding in (F32, F16, BF16)}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a folder by name.

    Raises ``ModelInvalid`` naming the file and the tensor for a missing or damaged file, and for a tensor that is not
    F32, F16 or BF16, is in two files, or is missing from the file that the index names.
    """
    tensors: dict[str, StoredTensor] = {}
    for file, wanted in _files(folder):
        found = {tensor.name: tensor for tensor in _header(file)}
        for name in sorted(found.keys() & tensors.keys()):
            raise ModelInvalid(f"{file}: tensor {name[:100]} is in two files")
        for name in sorted(wanted - found.keys()):
            raise ModelInvalid(f"{file}: missing tensor {name[:100]}, which {_INDEX} places in it")
        tensors |= found
    return tensors


def _files(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yields each file with the tensor names that the index places in it; no names for a single-file checkpoint."""
    if (folder / _SINGLE).exists():
        yield folder / _SINGLE, set()
        return
    index = folder / _INDEX
    if not index.exists():
        raise ModelInvalid(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    if file_size(index) > _MAX_INDEX_BYTES:
        raise ModelInvalid(f"{index} is larger than {_MAX_INDEX_BYTES} bytes")
    weight_map = _parse(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{index}: weight_map is not an object with tensors")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # The index must not refer to files outside the folder.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ModelInvalid(
                f"{index}: tensor {name} is in {str(file)[:100]!r}, not a safetensors file of the folder"
            )
        shards.setdefault(file, set()).add(name)
    for file, names in sorted(shards.items()):
        yield folder / file, names


def _header(file: Path) -> list[StoredTensor]:
    """Read and validate a header: an 8-byte length, JSON, then the tensors' bytes without gaps or overlaps."""
    size = file_size(file)
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            refuse_placeholder(file, head)
            raise ModelInvalid(f"{file}: a header of {length} bytes does not fit in the file of {size} bytes")
        stream.seek(8)
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
        if not isinstance(dtype, str) or dtype not in _ENCODINGS:
            raise ModelInvalid(f"{label} is of type {str(dtype)[:20]}; supported types are {', '.join(_ENCODINGS)}")
        if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, [*shape, begin, end])):
            raise ModelInvalid(f"{label} has an invalid shape or offset")
        if end - begin != math.prod(shape) * _ENCODINGS[dtype].block_bytes:
            raise ModelInvalid(f"{label} of shape {shape} does not fill its {end - begin} bytes")
        spans.append((begin, end, label))
        tensors.append(StoredTensor(file, name, tuple(shape), 8 + length + begin, _ENCODINGS[dtype]))
    at = 0
    for begin, end, label in sorted(spans):
        if begin != at:
            raise ModelInvalid(f"{label} begins at {begin}, not at {at}, where the previous one ends")
        at = end
    if at != size - 8 - length:
        raise ModelInvalid(f"{file}: truncated or padded: tensors end at {at}, the data at {size - 8 - length}")
    return tensors


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63


def _parse(raw: bytes, file: Path) -> dict[str, Any]:
    """Parse a JSON object and reject duplicate keys, which two readers could resolve to different tensors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("duplicate key")
        return found

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        refuse_placeholder(file, raw[:HEAD_BYTES])
        raise ModelInvalid(f"{file}: its header is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelInvalid(f"{file}: its header is not a JSON object")
    return parsed
