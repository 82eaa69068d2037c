"""How GGUF files store numbers: each block layout as it is in ggml (ggml-common.h), and what it decodes to, float32.

A block is 32 or 256 numbers with common scales. What is computed here, and in which order, is what ggml computes, so
that the numbers are the same to the last bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.engine.checkpoint.tensor import BF16, F16, F32, U8, Encoding

F: TypeAlias = NDArray[np.float32]

_K = 256  # numbers in a block of the K types


def _half(raw: U8) -> F:
    """Float16 ``[blocks, 2 bytes]`` as ``[blocks, 1]``."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: U8, run: int) -> U8:
    """Of each ``run`` bytes the low halves, then the high ones: ``[blocks, 2 bytes]``."""
    runs = raw.reshape(len(raw), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(raw), -1)


def _fifth_bits(raw: U8) -> U8:
    """The bits of ``[blocks, 4]``, lowest first, each as a 16: ``[blocks, 32]``."""
    return np.unpackbits(raw, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw: U8) -> F:
    # f16 scale; 32 numbers of 4 bits, less 8
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(raw: U8) -> F:
    # f16 scale, f16 least; 32 numbers of 4 bits
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:], 16).astype(np.float32) + _half(raw[:, 2:4])


def _q5_0(raw: U8) -> F:
    # f16 scale; 32 fifth bits; 32 numbers of 4 bits: less 16
    numbers = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])
    return _half(raw[:, :2]) * (numbers.astype(np.float32) - 16)


def _q5_1(raw: U8) -> F:
    # f16 scale, f16 least; 32 fifth bits; 32 numbers of 4 bits
    numbers = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * numbers.astype(np.float32) + _half(raw[:, 2:4])


def _q8_0(raw: U8) -> F:
    # f16 scale; 32 numbers of 8 bits
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_minima(raw: U8) -> tuple[U8, U8]:
    """Eight scales and eight minima of 6 bits, packed in ``[blocks, 12]``; ``[blocks, 8]`` each.

    The first four of each fill the low six bits of four bytes; of the others the low four bits are in the last four
    bytes, scale below minimum, and the high two on top of the first ones.
    """
    scales, minima, rest = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    return (
        np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], axis=1),
        np.concatenate([minima & 63, (rest >> 4) | (minima >> 6 << 4)], axis=1),
    )


def _scaled(raw: U8, numbers: U8) -> F:
    """Numbers ``[blocks, 256]`` of Q4_K and Q5_K by what their blocks begin with: a scale and a minimum for each 32."""
    scales, minima = _scales_and_minima(raw[:, 4:16])
    scale = (_half(raw[:, :2]) * scales)[..., None]
    least = (_half(raw[:, 2:4]) * minima)[..., None]
    values: F = scale * numbers.reshape(-1, 8, 32).astype(np.float32) - least
    return values.reshape(-1, _K)


def _q4_k(raw: U8) -> F:
    # f16 scale of scales, f16 of minima; 12 bytes of these; 256 numbers of 4 bits, in runs of 64
    return _scaled(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: U8) -> F:
    # as Q4_K, with fifth bits between: bit i of byte j is of number 32 i + j
    fifth = np.unpackbits(raw[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2).reshape(-1, _K)
    return _scaled(raw, _nibbles(raw[:, 48:], 32) | (fifth << np.uint8(4)))


def _q6_k(raw: U8) -> F:
    # the low 4 bits, in runs of 128 numbers; the high 2, in runs of 128; 16 scales of 8 bits; f16 scale of these
    low = _nibbles(raw[:, :128], 64)
    pairs = raw[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, _K)
    scale = _half(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    numbers = (low | (high << 4)).astype(np.float32) - 32
    values: F = scale[..., None] * numbers.reshape(-1, 16, 16)
    return values.reshape(-1, _K)


_FLOAT = np.dtype(np.float32)

#: By the number that a file has for each.
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
#: Names of those that are not read.
OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
