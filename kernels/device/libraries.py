"""The libraries that CuPy has loaded, for functions of theirs that CuPy does not offer."""

from __future__ import annotations

import ctypes


class LibraryError(Exception):
    """CuPy has not loaded a library that it was built for."""


def loaded(name: str) -> ctypes.CDLL:
    """Return the library by the prefix of its file name: a handle is only valid for its own. Raises LibraryError."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if name in path:
                return ctypes.CDLL(f"/{path}")
    raise LibraryError(f"CuPy has loaded no {name}: its libraries are not what it was built for")
