"""Directories, sockets and files of other users are not trusted, whatever they are called."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocmforge.client.transport import paths
from rocmforge.client.transport.paths import check_directory, check_socket, open_file
from services.common.edge.paths import make_directory
from services.common.errors import InvalidConfiguration
from tests.strangers import UID, commons, give_away, stranger

FLAG = "--some-dir"


@pytest.fixture
def shared() -> Iterator[Path]:
    with commons() as path:
        yield path


def refused(path: Path, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{FLAG} {re.escape(str(path))}: .*{why}"):
        make_directory(path, FLAG, parents=True)


def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_directory(tmp_path / "a" / "b", FLAG, parents=True)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    make_directory(tmp_path / "a" / "b", FLAG)


def test_missing_directories_above_are_made_only_if_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="No such file"):
        make_directory(tmp_path / "a" / "b", FLAG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "accepted"), [(0o777, False), (0o770, False), (0o1777, False), (0o702, False), (0o755, True)]
)
def test_the_directory_itself_is_writable_by_its_user_alone(tmp_path: Path, mode: int, accepted: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    if accepted:
        make_directory(place, FLAG)
    else:
        refused(place, f"{place} has mode {mode:04o}")


@pytest.mark.parametrize(
    ("mode", "accepted"), [(0o777, False), (0o775, False), (0o1777, True), (0o1775, True), (0o755, True)]
)
def test_what_lies_above_may_be_sticky(tmp_path: Path, mode: int, accepted: bool) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    if accepted:
        make_directory(above / "a" / "b", FLAG, parents=True)
    else:
        refused(above / "a" / "b", f"{above} has mode {mode:04o}")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    refused(tmp_path / "file", "not a directory")


@pytest.mark.needs("other-users")
def test_a_name_that_a_stranger_took_first_is_refused(shared: Path) -> None:
    stranger(f"mkdir -m 755 {shared}/rocmforge-0")
    refused(shared / "rocmforge-0", f"{shared}/rocmforge-0 belongs to uid {UID}")
    refused(shared / "rocmforge-0" / "below", f"{shared}/rocmforge-0 belongs to uid {UID}")


@pytest.mark.needs("other-users")
def test_a_strangers_link_is_not_followed(shared: Path, tmp_path: Path) -> None:
    stranger(f"ln -s {tmp_path} {shared}/link; ln -s /nowhere {shared}/dangling")
    refused(shared / "link", f"{shared}/link belongs to uid {UID}")
    refused(shared / "link" / "below", f"{shared}/link belongs to uid {UID}")
    refused(shared / "dangling", f"{shared}/dangling belongs to uid {UID}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("other-users")
def test_a_strangers_link_behind_ones_own_is_not_followed_either(shared: Path, tmp_path: Path) -> None:
    stranger(f"ln -s {tmp_path} {shared}/theirs")
    (tmp_path / "mine").symlink_to(shared / "theirs")
    refused(tmp_path / "mine", f"{shared}/theirs belongs to uid {UID}")


def test_ones_own_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "to").symlink_to("real")
    (tmp_path / "again").symlink_to(tmp_path / "real" / ".." / "to")
    make_directory(tmp_path / "again", FLAG)
    (tmp_path / "real").chmod(0o777)
    refused(tmp_path / "again", f"{tmp_path}/real has mode 0777")
    (tmp_path / "round").symlink_to("round")
    refused(tmp_path / "round", "symbolic links")


def test_root_may_be_unmapped_in_a_user_namespace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths._unmapped_root() == () or os.geteuid() != 0
    (tmp_path / "map").write_text("         0       1000          1\n")
    (tmp_path / "overflow").write_text("65534\n")
    monkeypatch.setattr(paths, "_UID_MAP", tmp_path / "map")
    monkeypatch.setattr(paths, "_OVERFLOW_UID", tmp_path / "overflow")
    assert paths._unmapped_root() == (65534,)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def test_a_socket_says_whose_it_is(tmp_path: Path) -> None:
    assert check_socket(tmp_path / "s", FLAG) is None
    with listening(tmp_path / "s"):
        assert check_socket(tmp_path / "s", FLAG) == os.geteuid()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("s")
    for name in ("file", "link"):
        with pytest.raises(InvalidConfiguration, match=f"^{FLAG} unix:{tmp_path}/{name}: not a socket"):
            check_socket(tmp_path / name, FLAG)
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidConfiguration, match=f"{tmp_path} has mode 0777"):
        check_socket(tmp_path / "s", FLAG)


@pytest.mark.needs("other-users")
def test_a_strangers_socket_is_refused_unless_he_is_named(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        give_away(tmp_path / "s")
        with pytest.raises(InvalidConfiguration, match=f"unix:{tmp_path}/s: belongs to uid {UID}"):
            check_socket(tmp_path / "s", FLAG)
        assert check_socket(tmp_path / "s", FLAG, UID) == UID
        give_away(tmp_path)
        with pytest.raises(InvalidConfiguration, match=f"{tmp_path} belongs to uid {UID}"):
            check_directory(tmp_path, FLAG)
        assert check_socket(tmp_path / "s", FLAG, UID) == UID


@pytest.mark.needs("other-users")
def test_only_ones_own_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "own").touch(0o600)
    os.close(open_file(tmp_path / "own"))
    (tmp_path / "link").symlink_to("own")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "theirs").touch(0o666)
    give_away(tmp_path / "theirs")
    reasons = {"link": "symbolic", "pipe": "not a regular file", "theirs": f"belongs to uid {UID}", "none": "No such"}
    for name, why in reasons.items():
        with pytest.raises(OSError, match=why):
            open_file(tmp_path / name)
    os.close(open_file(tmp_path / "theirs", UID))
