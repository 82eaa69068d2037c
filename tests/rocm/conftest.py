"""What tests of the stand-in share: it is built once, and processes on it are started as tests need them.

Where it cannot be built its tests are skipped, which fails a run of CI.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from tests import tools
from tests.rocm.processes import Process
from tests.simulators.rocm import standin

Starts: TypeAlias = Callable[..., Process]


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """Skip what has no stand-in."""
    tools.need("g++")
    try:
        standin.build()
    except standin.Unavailable as error:
        pytest.skip(f"no stand-in for a GPU: {error}")


@pytest.fixture(scope="module")
def machine() -> dict[str, str]:
    """The environment of a machine with two GPUs of 64 MiB, whose waves have 64 lanes."""
    return standin.environment(devices=2, memory=64 << 20)


@pytest.fixture
def elsewhere() -> str:
    """The name of another machine; device memory is in the one /dev/shm that other runs of these tests use, too."""
    return f"elsewhere-{os.getpid()}-{secrets.token_hex(4)}"


@pytest.fixture
def start(machine: dict[str, str]) -> Iterator[Starts]:
    """Start processes that end with the test: on ``machine``, with the given variables changed."""
    started = []

    def begin(**variables: Any) -> Process:
        process = Process({**machine, **{name: str(value) for name, value in variables.items()}})
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


def _shared(machine: dict[str, str]) -> Iterator[Process]:
    process = Process(machine)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def one(machine: dict[str, str]) -> Iterator[Process]:
    """A process on ``machine`` for all tests of a module; what a test allocates there it frees."""
    yield from _shared(machine)


@pytest.fixture(scope="module")
def other(machine: dict[str, str]) -> Iterator[Process]:
    """A second one, on the same machine."""
    yield from _shared(machine)
