"""Where a client says what happens to it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from rocmforge.client import KvCache, OpaqueLayout
from rocmforge.client.errors import InvalidConfiguration
from tests.clients.recorder import Recorder
from tests.kvcache.conftest import Running

LAYOUT = OpaqueLayout(page_size=4, label="events", page_bytes=64)


def test_the_standard_library_s_logging_is_the_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = Running(tmp_path)
    with caplog.at_level(logging.INFO, logger="rocmforge.client"):
        with KvCache.connect(str(daemon.config.listeners[0]), "events", LAYOUT, pool_pages=4):
            pass
    daemon.close()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "rocmforge.client"]
    assert [(level, line.split()[0]) for level, line in lines] == [("INFO", "session_opened")]
    assert "pages=4" in lines[0][1] and "pool_id='events'" in lines[0][1]


def test_any_log_takes_the_events_with_their_values(tmp_path: Path) -> None:
    daemon, log, calls = Running(tmp_path), Recorder(), list[tuple[str, str, float]]()
    cache = KvCache.connect(
        str(daemon.config.listeners[0]),
        "events",
        LAYOUT,
        pool_pages=4,
        log=log,
        on_call=lambda *call: calls.append(call),
    )
    daemon.close()
    cache.close()
    assert log.names() == ["session_opened", "session_not_closed"]
    assert [(method, code) for method, code, _ in calls[:2]] == [("OpenSession", "OK"), ("AttachSession", "OK")]
    assert calls[-1][:2] == ("CloseSession", "UNAVAILABLE") and all(seconds >= 0 for _, _, seconds in calls)


def test_a_gpu_without_cupy_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InvalidConfiguration, match="requires CuPy"):
        KvCache("unix:/run/x.sock", "events", LAYOUT, gpu=0)
