"""Long work in slices, between which the daemon's loop serves others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from typing import TypeVar

Result = TypeVar("Result")

#: Seconds of a slice.
SLICE_S = 0.005


async def in_slices(work: Generator[None, None, Result]) -> Result:
    """The result of work that yields wherever it may pause. Work that yields nothing is done without a pause."""
    began = time.monotonic()
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        if time.monotonic() - began >= SLICE_S:
            await asyncio.sleep(0)
            began = time.monotonic()


def found_in(walk: Iterator[Result | None]) -> Generator[None, None, list[Result]]:
    """What a walk has found, which yields None wherever it may pause."""
    found: list[Result] = []
    for one in walk:
        if one is None:
            yield
        else:
            found.append(one)
    return found
