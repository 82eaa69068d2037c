"""Reads a model from a single GGUF file, or from shards written by llama-gguf-split (NAME-00001-of-00003.gguf).

The first shard has the metadata. The others have only tensors, their shard number and the number of shards.
"""

from __future__ import annotations

import re
from pathlib import Path

from services.common.errors import ModelInvalid
from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.header import GgufFile

_PART, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_PARTS = 1 << 10
_MOST_TENSORS = 1 << 16  # over all shards, as for one file
_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def name_of(path: Path) -> str:
    """Returns the model's name: the file name without extension and shard suffix."""
    name = path.resolve().name
    split = _NAME.fullmatch(name)
    return split[1] if split else name.removesuffix(".gguf")


def files_of(path: Path) -> list[Path]:
    """Returns the model's existing files in shard order, starting with ``path``."""
    split = _NAME.fullmatch(path.name)
    if not split or int(split[2]) != 1 or int(split[3]) > _MOST_PARTS:
        return [path]
    others = (_sibling(path, split[1], part, int(split[3])) for part in range(2, int(split[3]) + 1))
    return [path, *(other for other in others if other.exists())]


def read_parts(path: Path) -> GgufFile:
    """Read everything except the tensor data of a model whose first or only file is ``path``.

    Raises ``ModelInvalid`` naming the file and what is wrong with it, or a shard that is missing.
    """
    first = GgufFile.read(path)
    keys = Fields(path, first.metadata)
    count = keys.integer(_COUNT, least=0, most=_MOST_PARTS, default=0)
    if count < 2:
        return first
    split = _NAME.fullmatch(path.name)
    if split is None or int(split[3]) != count:
        keys.refuse(_COUNT, f"the files must be named NAME-00001-of-{count:05d}.gguf and so on")
    if keys.integer(_PART, least=0, most=count - 1) != 0 or int(split[2]) != 1:
        keys.refuse(_PART, f"give the first shard, {_sibling(path, split[1], 1, count).name}")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = _part(_sibling(path, split[1], number, count), number, first)
        if twice := tensors.keys() & part.tensors.keys():
            raise ModelInvalid(f"{part.path} has tensor {min(twice)!r}, which is also in an earlier shard")
        tensors |= part.tensors
        if len(tensors) > _MOST_TENSORS:
            raise ModelInvalid(
                f"{part.path}: the shards up to this one have {len(tensors)} tensors; at most {_MOST_TENSORS}"
            )
    if keys.integer(_TENSORS, least=0, default=len(tensors)) != len(tensors):
        keys.refuse(_TENSORS, f"its {count} shards have {len(tensors)}")
    return GgufFile(path, first.metadata, tensors)


def _sibling(path: Path, name: str, part: int, count: int) -> Path:
    return path.with_name(f"{name}-{part:05d}-of-{count:05d}.gguf")


def _part(path: Path, number: int, first: GgufFile) -> GgufFile:
    """Read a later shard. Its metadata, except its shard number, must agree with the first one's."""
    if not path.exists():
        raise ModelInvalid(f"{path} is missing, a shard of {first.path}")
    part = GgufFile.read(path)
    keys = Fields(path, part.metadata)
    keys.require(_PART, number - 1, default=None)
    keys.require(_COUNT, first.metadata[_COUNT], default=None)
    for key, value in part.metadata.items():
        # general.* keys describe the file itself: its alignment, its name.
        if key != _PART and not key.startswith("general.") and first.metadata.get(key) != value:
            keys.refuse(key, f"{first.path.name} has another value, or none")
    return part
