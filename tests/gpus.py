"""The GPU that this test run may use, real or stand-in, and the environment of processes that use it too."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from services.errors import InvalidConfiguration
from services.gpu import Gpu, Runtime

ROOT = Path(__file__).parents[1]


@functools.cache
def _found() -> Runtime | str:
    try:
        runtime = Runtime.load()
        runtime.count()
    except InvalidConfiguration as error:
        return error.message
    return runtime


def runtime_or_skip() -> Runtime:
    """The runtime, if it has a GPU; skips the test if not."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(f"no GPU: {found}")
    return found


def gpu_or_skip(ordinal: int = 0) -> Gpu:
    """A GPU; skips the test when there are not so many."""
    runtime = runtime_or_skip()
    if ordinal >= runtime.count():
        pytest.skip(f"no GPU {ordinal}: there are {runtime.count()}")
    return runtime.gpu(ordinal)


def environment(**changes: str) -> dict[str, str]:
    """For a process that imports this project from its source tree."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/protos", **changes}
