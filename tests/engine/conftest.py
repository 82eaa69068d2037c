"""What the engine's tests share.

Logged events are caught instead of printed; a test that wants them asks for ``logged``. A module whose tests share an
engine makes it as ``shared``; they ask for ``engine``.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from google.protobuf import duration_pb2

from rocmforge.client import cache
from rocmforge.engine.v1 import engine_pb2 as pb
from tests.engine.running import RunningEngine


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as events:
        yield events


@pytest.fixture
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls to the daemon have long timeouts, for slow machines."""
    for name in ("MAX_CALL_S", "CLOSE_S"):
        monkeypatch.setattr(cache, name, 60.0)


@pytest.fixture
def engine(shared: RunningEngine) -> Iterator[RunningEngine]:
    """The engine of this module; each test leaves it idle."""
    yield shared
    shared.settle()


@pytest.fixture
def no_generations(engine: RunningEngine) -> None:
    """The engine of this module keeps none when a test begins."""
    engine.stub.PurgeGenerations(pb.PurgeGenerationsRequest(older_than=duration_pb2.Duration()))
