"""A tensor in a file, and its encoding."""

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

#: Values read and converted at a time; bounds the memory needed besides the tensor itself.
_CHUNK = 1 << 19
#: Exponent bits, all set in infinity and NaN.
_EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Blocks of ``block_values`` values in ``block_bytes`` bytes each.

    ``decode`` takes uint8 ``[blocks, block_bytes]`` and returns ``[blocks, block_values]`` of ``dtype``.
    """

    name: str
    dtype: np.dtype[Any]
    block_values: int
    block_bytes: int
    decode: Callable[[U8], NDArray[Any]]


def plain(name: str, dtype: Any) -> Encoding:
    """Unquantized little-endian values."""
    kind = np.dtype(dtype)
    return Encoding(name, kind, 1, kind.itemsize, lambda raw: raw.view(kind))


F32, F16, BF16 = plain("F32", np.float32), plain("F16", np.float16), plain("BF16", ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's location, bounds checked; ``name`` is used in error messages.

    ``paired_heads`` is the number of heads whose rows are stored as interleaved rotary pairs and are reordered into two
    halves when read; 0 if the rows are stored in the order they are read.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    offset: int  # in the file
    encoding: Encoding
    paired_heads: int = 0

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """The number of bytes in its file."""
        return self.size // self.encoding.block_values * self.encoding.block_bytes

    def read_into(self, out: NDArray[Any], progress: Callable[[int], None] = lambda size: None) -> None:
        """Fill ``out``, contiguous, of the tensor's shape, with its encoding's dtype or float32.

        Calls ``progress`` with the bytes of each read. Raises ``ModelInvalid`` when the file was truncated meanwhile,
        and when a value is not finite.
        """
        flat, at = out.reshape(-1), 0
        for raw in self._chunks():
            decoded = self.encoding.decode(raw).reshape(-1)
            part = flat[at : at + len(decoded)]
            part[...] = decoded
            if not _finite(part):
                raise ModelInvalid(f"{self.file}: tensor {self.name} contains NaN or infinity")
            at += len(decoded)
            progress(raw.size)
        if self.paired_heads:
            _unpair(out, self.paired_heads)

    def equals(self, other: StoredTensor) -> bool:
        """Whether ``other``, of the same shape and row order, has the same values.

        Reads chunk by chunk, up to the first difference. Tensors of the same encoding are compared bytewise, so values
        with two representations, such as zero, may count as different. Raises ``ModelInvalid`` when a file was
        truncated meanwhile.
        """
        alike = self.encoding.name == other.encoding.name
        return all(
            np.array_equal(mine, its)
            if alike
            else np.array_equal(_widened(self.encoding, mine), _widened(other.encoding, its))
            for mine, its in zip(self._chunks(), other._chunks(), strict=True)
        )

    def _chunks(self) -> Iterator[U8]:
        """Yields the blocks, ``[blocks, block_bytes]``, `_CHUNK` values at a time, in a buffer that is reused."""
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
                raise ModelInvalid(f"{self.file} was truncated while it was read")
            done += count


def _widened(encoding: Encoding, raw: U8) -> NDArray[np.float32]:
    return encoding.decode(raw).reshape(-1).astype(np.float32)


def _finite(values: NDArray[Any]) -> bool:
    if bits := _EXPONENTS.get(values.dtype):
        return not ((values.view(np.uint16) & bits) == bits).any()
    # The sum is finite if and only if all values are: float32 values cannot overflow a float64 sum.
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(np.sum(values, dtype=np.float64)))


def _unpair(out: NDArray[Any], heads: int) -> None:
    """Reorder the rows of each head, stored as (0, half), (1, half + 1) ..., in place, one head at a time."""
    dim = len(out) // heads
    for at in range(0, len(out), dim):
        head = out[at : at + dim]
        head[...] = head.reshape(dim // 2, 2, -1).swapaxes(0, 1).reshape(head.shape)
