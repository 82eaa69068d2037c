"""BLAS computes on the calling thread here: other tests keep the cores busy, and its own threads spin for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1, user_api="blas"):
        yield
