"""Parses a GGUF header: metadata and tensor locations (ggml's docs/gguf.md, versions 2 and 3).

The file is untrusted: every length is checked against the rest of the file and against a limit before anything is
allocated for it.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from services.common.errors import ModelInvalid
from services.engine.checkpoint.files import file_size
from services.engine.checkpoint.gguf.quants import ENCODINGS, OTHERS
from services.engine.checkpoint.placeholders import HEAD_BYTES, refuse_placeholder
from services.engine.checkpoint.tensor import StoredTensor

_MAX_KEYS, _MAX_TENSORS = 1 << 16, 1 << 16
_MAX_STRING_BYTES = 16 << 20
_MAX_ITEMS = 1 << 22  # in an array: a vocabulary and its merges
_MAX_NAME_BYTES = 64  # the format's own limit
_MAX_DIMENSIONS = 4  # ggml's
_MAX_HEADER_BYTES = 512 << 20

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_STRING_ITEM_BYTES = 8  # the minimum: the length prefix


@dataclass(frozen=True, slots=True)
class GgufFile:
    """``metadata`` maps keys to numbers, booleans, strings, or lists of one of these; ``tensors`` is by GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read everything except the tensor data. Raises ``ModelInvalid`` naming the file and what is wrong with it."""
        size = file_size(path)
        try:
            with path.open("rb") as stream:
                return _Header(path, stream, size).read()
        except OSError as error:
            raise ModelInvalid(f"{path} cannot be read: {error.strerror or error}") from error


class _Header:
    """A sequential reader of the bytes before the tensor data."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self._path = path
        self._stream = stream
        self._size = size
        self._at = 0

    def read(self) -> GgufFile:
        magic = self._take(4, "its first bytes")
        if magic != b"GGUF":
            refuse_placeholder(self._path, magic + self._stream.read(HEAD_BYTES))
            if self._path.suffix != ".gguf":
                self._fail(
                    "is not GGUF: give a GGUF file, or the folder of a model whose tensors are safetensors files"
                )
            self._fail(f"is not GGUF: it begins with {magic!r}")
        version = self._number("I", "its version")
        if version not in (2, 3):
            why = ": big-endian files are not supported" if version in (2 << 24, 3 << 24) else ""
            self._fail(f"is GGUF version {version}; supported versions are 2 and 3{why}")
        tensors = self._count("Q", "its number of tensors", _MAX_TENSORS, 24)
        keys = self._count("Q", "its number of keys", _MAX_KEYS, 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a key", _MAX_STRING_BYTES)
            if key in metadata:
                self._fail(f"has the key {key[:100]!r} twice")
            metadata[key] = self._value(self._number("I", f"the type of {key[:100]}"), key[:100])
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self._fail(f"has general.alignment {str(alignment)[:20]}: it must be a power of two up to {1 << 20}")
        entries = [self._entry() for _ in range(tensors)]
        data = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, self._placed(entries, data, alignment))

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads name, shape, type and offset of a tensor. The shape is reversed: its fastest dimension comes last."""
        name = self._string("a tensor's name", _MAX_NAME_BYTES)
        label = f"tensor {name!r}"
        dimensions = self._number("I", f"the dimensions of {label}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._fail(f"has {label} of {dimensions} dimensions; it must have 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._number("Q", f"the shape of {label}") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I", f"the type of {label}"), self._number("Q", f"the offset of {label}")

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data: int, alignment: int
    ) -> dict[str, StoredTensor]:
        """Returns the tensors; checks that each lies within the file and that none overlap."""
        found: dict[str, StoredTensor] = {}
        spans = []
        for name, shape, kind, offset in entries:
            label = f"tensor {name!r}"
            if name in found:
                self._fail(f"has {label} twice")
            if kind not in ENCODINGS:
                type_name = OTHERS.get(kind, f"number {kind}")
                served = ", ".join(encoding.name for encoding in ENCODINGS.values())
                self._fail(f"has {label} of type {type_name}; supported types are {served}")
            encoding = ENCODINGS[kind]
            if shape[-1] % encoding.block_values:
                self._fail(
                    f"has {label} with rows of {shape[-1]}; {encoding.name} has blocks of {encoding.block_values}"
                )
            length = math.prod(shape) // encoding.block_values * encoding.block_bytes
            if not length or offset % alignment or data + offset + length > self._size:
                self._fail(
                    f"has {label} of {length} bytes at {data + offset}, which is not aligned to {alignment} or not "
                    f"within the {self._size} bytes of the file"
                )
            spans.append((offset, offset + length, label))
            found[name] = StoredTensor(self._path, name, shape, data + offset, encoding)
        spans.sort()
        for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
            if begin < end:
                self._fail(f"has {second} overlapping {first}")
        return found

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], key)
        if kind == _BOOL:
            return self._boolean(self._take(1, key)[0], key)
        if kind == _STRING:
            return self._string(key, _MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        self._fail(f"has {key} of unknown type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", f"the type of {key}")
        if kind in _NUMBERS:
            dtype = np.dtype(f"<{_NUMBERS[kind]}" if _NUMBERS[kind] not in "Bb" else _NUMBERS[kind])
            count = self._count("Q", f"the length of {key}", _MAX_ITEMS, dtype.itemsize)
            return np.frombuffer(self._take(count * dtype.itemsize, key), dtype).tolist()
        if kind == _BOOL:
            count = self._count("Q", f"the length of {key}", _MAX_ITEMS, 1)
            return [self._boolean(byte, key) for byte in self._take(count, key)]
        if kind == _STRING:
            count = self._count("Q", f"the length of {key}", _MAX_ITEMS, _STRING_ITEM_BYTES)
            return [self._string(key, _MAX_STRING_BYTES) for _ in range(count)]
        self._fail(f"has {key}, a list of type {kind}, which is not supported")

    def _boolean(self, byte: int, key: str) -> bool:
        if byte > 1:
            self._fail(f"has {key} with boolean {byte}; it must be 0 or 1")
        return byte == 1

    def _string(self, what: str, most: int) -> str:
        length = self._count("Q", f"the length of {what}", most, 1)
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"has {what} that is not UTF-8")

    def _count(self, form: str, what: str, most: int, item_bytes: int) -> int:
        """Reads a count of items of at least ``item_bytes``. Checks it against ``most`` and the rest of the file."""
        count: int = self._number(form, what)
        if count > most:
            self._fail(f"has a value of {count} for {what}; at most {most} is supported")
        if count * item_bytes > self._size - self._at:
            self._fail(f"is truncated: {what} is {count}, but only {self._size - self._at} bytes are left")
        return count

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))[0]

    def _take(self, length: int, what: str) -> bytes:
        if self._at + length > _MAX_HEADER_BYTES:
            self._fail(f"has a header of more than {_MAX_HEADER_BYTES} bytes")
        raw = self._stream.read(length) if self._at + length <= self._size else b""
        if len(raw) < length:
            self._fail(f"is truncated: it ends at {self._size}, within {what}")
        self._at += length
        return raw

    def _fail(self, why: str) -> NoReturn:
        raise ModelInvalid(f"{self._path} {why}")
