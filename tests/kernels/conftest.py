"""What tests of kernels share: the devices they run on, and BLAS on the calling thread alone.

Other tests keep the cores busy, and BLAS's own threads spin for them.

On AMD's machine code every test runs with ROCMFORGE_TEST_ISA set (`make test-isa`), and those of `SELECTED` always.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from tests.kernels import devices

FOLDER = Path(__file__).parent


#: Of the tests on AMD's machine code, those that are part of `make test`: of each kernel the paths that differ, each
#: GPU in turn, since compiling for one takes longer than running.
SELECTED = re.compile(
    r"test_activation\.py::test_silu_mul\[(gfx942-BF16|gfx1100-F16)\]"
    r"|test_norm\.py::test_rms_norm\[(gfx90a-apart-BF16|gfx1201-in place-F16)\]"
    r"|test_embedding\.py::test_gather_rows\[gfx942-F32\]"
    r"|test_pages\.py::test_pages\[gfx1100-3-(16|3001)\]"
    r"|test_checksum\.py::test_checksums\[(gfx942-3-256-36864|gfx90a-1-64-77|gfx1100-3-256-3001|gfx1201-1-64-4096)\]"
    r"|test_rope\.py::test_(write_int8\[gfx1100-1-24-BF16-64|rope_write\[gfx1201-F32-F32-80)\]"
    r"|test_gemv\.py::test_a_row_is_the_same_whatever_is_beside_it\[(gfx942-BF16|gfx1201-F16)\]"
    r"|attention/test_machine_code\.py::test_attention\[(13-.*-(gfx942|gfx1100|gfx1201)-matrix|12-.*-gfx90a-scalar)\]"
    r"|test_budgets\.py::(test_the_benchmark|test_vector_instructions_a_key\[gfx942-decode-matrix-INT8)"
    r"|test_sampling\.py::test_random_rows\[(gfx942|gfx90a|gfx1100)-(31-300|1027-100)\]"
    r"|test_sampling\.py::test_(penalties_biases_and_bans|ties_are_cut_by_id)\[(gfx942|gfx1100|gfx1201)\]"
    # What HIPRTC makes of each kernel.
    r"|test_activation\.py::test_silu_mul\[gfx90a-hiprtc-BF16\]"
    r"|test_norm\.py::test_rms_norm\[gfx1030-hiprtc-apart-F16\]"
    r"|test_embedding\.py::test_gather_rows\[gfx90a-hiprtc-F32\]"
    r"|test_pages\.py::test_pages\[gfx1030-hiprtc-3-3001\]"
    r"|test_checksum\.py::test_checksums\[gfx90a-hiprtc-3-256-3001\]"
    r"|test_rope\.py::test_(write_int8\[gfx1030-hiprtc-1-24-BF16-64|rope_write\[gfx90a-hiprtc-F32-F32-80)\]"
    r"|test_gemv\.py::test_a_row_is_the_same_whatever_is_beside_it\[gfx90a-hiprtc-BF16\]"
    r"|attention/test_machine_code\.py::test_attention\[13-.*-(gfx90a-hiprtc-matrix|gfx1030-hiprtc-scalar)\]"
    r"|test_sampling\.py::test_random_rows\[(gfx90a|gfx1030)-hiprtc-1027-100\]"
)


def _runs(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    machine = callspec and callspec.params.get("device") in devices.MACHINES
    return not machine or bool(os.environ.get("ROCMFORGE_TEST_ISA")) or bool(SELECTED.search(item.nodeid))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first test that needs a kernel compiles it, which takes minutes on a busy machine."""
    ours = [item for item in items if item.path.is_relative_to(FOLDER)]
    for item in ours:
        item.add_marker(pytest.mark.timeout(600))
    left_out = [item for item in ours if not _runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(params=[*devices.NAMES, *devices.MACHINES])
def device(request: pytest.FixtureRequest) -> devices.Device:
    """Return each device in turn."""
    return devices.get(request.param)
