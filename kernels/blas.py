"""How many threads BLAS uses: NumPy has no say in it once it is imported."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Whoever sets one of these has decided already.
VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
#: The prefix and suffix of NumPy's own build, then those of others.
_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


def use_one_thread() -> bool:
    """Tell every OpenBLAS of this process to compute on the thread that calls it; returns whether one listened.

    Its threads wait for each other by spinning, so products of a fraction of a millisecond lose by them, and lose many
    times over while anything else runs on the cores. The bits of a product, too, may depend on their number, by default
    that of the cores. Does nothing where the environment says how many there shall be, and under another BLAS.
    """
    if any(variable in os.environ for variable in VARIABLES):
        return False
    found = [function for library in _libraries() if (function := _function(library, "set_num_threads"))]
    for function in found:
        function(1)
    return bool(found)


def threads() -> int | None:
    """The number of threads OpenBLAS uses; None under another BLAS."""
    for library in _libraries():
        if function := _function(library, "get_num_threads"):
            return int(function())
    return None


def _libraries() -> list[ctypes.CDLL]:
    """Every OpenBLAS mapped into this process, as Linux lists them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in lines if "/" in line and "openblas" in line.rpartition("/")[2]}
    found = []
    for file in sorted(files):
        try:
            found.append(ctypes.CDLL(file))
        except OSError:  # replaced on disk since it was loaded: it cannot be told any more
            continue
    return found


def _function(library: ctypes.CDLL, name: str) -> Callable[..., Any] | None:
    for pattern in _NAMES:
        if function := getattr(library, pattern.format(name), None):
            return function
    return None
