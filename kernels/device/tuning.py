"""Which kernels and launches were measured to be best on one kind of GPU: a JSON file, written by first light.

::

    {"format": 1, "arch": "gfx942",
     "attention": [{"dtype": "BF16", "kv_dtype": "BF16", "head_dim": 128, "group": 4,
                    "prefill_matrix": true, "decode_matrix": false, "decode_blocks": 4}],
     "products": [{"rows": 1, "inputs": 4096, "outputs": 14336, "itemsize": 2, "blocks": 4}]}

``decode_blocks`` and ``blocks`` are blocks of a multiprocessor, 0 is the kernels' own choice, and for a product the
library's kernel. A shape that is not in the file is computed as without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernels.device.gpu import NO_MATRIX, Gpu

FORMAT = 1
#: What a file may hold at most, in bytes.
MOST_BYTES = 1 << 20
_TYPES = ("F32", "F16", "BF16")
_KV_TYPES = (*_TYPES, "INT8")
#: The least and the most of each number.
_RANGES = {
    "head_dim": (1, 256),
    "group": (1, 1024),
    "decode_blocks": (0, 16),
    "rows": (1, 16),
    "inputs": (1, 1 << 20),
    "outputs": (1, 1 << 20),
    "itemsize": (2, 4),
    "blocks": (0, 16),
}
_ATTENTION = ("dtype", "kv_dtype", "head_dim", "group", "prefill_matrix", "decode_matrix", "decode_blocks")
_PRODUCT = ("rows", "inputs", "outputs", "itemsize", "blocks")


class TuningError(ValueError):
    """A file that cannot be used; the message names the entry, the field and its limit."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """``attention``: dtype, kv dtype, head size and group -> matrix units or not, in prefill and in decode, and blocks
    of decode.

    ``products``: rows, inputs, rows of the weight and bytes of a number -> blocks, 0 for the library.
    """

    attention: Mapping[tuple[str, str, int, int], tuple[bool, bool, int]] = field(default_factory=dict)
    products: Mapping[tuple[int, int, int, int], int] = field(default_factory=dict)

    def gpu(self, gpu: Gpu, dtype: str, kv_dtype: str, head_dim: int, group: int) -> Gpu:
        """``gpu`` as attention of this shape is to be planned and compiled for."""
        prefill, decode, blocks = self.attention.get((dtype, kv_dtype, head_dim, group), (True, True, 0))
        unit = gpu.matrix if prefill or decode else NO_MATRIX
        return replace(gpu, matrix=unit, decode_blocks=blocks, decode_scalar=not decode, prefill_scalar=not prefill)

    def as_json(self, arch: str) -> str:
        """The file."""
        document = {
            "format": FORMAT,
            "arch": arch,
            "attention": [dict(zip(_ATTENTION, (*key, *value), strict=True)) for key, value in self.attention.items()],
            "products": [dict(zip(_PRODUCT, (*key, value), strict=True)) for key, value in self.products.items()],
        }
        return json.dumps(document, indent=1) + "\n"


#: Of a GPU that was not tuned.
NOTHING = Tuning()


def default_path(arch: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file of this kind of GPU is: in the user's cache directory."""
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if cache.startswith("/") else Path(environ.get("HOME") or "/") / ".cache"
    return base / "rocmforge" / f"tuning-{arch}.json"


def read(path: Path, arch: str) -> Tuning:
    """Return the tuning of a GPU of ``arch``. Raises TuningError, for a file of another arch as well."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise TuningError(f"{path}: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise TuningError(f"{path}: has more than {MOST_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TuningError(f"{path}: is not JSON: {error}") from error
    try:
        return parsed(document, arch)
    except TuningError as error:
        raise TuningError(f"{path}: {error}") from None


def parsed(document: Any, arch: str) -> Tuning:
    """Check what a file holds. Raises TuningError."""
    if not isinstance(document, dict):
        raise TuningError("must be an object")
    _only(document, ("format", "arch", "attention", "products"), "")
    if document.get("format") != FORMAT:
        raise TuningError(f"format is {document.get('format')!r}; it must be {FORMAT}")
    if document.get("arch") != arch:
        raise TuningError(f"arch is {document.get('arch')!r}; this GPU is {arch}")
    attention, products = {}, {}
    for name, entry in _entries(document, "attention", _ATTENTION):
        for field_, allowed in (("dtype", _TYPES), ("kv_dtype", _KV_TYPES)):
            if entry[field_] not in allowed:
                raise TuningError(f"{name}.{field_} is {entry[field_]!r}; it must be one of {', '.join(allowed)}")
        for field_ in ("prefill_matrix", "decode_matrix"):
            if not isinstance(entry[field_], bool):
                raise TuningError(f"{name}.{field_} is {entry[field_]!r}; it must be true or false")
        numbers = (_number(entry, field_, name) for field_ in ("head_dim", "group"))
        head_dim, group = numbers
        key = entry["dtype"], entry["kv_dtype"], head_dim, group
        blocks = _number(entry, "decode_blocks", name)
        attention[key] = entry["prefill_matrix"], entry["decode_matrix"], blocks
    for name, entry in _entries(document, "products", _PRODUCT):
        rows, inputs, outputs, itemsize, blocks = (_number(entry, field_, name) for field_ in _PRODUCT)
        products[rows, inputs, outputs, itemsize] = blocks
    return Tuning(attention, products)


def _entries(document: dict[str, Any], name: str, fields: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    entries = document.get(name, [])
    if not isinstance(entries, list):
        raise TuningError(f"{name} must be a list")
    found = []
    for at, entry in enumerate(entries):
        where = f"{name}[{at}]"
        if not isinstance(entry, dict):
            raise TuningError(f"{where} must be an object")
        _only(entry, fields, f"{where}.")
        if missing := [field_ for field_ in fields if field_ not in entry]:
            raise TuningError(f"{where}.{missing[0]} is missing")
        found.append((where, entry))
    return found


def _only(document: dict[str, Any], fields: tuple[str, ...], where: str) -> None:
    if unknown := sorted(document.keys() - set(fields)):
        raise TuningError(f"{where}{unknown[0]}: no such field; there are {', '.join(fields)}")


def _number(entry: dict[str, Any], field_: str, where: str) -> int:
    least, most = _RANGES[field_]
    value = entry[field_]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise TuningError(f"{where}.{field_} is {value!r}; it must be a whole number from {least} to {most}")
    return value
