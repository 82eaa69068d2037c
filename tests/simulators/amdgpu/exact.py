"""Arithmetic as IEEE 754 has it, by exact fractions: what the executor's floats are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray


def rounded(exact: Fraction, kind: type[np.floating[Any]], zero_sign: float = 1.0) -> np.floating[Any]:
    """Return the number of type ``kind`` nearest to ``exact``, ties to even; 0 has the sign of ``zero_sign``."""
    info = np.finfo(kind)
    if exact == 0:
        return kind(math.copysign(0.0, zero_sign))
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    exponent = max(exponent, int(info.minexp))
    unit = Fraction(2) ** (exponent - info.nmant)
    steps = magnitude / unit
    whole = math.floor(steps)
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    result = whole * unit
    value = kind(math.inf) if result > Fraction(float(info.max)) else kind(float(result))
    return kind(-value) if exact < 0 else value


def fused(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """Return a b + c, rounded once, lane by lane."""
    return np.array([_fused(*one) for one in zip(a, b, c, strict=True)], a.dtype)


def _fused(a: Any, b: Any, c: Any) -> Any:
    kind = type(a)
    x, y, z = float(a), float(b), float(c)
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        product = (
            math.nan
            if math.isnan(x) or math.isnan(y) or (0.0 in (x, y) and math.inf in (abs(x), abs(y)))
            else (math.copysign(math.inf, x) * math.copysign(1, y) if math.inf in (abs(x), abs(y)) else 0.0)
        )
        return kind(product + z)
    sign = math.copysign(1, x) * math.copysign(1, y)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    # A sum that is 0 is +0, but of two zeros of one sign.
    both = Fraction(x) * Fraction(y) == 0 and z == 0 and sign == math.copysign(1, z)
    return rounded(exact, kind, sign if both else 1.0)


def lanewise(function: Callable[..., Any], kind: Any) -> Callable[..., NDArray[Any]]:
    """Return ``function`` of whole numbers or floats for arrays of them; the results are cut to ``kind``."""
    bits = np.dtype(kind).itemsize * 8

    def over(*arrays: NDArray[Any]) -> NDArray[Any]:
        found = [function(*(one.item() for one in lanes)) for lanes in zip(*arrays, strict=True)]
        if np.dtype(kind).kind == "u":
            return np.array([int(one) & ((1 << bits) - 1) for one in found], kind)
        return np.array(found, kind)

    return over
