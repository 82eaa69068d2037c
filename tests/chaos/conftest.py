"""A directory for sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory; the path of a socket has a limit, which pytest's own may be beyond."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        yield Path(name)
