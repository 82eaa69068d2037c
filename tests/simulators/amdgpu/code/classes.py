"""Which unit of a GPU executes an instruction: what counts of executed instructions are summed by."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: In this order, the first that matches.
_CLASSES = [
    (re.compile(r"v_(mfma|wmma|swmmac)_"), "matrix"),
    # Transcendental functions, products of whole 32-bit numbers, and 64-bit floats: a quarter of the rate, or less.
    (re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_(iflag_)?f(16|32)|v_(rcp|fma|fmac|add|mul)_f64"), "slow"),
    (re.compile(r"v_(mul_(lo|hi)_[ui]32|mad_(co_)?[ui]64_[ui]32)"), "slow"),
    (re.compile(r"v_"), "vector"),
    (re.compile(r"ds_"), "lds"),
    (re.compile(r"(global|flat|scratch|buffer)_"), "memory"),
    (re.compile(r"s_"), "scalar"),
]
NAMES = tuple(dict.fromkeys(name for _, name in _CLASSES))


def of(mnemonic: str) -> str:
    """Return the class of a mnemonic, one of `NAMES`; raises ValueError for one that is none of AMD's."""
    for pattern, name in _CLASSES:
        if pattern.match(mnemonic):
            return name
    raise ValueError(f"{mnemonic!r}: no unit executes it")


def summed(executed: Mapping[str, float]) -> dict[str, float]:
    """Return how often each class was executed, of counts by mnemonic; a dual instruction counts once."""
    found = dict.fromkeys(NAMES, 0.0)
    for mnemonic, count in executed.items():
        found[of(mnemonic)] += count
    return found
