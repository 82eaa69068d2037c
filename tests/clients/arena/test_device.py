# mypy: disable-error-code="func-returns-value, union-attr"
"""The engine's side of pages on a GPU: what it opens, what it refuses, and the order in which it lets go."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocmforge.client.arena.announced import Announced
from rocmforge.client.arena.device import DevicePages, map_device_pages
from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.client.cache import KvCache
from rocmforge.client.demands import Demand, Opening
from rocmforge.client.errors import (
    AttachMismatch,
    FieldInvalid,
    GpuError,
    InvalidConfiguration,
    KvCacheDown,
    SessionExpired,
)
from rocmforge.client.layout import PageLayout
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.engine.pages.private import private_device_pages
from services.kvcache.pool import layout as daemon_layout
from tests.clients.recorder import Recorder
from tests.fakegpu import INVALID_POINTER, FakeRuntime, Machine
from tests.kvcache.ongpus import OnGpus

LAYOUT = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="bf16")
OPENING = Demand("a", start=0, tokens=[], total_pages=2, known_pages=0, opening=Opening([1, 2, 3]))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OnGpus]:
    one = OnGpus(tmp_path)
    yield one
    one.close()


@pytest.fixture
def api(daemon: OnGpus) -> FakeRuntime:
    """The engine's process."""
    return daemon.machine.process()


def made(daemon: OnGpus, gpu: Gpu | None, **options: Any) -> KvCache:
    options = {"pool_pages": 8, "layout": LAYOUT, **options}
    return KvCache(str(daemon.config.listeners[0]), "pool", options.pop("layout"), gpu=gpu, **options)


@pytest.fixture
def source(daemon: OnGpus, api: FakeRuntime) -> Iterator[KvCache]:
    one = made(daemon, api.gpu(1))
    yield one
    one.close()
    assert not api.mapped, "a closed source has let go of the memory"


# --- a page's size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8"])
def test_engine_and_daemon_price_a_page_alike(dtype: str) -> None:
    for page_size, layers, kv_heads, head_dim in ((4, 1, 1, 16), (16, 5, 2, 64), (1, 3, 7, 80)):
        named: dict[str, Any] = {
            "page_size": page_size,
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": dtype,
        }
        assert PageLayout(**named).page_bytes == daemon_layout.PageLayout(**named).page_bytes


# --- a session --------------------------------------------------------------------------------------------------------


def test_a_session_maps_the_daemons_pages(daemon: OnGpus, api: FakeRuntime, source: KvCache) -> None:
    source.reopen()
    pages = source.pages
    assert isinstance(pages, DevicePages)
    assert (pages.total_pages, pages.page_bytes, pages.gpu.ordinal) == (8, LAYOUT.page_bytes, 1)
    assert (source.total_pages, source.epoch) == (8, daemon.daemon.epoch)
    assert source.start_step([OPENING], []).result()[0].pages == (0, 1)
    pages.gpu.write(pages.pointer + 7 * pages.page_bytes, b"last page")
    [other] = [made(daemon, daemon.machine.process().gpu(1))]
    other.reopen()
    seen = other.pages
    assert seen.gpu.read(seen.pointer + 7 * seen.page_bytes, 9) == b"last page"
    other.close()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8"])
def test_any_type_of_page(daemon: OnGpus, api: FakeRuntime, dtype: str) -> None:
    source = made(daemon, api.gpu(0), layout=PageLayout(4, 2, 1, 16, dtype))
    source.reopen()
    [pool] = daemon.stub.GetStats(pb.GetStatsRequest()).pools
    assert pool.layout.data_type == getattr(pb, f"DATA_TYPE_{dtype.upper()}")
    source.close()


def test_types_that_do_not_exist_are_refused(api: FakeRuntime) -> None:
    with pytest.raises(InvalidConfiguration, match="pages of f64 are not supported"):
        KvCache("unix:/run/x.sock", "pool", PageLayout(4, 1, 1, 2, "f64"), gpu=api.gpu(0))


def test_an_engine_lets_go_before_it_ends_its_session(
    daemon: OnGpus, api: FakeRuntime, source: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.reopen()
    first, order = source.pages, list[str]()
    close = source._close_sessions
    monkeypatch.setattr(source, "_close_sessions", lambda s: (order.append(f"mapped: {len(api.mapped)}"), close(s)))
    api.calls.clear()
    source.reopen()
    assert order == ["mapped: 0"]
    waited, unmapped = api.calls.index("deviceSynchronize"), api.calls.index("ipcCloseMemHandle")
    assert waited < unmapped < api.calls.index("ipcOpenMemHandle")
    assert source.pages is not first and len(api.mapped) == 1
    with pytest.raises(GpuError, match="unmapped"):
        _ = first.array


def test_a_lost_session_is_opened_anew(daemon: OnGpus, api: FakeRuntime, source: KvCache) -> None:
    source.reopen()
    daemon.now += 11
    daemon.sweep()
    with pytest.raises(SessionExpired):
        source.start_step([OPENING], []).result()
    source.reopen()
    assert source.start_step([OPENING], []).result()[0].pages and len(api.mapped) == 1


def test_a_refused_attach_unmaps(daemon: OnGpus, api: FakeRuntime, source: KvCache) -> None:
    api.fail["memcpy"] = 999  # the canary is not read
    with pytest.raises(AttachMismatch):
        source.reopen()
    del api.fail["memcpy"]
    cache = daemon.daemon.cache
    attach = cache.attach_session

    def refuse(session_id: str, seen: bytes, caller: str = "") -> Any:
        raise AttachMismatch("other memory")

    cache.attach_session = refuse
    with pytest.raises(AttachMismatch, match="other memory"):
        source.reopen()
    assert not api.mapped
    assert daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].sessions == 0
    cache.attach_session = attach
    source.reopen()


