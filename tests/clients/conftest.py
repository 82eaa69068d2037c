"""What the client's tests share."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog

from tests.clients.recorder import Recorder


@pytest.fixture
def log() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the daemon and the engine log in this process."""
    with structlog.testing.capture_logs() as events:
        yield events
