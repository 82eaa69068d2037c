"""What other users have put where the services look is refused, and left as it is."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rocmforge.client.arena.announced import Announced
from rocmforge.client.arena.host import map_pages
from services.common.errors import AttachMismatch, InvalidConfiguration
from services.engine import cli
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import PageLayout
from services.kvcache.arena.host import prepare_directory
from tests.kvcache.conftest import Running
from tests.strangers import UID, commons, give_away, stranger

GEOMETRY = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="f32")
pytestmark = pytest.mark.needs("other-users")


@pytest.fixture
def shared() -> Iterator[Path]:
    with commons() as path:
        yield path


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


def source_of(daemon: Running, owner: int | None = None) -> GrpcPageSource:
    return GrpcPageSource(daemon.config.listeners[0].__str__(), "pool", GEOMETRY, pool_pages=4, owner=owner)


def test_no_service_listens_in_a_directory_that_a_stranger_made_first(shared: Path) -> None:
    stranger(f"mkdir -m 755 {shared}/rocmforge-0")
    with pytest.raises(InvalidConfiguration, match=f"^--listen {shared}/rocmforge-0: .* belongs to uid {UID}"):
        Running(shared / "rocmforge-0", "--arena-dir", str(shared / "arena"))
    with pytest.raises(InvalidConfiguration, match=f"^--arena-dir {shared}/rocmforge-0: .* belongs to uid {UID}"):
        prepare_directory(shared / "rocmforge-0")
    with pytest.raises(InvalidConfiguration, match=f"^--listen {shared}: .* has mode 1777"):
        Running(shared, "--arena-dir", str(shared / "arena"))
    assert [path.name for path in shared.iterdir() if path.name != "arena"] == ["rocmforge-0"]


@pytest.mark.parametrize("kind", ["socket", "link"])
def test_a_strangers_socket_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "k.sock"
    if kind == "link":
        path.symlink_to("elsewhere")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    give_away(path)
    before = path.lstat()
    with pytest.raises(InvalidConfiguration, match=f"^--listen unix:{path}: .*(not a socket|a socket of uid {UID})"):
        Running(tmp_path)
    assert (path.lstat().st_ino, path.lstat().st_uid) == (before.st_ino, UID)


def test_only_arenas_of_ones_own_are_removed(tmp_path: Path) -> None:
    for name in ("stale", "theirs"):
        (tmp_path / f"{name}.arena").touch(0o600)
    give_away(tmp_path / "theirs.arena")
    (tmp_path / "victim").touch()
    (tmp_path / "link.arena").symlink_to("victim")
    os.mkfifo(tmp_path / "pipe.arena")
    with (tmp_path / "live.arena").open("w") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        assert prepare_directory(tmp_path) == ["stale.arena"]
    left = ["link.arena", "live.arena", "pipe.arena", "theirs.arena", "victim"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_an_engine_does_not_connect_to_a_strangers_socket(daemon: Running, tmp_path: Path) -> None:
    give_away(tmp_path / "k.sock")
    source = source_of(daemon)
    with pytest.raises(InvalidConfiguration, match=f"^--kvcache unix:{tmp_path}/k.sock: belongs to uid {UID}"):
        source.reopen()
    assert not source.calls.handled
    source.close()
    told = source_of(daemon, owner=UID)
    told.reopen()
    assert isinstance(told.memory, np.ndarray)
    told.close()


def test_an_engine_does_not_connect_in_a_directory_of_others(daemon: Running, tmp_path: Path) -> None:
    source = source_of(daemon)
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidConfiguration, match=f"^--kvcache {tmp_path}: other users could replace"):
        source.reopen()
    assert not source.calls.handled
    tmp_path.chmod(0o700)
    source.close()


def test_an_engine_does_not_map_a_strangers_file(tmp_path: Path) -> None:
    path, size = tmp_path / "a.arena", 4096
    path.write_bytes(bytes(size))
    give_away(path)
    announced = Announced(total_pages=1, page_bytes=2 * 2 * 4 * 2 * 4, size_bytes=size, canary_offset=1024)
    with pytest.raises(AttachMismatch, match=f"belongs to uid {UID}"):
        map_pages(path, GEOMETRY, announced)
    assert path.read_bytes() == bytes(size)  # no canary answered in it
    map_pages(path, GEOMETRY, announced, owner=UID)


def test_a_client_does_not_send_its_prompt_to_whoever_took_the_default_socket(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger(f"mkdir -m 755 {shared}/rocmforge; touch {shared}/rocmforge/engine.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    for command in (["status"], ["generate", "secret"], ["models"], ["submit", "secret"]):
        assert cli.run(command[0], command[1:]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"rocmforge {command[0]}: ") and f"{shared}/rocmforge belongs to uid {UID}" in told