def test_nobody_there(tmp_path: Path) -> None:
    source = KvCache(f"unix:{tmp_path}/none.sock", "pool", LAYOUT, gpu=Machine().process().gpu(0))
    with pytest.raises(KvCacheDown):
        source.reopen()
    source.close()


# --- the wrong GPU ----------------------------------------------------------------------------------------------------


def test_a_gpu_that_the_daemon_does_not_have(daemon: OnGpus) -> None:
    daemon.machine.ids.append("0000:c3:00.0")
    daemon.api._visible = [0, 1]
    source = made(daemon, daemon.machine.process().gpu(2))
    with pytest.raises(FieldInvalid, match=r"device_ordinal is 2; .* must be 0 to 1"):
        source.reopen()
    source.close()


def test_gpus_numbered_otherwise_are_noticed(daemon: OnGpus) -> None:
    api = daemon.machine.process(visible=[1, 0])
    source = made(daemon, api.gpu(0))
    with pytest.raises(AttachMismatch) as caught:
        source.reopen()
    assert caught.value.field == "device_ordinal"
    for words in ("engine's GPU 0 is 0000:83:00.0", "on 0000:03:00.0, its GPU 0", "HIP_VISIBLE_DEVICES"):
        assert words in caught.value.message
    assert "ipcOpenMemHandle" not in api.calls, "the handle was not even tried"
    assert daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].sessions == 0
    source.close()


@pytest.mark.parametrize(("is_hip", "refused"), [(True, True), (False, False)])
def test_only_hip_needs_the_same_number_for_the_same_gpu(is_hip: bool, refused: bool) -> None:
    machine = Machine()
    owner = machine.process().gpu(1)
    handle = owner.export(owner.allocate(1024))
    gpu = machine.process(visible=[1], is_hip=is_hip).gpu(0)
    if refused:
        with pytest.raises(AttachMismatch, match="its GPU 1"):
            map_device_pages(handle, LAYOUT, gpu=gpu, **announced(device_ordinal=1, device_id=owner.id))
    else:
        map_device_pages(handle, LAYOUT, gpu=gpu, **announced(device_ordinal=1, device_id=owner.id))[0].close()


def test_a_daemon_with_its_pages_elsewhere(daemon: OnGpus) -> None:
    source = made(daemon, None, layout=PageLayout(4, 2, 1, 2, "f32"))
    with pytest.raises(FieldInvalid, match="device_ordinal is unset"):
        source.reopen()
    source.close()


# --- opening ----------------------------------------------------------------------------------------------------------

SIZE = LAYOUT.page_bytes


def announced(**changes: Any) -> dict[str, Any]:
    """Two pages followed by a canary."""
    told = {"total_pages": 2, "page_bytes": SIZE, "canary_offset": 2 * SIZE, "size_bytes": 2 * SIZE + 64}
    sizes = {name: changes.pop(name, size) for name, size in told.items()}
    return {"announced": Announced(**sizes), "device_ordinal": 0, "device_id": "0000:03:00.0", **changes}


@pytest.fixture
def owner() -> Gpu:
    return Machine().process().gpu(0)


def exported(owner: Gpu) -> tuple[int, bytes]:
    pointer = owner.allocate(2 * SIZE + 64)
    owner.write(pointer + 2 * SIZE, bytes(range(32)) + bytes(32))
    return pointer, owner.export(pointer)


def process(owner: Gpu) -> FakeRuntime:
    return owner.runtime.api.machine.process()


def test_the_canary_is_read_and_answered(owner: Gpu) -> None:
    pointer, handle = exported(owner)
    pages, seen = map_device_pages(handle, LAYOUT, gpu=process(owner).gpu(0), **announced())
    assert seen == bytes(range(32))
    assert owner.read(pointer + 2 * SIZE + 32, 32) == bytes(255 - byte for byte in range(32))
    pages.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"page_bytes": 4},
        {"total_pages": 0},
        {"total_pages": 3},
        {"size_bytes": 2 * SIZE},
        {"canary_offset": 2**40},
        {"device_id": ""},
        {"device_id": "0000:83:00.0"},
        {"device_ordinal": 1},
        {"device_ordinal": None},
    ],
    ids=str,
)
def test_memory_that_is_not_as_announced_is_not_opened(owner: Gpu, changes: dict[str, Any]) -> None:
    api = process(owner)
    with pytest.raises(AttachMismatch):
        map_device_pages(exported(owner)[1], LAYOUT, gpu=api.gpu(0), **announced(**changes))
    assert "ipcOpenMemHandle" not in api.calls


