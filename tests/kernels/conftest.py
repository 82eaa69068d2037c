"""What tests of kernels share: the devices they run on, and BLAS on the calling thread alone.

Other tests keep the cores busy, and BLAS's own threads spin for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from tests.kernels import devices

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test needs a kernel first compiles it, which takes a busy machine minutes."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(params=devices.NAMES)
def device(request: pytest.FixtureRequest) -> devices.Device:
    """Return each device in turn."""
    return devices.get(request.param)
