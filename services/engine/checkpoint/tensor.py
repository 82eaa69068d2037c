"""One tensor in a file, and how its numbers are stored there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from services.common.errors import ModelInvalid

U8: TypeAlias = NDArray[np.uint8]

#: Numbers that are read and converted at a time: what a tensor needs beside its own memory.
_CHUNK = 1 << 19
#: The bits of an exponent; all set in infinity and NaN.
_EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Blocks of ``block_values`` numbers in ``block_bytes`` bytes each.

    ``decode`` takes uint8 ``[blocks, block_bytes]`` and returns ``[blocks, block_values]`` of ``dtype``.
    """

    name: str
    dtype: np.dtype[Any]
    block_values: int
    block_bytes: int
    decode: Callable[[U8], NDArray[Any]]


def plain(name: str, dtype: Any) -> Encoding:
    """Numbers one after another, little-endian."""
    kind = np.dtype(dtype)
    return Encoding(name, kind, 1, kind.itemsize, lambda raw: raw.view(kind))


F32, F16, BF16 = plain("F32", np.float32), plain("F16", np.float16), plain("BF16", ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is, its bounds checked; ``name`` is what messages call it.

    ``paired_heads`` is the number of heads whose rows are stored as pairs that turn together, and read as first halves,
    then second; 0 where rows are as they are read.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    offset: int  # in the file
    encoding: Encoding
    paired_heads: int = 0

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """How many bytes it is in its file."""
        return self.size // self.encoding.block_values * self.encoding.block_bytes

    def read_into(self, out: NDArray[Any], progress: Callable[[int], None] = lambda size: None) -> None:
        """Fill ``out``, contiguous, of the tensor's shape, of its encoding's type or float32.

        ``progress`` is told of bytes as they are read. Raises ``ModelInvalid`` when the file has become shorter, and
        when a number is not finite.
        """
        flat, at = out.reshape(-1), 0
        for raw in self._chunks():
            decoded = self.encoding.decode(raw).reshape(-1)
            part = flat[at : at + len(decoded)]
            part[...] = decoded
            if not _finite(part):
                raise ModelInvalid(f"{self.file}: tensor {self.name} holds NaN or infinity")
            at += len(decoded)
            progress(raw.size)
        if self.paired_heads:
            _unpair(out, self.paired_heads)

    def equals(self, other: StoredTensor) -> bool:
        """Whether ``other``, of the same shape and order of rows, has the same numbers.

        Read a chunk at a time, up to the first difference. Two that are stored alike are compared byte by byte, so that
        numbers which are stored in two ways, such as the zeros, may count as different. Raises ``ModelInvalid`` when a
        file has become shorter.
        """
        alike = self.encoding.name == other.encoding.name
        return all(
            np.array_equal(mine, its)
            if alike
            else np.array_equal(_widened(self.encoding, mine), _widened(other.encoding, its))
            for mine, its in zip(self._chunks(), other._chunks(), strict=True)
        )

    def _chunks(self) -> Iterator[U8]:
        """Yield the blocks, ``[blocks, block_bytes]``, `_CHUNK` numbers at a time, in memory that is used again."""
        rows = max(1, _CHUNK // self.encoding.block_values)
        blocks = self.size // self.encoding.block_values
        buffer = np.empty((min(rows, blocks), self.encoding.block_bytes), np.uint8)
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset)
                for at in range(0, blocks, rows):
                    raw = buffer[: min(rows, blocks - at)]
                    self._fill(file, raw.reshape(-1))
                    yield raw
        except OSError as error:
            raise ModelInvalid(f"{self.file} cannot be read: {error.strerror or error}") from error

    def _fill(self, file: FileIO, raw: U8) -> None:
        done = 0
        while done < len(raw):
            count = file.readinto(raw.data[done:])
            if not count:
                raise ModelInvalid(f"{self.file} has become shorter while it was read")
            done += count


def _widened(encoding: Encoding, raw: U8) -> NDArray[np.float32]:
    return encoding.decode(raw).reshape(-1).astype(np.float32)


def _finite(values: NDArray[Any]) -> bool:
    if bits := _EXPONENTS.get(values.dtype):
        return not ((values.view(np.uint16) & bits) == bits).any()
    # One number tells: a sum of float32 in float64 cannot overflow.
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(np.sum(values, dtype=np.float64)))


def _unpair(out: NDArray[Any], heads: int) -> None:
    """Put the rows of each head, stored as (0, half), (1, half + 1) ..., into their order, one head at a time."""
    dim = len(out) // heads
    for at in range(0, len(out), dim):
        head = out[at : at + dim]
        head[...] = head.reshape(dim // 2, 2, -1).swapaxes(0, 1).reshape(head.shape)
