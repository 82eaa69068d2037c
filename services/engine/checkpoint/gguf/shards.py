"""A model in one GGUF file, or in several as llama-gguf-split writes them: NAME-00001-of-00003.gguf and so on.

The first of them has the metadata. The others have nothing but tensors, and say which part of how many they are.
"""

from __future__ import annotations

import re
from pathlib import Path

from services.common.errors import ModelInvalid
from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.header import GgufFile

_PART, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_PARTS = 1 << 10
_MOST_TENSORS = 1 << 16  # of all parts, as of one file
_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def name_of(path: Path) -> str:
    """What the model is called: the name of its file, less what says that it is one of several."""
    name = path.resolve().name
    split = _NAME.fullmatch(name)
    return split[1] if split else name.removesuffix(".gguf")


def files_of(path: Path) -> list[Path]:
    """The model's files by their names, the first of which is ``path``; those of them that are there."""
    split = _NAME.fullmatch(path.name)
    if not split or int(split[2]) != 1 or int(split[3]) > _MOST_PARTS:
        return [path]
    others = (_sibling(path, split[1], part, int(split[3])) for part in range(2, int(split[3]) + 1))
    return [path, *(other for other in others if other.exists())]


def read_parts(path: Path) -> GgufFile:
    """Read all but the tensors of a model whose first or only file is ``path``.

    Raises ``ModelInvalid`` naming the file and what in it cannot be, a part that is missing too.
    """
    first = GgufFile.read(path)
    keys = Fields(path, first.metadata)
    count = keys.integer(_COUNT, least=0, most=_MOST_PARTS, default=0)
    if count < 2:
        return first
    split = _NAME.fullmatch(path.name)
    if split is None or int(split[3]) != count:
        keys.refuse(_COUNT, f"the files of a model in several are to be named NAME-00001-of-{count:05d}.gguf and so on")
    if keys.integer(_PART, least=0, most=count - 1) != 0 or int(split[2]) != 1:
        keys.refuse(_PART, f"give the first part, {_sibling(path, split[1], 1, count).name}")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = _part(_sibling(path, split[1], number, count), number, first)
        if twice := tensors.keys() & part.tensors.keys():
            raise ModelInvalid(f"{part.path} has tensor {min(twice)!r}, which a part before it has, too")
        tensors |= part.tensors
        if len(tensors) > _MOST_TENSORS:
            raise ModelInvalid(
                f"{part.path}: the parts up to this have {len(tensors)} tensors, read are {_MOST_TENSORS}"
            )
    if keys.integer(_TENSORS, least=0, default=len(tensors)) != len(tensors):
        keys.refuse(_TENSORS, f"its {count} parts have {len(tensors)}")
    return GgufFile(path, first.metadata, tensors)


def _sibling(path: Path, name: str, part: int, count: int) -> Path:
    return path.with_name(f"{name}-{part:05d}-of-{count:05d}.gguf")


def _part(path: Path, number: int, first: GgufFile) -> GgufFile:
    """A later part; what it says besides which it is, the first one says as well."""
    if not path.exists():
        raise ModelInvalid(f"{path} is missing, a part of {first.path}")
    part = GgufFile.read(path)
    keys = Fields(path, part.metadata)
    keys.require(_PART, number - 1, default=None)
    keys.require(_COUNT, first.metadata[_COUNT], default=None)
    for key, value in part.metadata.items():
        # What a file is laid out by, and its own description.
        if key != _PART and not key.startswith("general.") and first.metadata.get(key) != value:
            keys.refuse(key, f"{first.path.name} says otherwise, or nothing")
    return part
