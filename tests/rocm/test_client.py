"""The client's view of pages on a GPU, through CuPy: a daemon and two engines as processes on the stand-in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.processes import Service, kvcache
from tests.rocm.processes import Process, Refused

if TYPE_CHECKING:
    from tests.rocm.conftest import Starts

PLAIN = {"f32": "float32", "f16": "float16", "bf16": "uint16", "int8": "int8"}


@pytest.fixture(scope="module")
def daemon(machine: dict[str, str]) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="cl-") as name:
        with kvcache(Path(name), "--device", "gpu", "--memory", "1MiB", environment=machine) as service:
            yield service


def connect(process: Process, daemon: Service, dtype: str) -> None:
    process.run("from rocmforge.client import Demand, KvCache, PageLayout")
    process.run(
        "cache = KvCache.connect(address, dtype, PageLayout(4, 3, 2, 8, dtype), pool_pages=5, gpu=1)",
        address=daemon.address,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", PLAIN)
def test_arrays_are_the_pages_that_another_process_sees(start: Starts, daemon: Service, dtype: str) -> None:
    one, other = start(), start()
    for process in (one, other):
        connect(process, daemon, dtype)
    one.run(
        "views = cache.pages.cupy(); views.raw[:] = 0; views.kv[4, 2, 1, 0, 3, 5] = 7; cp.cuda.Device(1).synchronize()"
    )
    assert one.get("(views.raw.shape, views.kv.shape)") == ((5, one.get("cache.layout.page_bytes")), (5, 3, 2, 2, 4, 8))
    assert one.get("str(views.kv.dtype)") == PLAIN[dtype]
    other.run("views = cache.pages.cupy()")
    assert other.get("float(views.layer(2)[4, 1, 0, 3, 5])") == 7
    at = ((((2 * 2 + 1) * 2 + 0) * 4 + 3) * 8 + 5) * one.get("views.kv.itemsize")
    assert other.get("np.flatnonzero(views.raw.get()).tolist()")[0] // one.get("cache.layout.page_bytes") == 4
    assert other.get(f"views.raw[4, {at} : {at} + views.kv.itemsize].get().any()") is True
    if dtype == "int8":
        other.run("views.scales[1, 2, 1, 1] = 0.5; cp.cuda.Device(1).synchronize()")
        assert one.get("views.scales[1, 2, 1, 1].get().item(), views.scales.shape") == (0.5, (5, 3, 2, 2))
        assert one.get("views.raw[1, -4:].get().tobytes() == np.float32(0.5).tobytes()") is True
    for process in (one, other):
        process.run("del views; cache.close()")


def test_no_array_of_numpy_and_none_after_the_session(start: Starts, daemon: Service) -> None:
    one = start()
    connect(one, daemon, "f16")
    with pytest.raises(Refused, match="GPU memory, which has no NumPy arrays"):
        one.run("cache.pages.numpy()")
    assert one.get("cache.step([Demand.of_prompt('a', [1] * 6, 2)])[0].pages") == (0, 1)
    one.run("pages = cache.pages; cache.close()")
    with pytest.raises(Refused, match="the pages are unmapped"):
        one.run("pages.cupy()")
