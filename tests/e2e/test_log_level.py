"""What is logged: from the level up that a flag, the environment or a file names, info unless one does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from services.common.errors import InvalidConfiguration
from services.common.logs import LOG_LEVELS, configure_logging
from services.engine.config import Config as EngineConfig
from services.kvcache.config import Config as DaemonConfig
from tests.e2e.conftest import MODEL, Pair
from tests.processes import engine, kvcache

READERS: dict[str, Callable[..., DaemonConfig | EngineConfig]] = {
    "ROCMFORGE_KVCACHE": DaemonConfig.read,
    "ROCMFORGE_ENGINE": EngineConfig.read,
}


@pytest.fixture
def logging_restored() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_a_level_and_those_above_it_are_logged(
    level: str, logging_restored: None, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(level)
    log = structlog.get_logger()
    for name in LOG_LEVELS:
        getattr(log, name)("an_event")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == list(LOG_LEVELS[LOG_LEVELS.index(level) :])


def test_a_traceback_on_a_terminal_shows_no_prompts(
    logging_restored: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    configure_logging("info")
    prompt = "a secret"
    try:
        raise KeyError(len(prompt))
    except KeyError:
        structlog.get_logger().exception("rpc_failed")
    told = capsys.readouterr().err
    assert "KeyError" in told and prompt not in told


@pytest.mark.parametrize("prefix", READERS)
def test_a_flag_beats_the_environment_which_beats_the_file(prefix: str, tmp_path: Path) -> None:
    read = READERS[prefix]
    file = tmp_path / "settings.toml"
    file.write_text('log-level = "error"')
    variable = {f"{prefix}_LOG_LEVEL": "warning"}
    assert read([], {}).log_level == "info"
    assert read(["--config", str(file)], {}).log_level == "error"
    assert read(["--config", str(file)], variable).log_level == "warning"
    assert read(["--config", str(file), "--log-level", "debug"], variable).log_level == "debug"
    with pytest.raises(InvalidConfiguration, match=r"^--log-level loud: expected debug or info or warning or error$"):
        read(["--log-level", "loud"], {})


def test_services_log_their_start_and_no_calls(pair: Pair) -> None:
    pair.pool()
    pair.stub.GetStats(engine_pb2.GetStatsRequest())
    assert pair.daemon.tcp() and pair.engine.tcp()  # told in the event of the start
    assert pair.daemon.events("rpc") == pair.engine.events("rpc") == []


def test_debug_has_every_call_and_warning_not_even_the_start(short_path: Path) -> None:
    file = short_path / "engine.toml"
    file.write_text('log-level = "warning"')
    environment = {**os.environ, "ROCMFORGE_KVCACHE_LOG_LEVEL": "debug"}
    with kvcache(short_path, environment=environment) as daemon:
        with engine(short_path, daemon.address, "--config", str(file), model=MODEL) as one:
            pair = Pair(daemon, one, short_path)
            pair.cache.GetStats(kvcache_pb2.GetStatsRequest())
            pair.stub.GetStats(engine_pb2.GetStatsRequest())
            assert one.stop() == 0
        calls = {(event["method"], event["code"]) for event in daemon.events("rpc")}
    assert {("OpenSession", "OK"), ("GetStats", "OK")} <= calls
    assert daemon.events("kvcache_serving") and '"info"' not in one.log() and '"debug"' not in one.log()
