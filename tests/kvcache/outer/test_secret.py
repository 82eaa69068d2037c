"""Files of secrets: read if they are this user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.errors import InvalidConfiguration
from services.kvcache.outer.secret import read_key, read_password

KEY = bytes(range(200, 232))


def written(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("data", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
def test_a_key_is_raw_or_hexadecimal(tmp_path: Path, data: bytes) -> None:
    assert read_key(written(tmp_path / "key", data), "--outer-key") == KEY


@pytest.mark.parametrize("data", [b"", KEY[:31], KEY + b"\n", KEY.hex().encode()[:-2], b"z" * 64, bytes(5000)])
def test_anything_else_is_no_key(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidConfiguration, match="--outer-key"):
        read_key(written(tmp_path / "key", data), "--outer-key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidConfiguration, match=f"{mode:04o}"):
        read_key(written(tmp_path / "key", KEY, mode), "--outer-key")


@pytest.mark.needs("other-users")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "key", KEY)
    os.chown(path, 12345, 12345)
    with pytest.raises(InvalidConfiguration, match="uid 12345"):
        read_key(path, "--outer-key")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "absent", "."):
        with pytest.raises(InvalidConfiguration, match="--outer-key"):
            read_key(tmp_path / name, "--outer-key")


def test_a_password_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "password"
    assert read_password(written(path, b"s e cret\n"), "--outer-password-file") == "s e cret"
    for data in (b"", b"\n", b"\xff\xfe"):
        with pytest.raises(InvalidConfiguration, match="--outer-password-file"):
            read_password(written(path, data), "--outer-password-file")
