"""Pages as arrays: what is where in a page, on the memory itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rocmforge.client import Demand, KvCache, OpaqueLayout, PageLayout
from rocmforge.client.arena.host import HostPages
from rocmforge.client.errors import AttachMismatch, InvalidConfiguration, LayoutMismatch, SessionExpired
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.kvcache.conftest import Running

PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    one = Running(tmp_path_factory.mktemp("daemon"))
    yield one
    one.close()


def mappings(daemon: Running) -> int:
    """How many of a daemon's arenas this process maps; the daemon, too, runs in it."""
    gc.collect()
    directory = str(daemon.config.arena_dir)
    return sum(directory in line for line in Path("/proc/self/maps").read_text().splitlines())


def session(daemon: Running, dtype: str) -> KvCache:
    layout = PageLayout(page_size=4, layers=3, kv_heads=2, head_dim=8, dtype=dtype)
    return KvCache.connect(str(daemon.config.listeners[0]), f"views {dtype}", layout, pool_pages=5)


def host(cache: KvCache) -> HostPages:
    pages = cache.pages
    assert isinstance(pages, HostPages)
    return pages


@pytest.mark.parametrize("dtype", PLAIN)
def test_an_element_lies_where_the_design_says(daemon: Running, dtype: str) -> None:
    with session(daemon, dtype) as cache:
        pages, layout = cache.pages.numpy(), cache.layout
        assert pages.raw.shape == (5, layout.page_bytes) and pages.raw.dtype == np.uint8
        assert pages.kv.shape == (5, 3, 2, 2, 4, 8) and pages.kv.dtype == PLAIN[dtype]
        pages.raw[:] = 0
        pages.kv[4, 2, 1, 0, 3, 5] = 7
        item = pages.kv.itemsize
        at = ((((2 * 2 + 1) * 2 + 0) * 4 + 3) * 8 + 5) * item
        assert pages.raw[4, at : at + item].tobytes() == np.array(7, PLAIN[dtype]).tobytes()
        assert np.count_nonzero(pages.raw) == np.count_nonzero(pages.raw[4, at : at + item])
        layer = pages.layer(2)
        assert layer.shape == (5, 2, 2, 4, 8) and layer[4, 1, 0, 3, 5] == 7
        with pytest.raises(IndexError):
            pages.layer(3)


def test_scales_lie_behind_the_values_of_int8_pages(daemon: Running) -> None:
    with session(daemon, "int8") as cache:
        pages = cache.pages.numpy()
        pages.raw[:] = 0
        pages.scales[1, 2, 1, 1] = 0.5
        assert pages.scales.shape == (5, 3, 2, 2)
        assert pages.raw[1, -4:].tobytes() == np.float32(0.5).tobytes()
        assert not pages.kv.any()
    with session(daemon, "f16") as cache:
        with pytest.raises(InvalidConfiguration, match="pages of f16 have no scales"):
            _ = cache.pages.numpy().scales


def test_an_opaque_page_is_bytes_and_nothing_else(daemon: Running) -> None:
    target, layout = str(daemon.config.listeners[0]), OpaqueLayout(page_size=4, label="mine, 1", page_bytes=100)
    with KvCache.connect(target, "opaque", layout, pool_pages=3) as one:
        with KvCache.connect(target, "opaque", layout) as other:
            one.pages.numpy().raw[2] = np.arange(100)
            assert other.pages.numpy().raw.shape == (3, 100) and other.pages.numpy().raw[2].tolist() == [*range(100)]
        for view in ("kv", "scales"):
            with pytest.raises(InvalidConfiguration, match="'mine, 1' have raw bytes only"):
                getattr(one.pages.numpy(), view)
        [first] = one.step([Demand.of_prompt("a", [1] * 9, total_pages=3)])
        one.step([Demand.of_step("a", 0, [1] * 9, 3, 3)])
        [again] = one.step([Demand.of_prompt("b", [1] * 9, total_pages=2)], removed=["a"])
        assert again.cached_tokens == 8 and again.pages == first.pages[:2]
        fsck = daemon.stub.Fsck(pb.FsckRequest(deep=True))
        assert fsck.verified_pages == 2 and not fsck.violations
        with pytest.raises(LayoutMismatch, match="label=mine, 1"):
            KvCache.connect(target, "opaque", OpaqueLayout(page_size=4, label="mine, 2", page_bytes=100))


def test_two_sessions_see_the_same_bytes(daemon: Running) -> None:
    with session(daemon, "f32") as one, session(daemon, "f32") as other:
        one.pages.numpy().layer(1)[3, 0, 1, 2, :] = 1.5
        assert other.pages.numpy().kv[3, 1, 0, 1, 2].tolist() == [1.5] * 8


def test_views_end_with_the_session(daemon: Running) -> None:
    before = mappings(daemon)
    cache = session(daemon, "f32")
    pages, kept = host(cache), cache.pages.numpy().kv
    cache.close()
    with pytest.raises(SessionExpired):
        pages.numpy()
    with pytest.raises(SessionExpired):
        _ = cache.pages
    assert mappings(daemon) == before + 1, "who kept an array reads it without a fault"
    assert kept[0, 0, 0, 0, 0, 0] == 0
    del kept, pages
    assert mappings(daemon) == before


def test_host_memory_has_no_arrays_of_cupy(daemon: Running) -> None:
    with session(daemon, "f32") as cache, pytest.raises(AttachMismatch, match="host memory"):
        cache.pages.cupy()


def test_without_torch_an_error_says_so(daemon: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with session(daemon, "f32") as cache, pytest.raises(InvalidConfiguration, match="torch is not installed"):
        cache.pages.torch()
