"""Decodes GGUF's quantized blocks to float32; the layouts are those of ggml (ggml-common.h).

A block is 32 or 256 values with common scales. The operations and their order are ggml's, so the results are bitwise
equal.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.engine.checkpoint.tensor import BF16, F16, F32, U8, Encoding

F: TypeAlias = NDArray[np.float32]

_K = 256  # values in a block of the K types


def _half(raw: U8) -> F:
    """Float16 ``[blocks, 2 bytes]`` as ``[blocks, 1]``."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: U8, run: int) -> U8:
    """Unpacks each ``run`` bytes to their low nibbles, then their high ones: ``[blocks, 2 * bytes]``."""
    runs = raw.reshape(len(raw), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(raw), -1)


def _fifth_bits(raw: U8) -> U8:
    """Unpacks the bits of ``[blocks, 4]``, lowest first, to 0 or 16: ``[blocks, 32]``."""
    return np.unpackbits(raw, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw: U8) -> F:
    # f16 scale; 32 4-bit values, offset by 8
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(raw: U8) -> F:
    # f16 scale, f16 minimum; 32 4-bit values
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:], 16).astype(np.float32) + _half(raw[:, 2:4])


def _q5_0(raw: U8) -> F:
    # f16 scale; 32 fifth bits; the low 4 bits of 32 values, offset by 16
    numbers = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])
    return _half(raw[:, :2]) * (numbers.astype(np.float32) - 16)


def _q5_1(raw: U8) -> F:
    # f16 scale, f16 minimum; 32 fifth bits; the low 4 bits of 32 values
    numbers = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * numbers.astype(np.float32) + _half(raw[:, 2:4])


def _q8_0(raw: U8) -> F:
    # f16 scale; 32 8-bit values
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_minima(raw: U8) -> tuple[U8, U8]:
    """Unpacks eight 6-bit scales and minima from ``[blocks, 12]``; returns ``[blocks, 8]`` each.

    The first four scales and minima are the low six bits of the first eight bytes. The other four have their low four
    bits in the last four bytes (scale in the low nibble, minimum in the high one) and their high two bits in the top
    bits of the first eight bytes.
    """
    scales, minima, rest = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    return (
        np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], axis=1),
        np.concatenate([minima & 63, (rest >> 4) | (minima >> 6 << 4)], axis=1),
    )


def _scaled(raw: U8, numbers: U8) -> F:
    """Scales values ``[blocks, 256]`` of Q4_K and Q5_K by their block's header: a scale and a minimum per 32 values."""
    scales, minima = _scales_and_minima(raw[:, 4:16])
    scale = (_half(raw[:, :2]) * scales)[..., None]
    least = (_half(raw[:, 2:4]) * minima)[..., None]
    values: F = scale * numbers.reshape(-1, 8, 32).astype(np.float32) - least
    return values.reshape(-1, _K)


def _q4_k(raw: U8) -> F:
    # f16 scale of the scales, f16 scale of the minima; 12 bytes of scales and minima; 256 4-bit values, in runs of 64
    return _scaled(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: U8) -> F:
    # like Q4_K, with fifth bits in between: bit i of byte j belongs to value 32 i + j
    fifth = np.unpackbits(raw[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2).reshape(-1, _K)
    return _scaled(raw, _nibbles(raw[:, 48:], 32) | (fifth << np.uint8(4)))


def _q6_k(raw: U8) -> F:
    # low 4 bits, in runs of 128 values; high 2 bits, in runs of 128; 16 8-bit scales; f16 scale of the scales
    low = _nibbles(raw[:, :128], 64)
    pairs = raw[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, _K)
    scale = _half(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    numbers = (low | (high << 4)).astype(np.float32) - 32
    values: F = scale[..., None] * numbers.reshape(-1, 16, 16)
    return values.reshape(-1, _K)


_FLOAT = np.dtype(np.float32)

#: Supported types by GGUF type number.
ENCODINGS = {
    0: F32,
    1: F16,
    2: Encoding("Q4_0", _FLOAT, 32, 18, _q4_0),
    3: Encoding("Q4_1", _FLOAT, 32, 20, _q4_1),
    6: Encoding("Q5_0", _FLOAT, 32, 22, _q5_0),
    7: Encoding("Q5_1", _FLOAT, 32, 24, _q5_1),
    8: Encoding("Q8_0", _FLOAT, 32, 34, _q8_0),
    12: Encoding("Q4_K", _FLOAT, _K, 144, _q4_k),
    13: Encoding("Q5_K", _FLOAT, _K, 176, _q5_k),
    14: Encoding("Q6_K", _FLOAT, _K, 210, _q6_k),
    30: BF16,
}
#: Names of unsupported types.
OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
