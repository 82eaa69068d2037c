"""SIGHUP: settings and certificates are read again, and nothing ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rocmforge.engine.v1 import engine_pb2
from rocmforge.engine.v1.engine_pb2_grpc import EngineServiceStub
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceStub
from services.common.edge.reloading import reread
from services.common.errors import InvalidConfiguration
from services.engine.config import BUNDLED_MODEL
from services.kvcache.config import Config
from tests.edge.certificates import issued
from tests.kvcache.conftest import LAYOUT_PB, Running
from tests.polling import until
from tests.processes import Service, engine, kvcache


def config(*flags: str) -> Config:
    return Config.read(["--memory", "1MiB", *flags], {})


def told(service: Service, event: str, count: int) -> list[dict[str, Any]]:
    """Wait until a service has logged an event so many times."""
    return until(lambda: found if len(found := service.events(event)) >= count else [], service.log)


def hangup(service: Service) -> None:
    service.process.send_signal(signal.SIGHUP)


# --- what changes -----------------------------------------------------------------------------------------------------


def test_what_can_change_does_and_what_cannot_is_named() -> None:
    new = config("--log-level", "debug", "--drain", "5", "--max-sessions", "7", "--listen", "127.0.0.1:1")
    with capture_logs() as logs:
        found = reread(config(), lambda: new, Config.LIVE)
    assert (found.log_level, found.drain_s) == ("debug", 5.0)
    assert (found.max_sessions, found.listeners) == (config().max_sessions, config().listeners)
    assert logs == [
        {
            "event": "settings_read",
            "log_level": "info",
            "changed": ["log-level", "drain"],
            "need_restart": ["listen", "max-sessions"],
        }
    ]


def test_invalid_settings_change_nothing() -> None:
    def read() -> Config:
        raise InvalidConfiguration("--drain x: expected seconds")

    current = config("--drain", "5")
    with capture_logs() as logs:
        assert reread(current, read, Config.LIVE) is current
    assert [(one["event"], one["log_level"]) for one in logs] == [("settings_kept", "error")]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


def test_a_daemon_takes_up_its_limits(daemon: Running) -> None:
    async def reload() -> None:
        daemon.daemon.reload(lambda: config("--session-ttl", "33", "--max-sequences", "1"))

    def ttl() -> int:
        return daemon.stub.OpenSession(pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB, pool_pages=2)).ttl.seconds

    assert ttl() == 10
    daemon.call(reload)
    assert ttl() == 33
    assert daemon.daemon.cache.limits.max_sequences == 1


# --- real services ----------------------------------------------------------------------------------------------------


def levels(service: Service, settings: Path, call: Callable[[Service], Any]) -> None:
    """The log level follows the file of a running service; a broken file does not, and ends nothing."""
    call(service)
    assert not service.events("rpc") and not service.events("settings_read")
    settings.write_text('log-level = "debug"\n')
    hangup(service)
    [first] = told(service, "settings_read", 1)
    assert (first["changed"], first["need_restart"]) == (["log-level"], [])
    call(service)
    told(service, "rpc", 1)
    settings.write_text("log-level = 5\n")
    hangup(service)
    [kept] = told(service, "settings_kept", 1)
    assert f"{settings}: log-level: is an integer" in kept["detail"]
    settings.write_text('log-level = "info"\nmax-connections = 5\n')
    hangup(service)
    [_, second] = told(service, "settings_read", 2)
    assert (second["changed"], second["need_restart"]) == (["log-level"], ["max-connections"])
    assert service.stop() == 0


def test_a_daemon_reads_its_file_again(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("")
    with kvcache(tmp_path, "--memory", "1MiB", "--config", str(settings)) as service:
        levels(service, settings, lambda one: KvCacheServiceStub(one.channel).GetStats(pb.GetStatsRequest()))


def test_an_engine_reads_its_file_again(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("")
    with engine(tmp_path, "local", "--config", str(settings), model=BUNDLED_MODEL) as service:
        levels(service, settings, lambda one: EngineServiceStub(one.channel).GetModel(engine_pb2.GetModelRequest()))


def test_certificates_are_read_again(tmp_path: Path) -> None:
    own, other = issued(tmp_path, "own"), issued(tmp_path, "other")
    with kvcache(tmp_path, "--listen", "127.0.0.1:0", "--memory", "1MiB", *own.serving()) as service:
        hangup(service)
        told(service, "certificates_read", 1)
        own.become(other)
        hangup(service)
        told(service, "certificates_read", 2)
        own.key.write_text("no key")
        hangup(service)
        [kept] = told(service, "certificates_kept", 1)
        assert str(own.key) in kept["detail"]
        assert service.stop() == 0