def test_memory_shorter_than_announced_is_let_go(owner: Gpu) -> None:
    api = process(owner)
    with pytest.raises(AttachMismatch, match="cannot be used: GPU 0: memcpy"):
        map_device_pages(
            exported(owner)[1], LAYOUT, gpu=api.gpu(0), **announced(canary_offset=4 * SIZE, size_bytes=5 * SIZE)
        )
    assert not api.mapped


def test_its_own_memory_cannot_be_opened_and_the_error_says_why(owner: Gpu) -> None:
    with pytest.raises(AttachMismatch) as caught:
        map_device_pages(exported(owner)[1], LAYOUT, gpu=owner, **announced())
    for words in ("two processes", "pid, ipc and network namespaces", "doctor engine --peer"):
        assert words in caught.value.message


def test_a_handle_whose_owner_cannot_be_reached_says_where_to_look(owner: Gpu) -> None:
    api = process(owner)
    api.fail["ipcOpenMemHandle"] = INVALID_POINTER
    with pytest.raises(AttachMismatch, match="network namespace"):
        map_device_pages(exported(owner)[1], LAYOUT, gpu=api.gpu(0), **announced())


def test_a_handle_of_another_length(owner: Gpu) -> None:
    with pytest.raises(AttachMismatch, match="has 64 bytes; this one has 3"):
        map_device_pages(b"abc", LAYOUT, gpu=process(owner).gpu(0), **announced())


# --- letting go -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of CuPy as a view takes."""

    def ndarray(shape: tuple[int, ...], dtype: str, pointer: Any) -> SimpleNamespace:
        return SimpleNamespace(shape=shape, dtype=dtype, data=pointer)

    cuda = SimpleNamespace(
        UnownedMemory=lambda pointer, size, owner, device: SimpleNamespace(
            ptr=pointer, size=size, owner=owner, device_id=device
        ),
        MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory, ptr=memory.ptr + offset),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=ndarray, uint8="u1"))


@pytest.mark.usefixtures("cupy")
def test_a_view_owns_nothing_and_is_missed_when_it_stays(owner: Gpu, logged: list[Any]) -> None:
    pages = private_device_pages(LAYOUT, 3, owner)
    view = pages.array
    assert (view.shape, view.dtype) == ((3, SIZE), "u1")
    assert (view.data.ptr, view.data.mem.size, view.data.mem.device_id) == (pages.pointer, 3 * SIZE, 0)
    pages.close()
    assert [(event["event"], event["views"]) for event in logged] == [("pages_still_viewed", 1)]
    logged.clear()
    pages = private_device_pages(LAYOUT, 3, owner)
    _ = pages.array
    del view, _
    gc.collect()
    pages.close()
    assert not logged


def test_private_pages_are_freed_once(owner: Gpu) -> None:
    api = owner.runtime.api
    pages = private_device_pages(LAYOUT, 3, owner)
    assert api.machine.used(0) == 3 * SIZE
    pages.close()
    pages.close()
    assert api.machine.used(0) == 0 and api.calls.count("free") == 1


def test_private_pages_that_do_not_fit(owner: Gpu) -> None:
    with pytest.raises(MemoryError):
        private_device_pages(LAYOUT, 1 << 20, owner)


@pytest.mark.parametrize("function", ["deviceSynchronize", "ipcCloseMemHandle"])
def test_a_gpu_that_fails_at_the_end_is_logged(owner: Gpu, log: Recorder, function: str) -> None:
    api = process(owner)
    pages, _ = map_device_pages(exported(owner)[1], LAYOUT, gpu=api.gpu(0), log=log, **announced())
    api.fail[function] = 719
    assert not pages.close() and not pages.close()
    assert log.names() == ["pages_not_unmapped"]
    assert function in log.events[0]["detail"]


@pytest.mark.parametrize("function", ["deviceSynchronize", "ipcCloseMemHandle"])
def test_an_engine_does_not_vouch_for_pages_that_its_gpu_may_still_write(
    daemon: OnGpus, api: FakeRuntime, function: str
) -> None:
    source = made(daemon, api.gpu(1))
    source.reopen()
    source.start_step([OPENING], []).result()
    daemon.now += 11
    daemon.sweep()
    api.fail[function] = 719
    source.close()
    [lost] = daemon.stub.GetStats(pb.GetStatsRequest()).lost_sessions
    assert lost.quarantined_pages > 0
    assert "ipcCloseMemHandle" in api.calls, "it was tried all the same"
