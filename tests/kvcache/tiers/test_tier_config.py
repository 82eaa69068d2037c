"""The settings of the tiers: what goes together, and what is wrong with what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import InvalidConfiguration
from services.kvcache import tier_config
from services.kvcache.config import Config

LISTEN = ["--listen", "unix:/run/k.sock"]
OUTER = ["--outer", "valkey://127.0.0.1:6379"]


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    return str(path)


def read(*flags: str) -> Config:
    return Config.read([*LISTEN, *flags], {})


def test_without_settings_there_are_no_tiers() -> None:
    config = read()
    assert not config.has_tiers and config.outer_tier is None


def test_all_of_them(key: str, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    config = read(
        *("--host-cache", "1GiB", "--outer", "valkeys://me@one:1,two", "--outer-key", key, "--outer-ttl", "60"),
        *("--outer-password-file", str(password), "--outer-ca", "ca.pem", "--tier-admission", "all"),
        *("--tier-queue", "7", "--tier-prefill-speed", "100"),
    )
    settings, outer = config.read_tier_settings(), config.outer_tier
    assert config.has_tiers and outer is not None
    assert (settings.host_bytes, settings.outer, settings.admits_all) == (1 << 30, True, True)
    assert (settings.queue, settings.prefill_tokens_per_s, len(settings.key)) == (7, 100.0, 32)
    assert settings.key != bytes.fromhex("ab" * 32), "values and digests have keys of their own"
    assert (outer.addresses, outer.cluster, outer.tls, outer.username) == (
        (("one", 1), ("two", 6379)),
        True,
        True,
        "me",
    )
    assert (outer.ttl_seconds, outer.key_file, outer.password_file) == (60, key, str(password))
    assert Path(outer.ca_file).is_absolute()


def test_plaintext_has_no_key() -> None:
    config = read(*OUTER, "--outer-plaintext")
    assert config.outer_tier is not None and config.outer_tier.key_file == ""
    assert config.read_tier_settings().key == b""


@pytest.mark.parametrize(
    ("flags", "field", "words"),
    [
        (OUTER, "--outer-key", "either --outer-key FILE, .* or --outer-plaintext"),
        ([*OUTER, "--outer-plaintext", "--outer-key", "KEY"], "--outer-key", "either"),
        (["--outer-key", "KEY"], "--outer-key", "needs --outer"),
        (["--outer-plaintext"], "--outer-plaintext", "needs --outer"),
        (["--outer-ca", "x"], "--outer-ca", "needs --outer"),
        ([*OUTER, "--outer-plaintext", "--outer-ca", "x"], "--outer-ca", "valkeys://"),
        ([*OUTER, "--outer-key", "NOWHERE"], "--outer-key", "No such file"),
        ([*OUTER, "--outer-plaintext", "--outer-password-file", "NOWHERE"], "--outer-password-file", "No such file"),
        (["--outer", "http://host"], "--outer", "expected valkey://"),
        (["--outer", "valkey://"], "--outer", "expected host:port"),
        (["--outer", "valkey://u:p@host"], "--outer", "--outer-password-file"),
        (["--outer", "valkey://host:port"], "--outer", "[Pp]ort"),
        (["--host-cache", "many"], "--host-cache", "expected a size"),
        (["--tier-admission", "some"], "--tier-admission", "returned"),
        (["--tier-queue", "0"], "--tier-queue", "1 to"),
    ],
)
def test_what_does_not_go_together(flags: list[str], field: str, words: str, key: str, tmp_path: Path) -> None:
    paths = {"KEY": key, "NOWHERE": str(tmp_path / "nowhere")}
    with pytest.raises(InvalidConfiguration, match=words) as failed:
        read(*(paths.get(flag, flag) for flag in flags))
    assert failed.value.field == field


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_config, "missing_libraries", lambda: ["glide_sync"])
    with pytest.raises(InvalidConfiguration, match=r"glide_sync: pip install 'rocmforge\[tiers\]'"):
        read(*OUTER, "--outer-plaintext")
