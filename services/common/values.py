"""Kinds of setting values: for each its parser, the types that a file may give, and its description."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

#: The largest file offset.
MAX_BYTES = 2**63 - 1

_DIGITS = 40  # more than any sensible number has, and well below the limit of int()
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class Kind:
    """``parse`` converts text and raises ValueError or InvalidConfiguration, saying what it expected; ``summary``
    describes the kind in tables; ``types`` are the types that a settings file may use.
    """

    parse: Callable[[str], Any]
    summary: str
    types: tuple[type, ...] = (str,)

    def __call__(self, text: str) -> Any:
        """Parse ``text``. Raises what ``parse`` raises."""
        return self.parse(text)


def _byte_size(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    # Fraction, since a float would round large sizes and overflow on huge ones.
    size = int(Fraction(found[1]) * unit) if found and unit and len(found[1]) <= _DIGITS else 0
    if not 1 <= size <= MAX_BYTES:
        raise ValueError(f"expected a size such as 256MiB, 1GiB or a number of bytes, from 1 to {MAX_BYTES}")
    return size


#: Bytes from ``256MiB``, ``1.5GiB``, ``4096``.
byte_size = Kind(_byte_size, "size", (str, int))


def whole(low: int, high: int) -> Kind:
    """Integers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        digits = text.strip()
        if not re.fullmatch(r"[+-]?\d+", digits) or len(digits) > _DIGITS or not low <= int(digits) <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return int(digits)

    return Kind(parse, f"integer, {low} to {high}", (int,))


def seconds(low: float, high: float) -> Kind:
    """Durations in seconds from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = _number(text.strip().removesuffix("s"))
        if not low <= value <= high:
            raise ValueError(f"expected seconds from {low:g} to {high:g}")
        return value

    return Kind(parse, f"seconds, {low:g} to {high:g}", (int, float))


def _share(text: str) -> float:
    share = _number(text)
    if not 0 <= share <= 1:
        raise ValueError("expected a number from 0 to 1")
    return share


#: A fraction from 0 to 1.
share = Kind(_share, "number, 0 to 1", (int, float))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def one_of(*words: str) -> Kind:
    """One of the given words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {' or '.join(words)}")
        return text

    return Kind(parse, " or ".join(words))


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected true or false")


#: A boolean.
switch = Kind(_switch, "switch", (bool,))
