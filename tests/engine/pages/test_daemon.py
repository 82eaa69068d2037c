"""The daemon's pages as the scheduler sees them; the session itself is tests/clients."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocmforge.client.arena.device import DevicePages
from services.common.call_stats import CallStats
from services.common.errors import InvalidConfiguration, SessionExpired
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import Demand, Opening, PageLayout
from tests.kvcache.conftest import Running
from tests.kvcache.ongpus import OnGpus

LAYOUT = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="f32")
OPENING = Demand("a", start=0, tokens=[], total_pages=2, known_pages=0, opening=Opening([1, 2, 3]))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8"])
def test_numpy_computes_in_f32(dtype: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"pages of {dtype} are not supported by this backend"):
        GrpcPageSource("unix:/run/x.sock", "pool", PageLayout(4, 1, 1, 2, dtype))


def test_the_memory_is_an_array_on_a_host_and_pages_on_a_gpu(daemon: Running, tmp_path: Path) -> None:
    source = GrpcPageSource(str(daemon.config.listeners[0]), "pool", LAYOUT, pool_pages=8)
    with pytest.raises(SessionExpired):
        _ = source.memory
    source.reopen()
    assert source.memory.shape == (8, 2, 2, 1, 4, 2) and source.memory.dtype == np.float32
    assert (source.page_size, source.total_pages, source.epoch) == (4, 8, daemon.daemon.epoch)
    source.close()
    gpus = OnGpus(tmp_path / "gpus")
    source = GrpcPageSource(
        str(gpus.config.listeners[0]), "pool", LAYOUT, pool_pages=8, gpu=gpus.machine.process().gpu(1)
    )
    source.reopen()
    assert isinstance(source.memory, DevicePages)
    source.close()
    gpus.close()


def test_its_calls_are_counted_and_its_events_are_the_engines(
    daemon: Running, logged: list[MutableMapping[str, Any]]
) -> None:
    calls = CallStats()
    source = GrpcPageSource(str(daemon.config.listeners[0]), "pool", LAYOUT, pool_pages=8, calls=calls)
    source.reopen()
    assert source.may_launch()
    [grant] = source.exchange([OPENING], []).result()
    assert grant.pages == (0, 1)
    source.close()
    assert calls.handled["AllocatePages", "OK"] == calls.handled["CloseSession", "OK"] == 1
    opened = [event for event in logged if event["event"] == "session_opened"]
    assert [(event["pages"], event["log_level"]) for event in opened] == [(8, "info")]


def test_an_untrusted_socket_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfiguration, match=r"--kvcache unix:.*: not a socket"):
        GrpcPageSource(f"unix:{tmp_path}/file", "pool", LAYOUT).reopen()


def test_each_exchange_says_how_fast_the_engine_prefills(daemon: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds, sent = iter([0.0, 1234.5]), list[float]()
    source = GrpcPageSource(
        *(str(daemon.config.listeners[0]), "pool", LAYOUT), pool_pages=8, prefill_tokens_per_s=lambda: next(speeds)
    )
    source.reopen()
    send = source._cache.send

    def noted(parts: list[Any], *rest: Any) -> Any:
        sent.extend(request.prefill_tokens_per_s for request, _ in parts)
        return send(parts, *rest)

    monkeypatch.setattr(source._cache, "send", noted)
    for _ in range(2):
        source.exchange([], []).result()
    source.close()
    assert sent == [0.0, 1234.5]
