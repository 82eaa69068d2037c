"""Settings from flags, the environment and a file: which one counts, and what is wrong with a bad one."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidConfiguration
from services.common.settings import MAX_FILE_BYTES as MAX_BYTES
from services.kvcache.arena.room import Room
from services.kvcache.cache.limits import Limits
from services.kvcache.config import Config
from tests.processes import ROOT, kvcache

LISTEN = ["--listen", "unix:/run/k.sock"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "k.toml"


def read(file: Path, text: str, *flags: str, **environ: str) -> Config:
    file.write_text(text)
    return Config.read([*LISTEN, "--config", str(file), *flags], environ)


def test_defaults_are_those_of_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "of", lambda directory: None)  # how much this machine holds is not the test's
    limits = Config.read(LISTEN, {}).limits
    expected = Limits(budget_bytes=256 * 2**20, sequence_ttl_s=3600.0)
    assert limits == expected, "but for the budget, which has none, and leaked sequences, which the daemon ends"
    assert [field.name for field in dataclasses.fields(Limits) if field.default is dataclasses.MISSING] == [
        "budget_bytes"
    ]


def test_a_file_sets_what_flags_set(file: Path) -> None:
    config = read(
        file,
        """
        # Everything that has a type of its own.
        arena-dir = "/dev/shm/elsewhere"
        memory = "1.5GiB"
        pool-pages = 100
        session-ttl = 20
        drain = 2.5
        eviction = "density"
        insecure = true
        listen = ["unix:/run/other.sock"]
        """,
    )
    assert config.arena_dir == Path("/dev/shm/elsewhere") and config.insecure
    limits = config.limits
    assert (limits.budget_bytes, limits.pool_pages) == (3 * 2**29, 100)
    assert (limits.default_ttl_s, limits.drain_s, limits.eviction) == (20.0, 2.5, "density")
    assert limits.max_sessions == 256, "what it does not set keeps its default"


def test_the_documented_example_is_one(file: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "daemon.md").read_text(), re.DOTALL)
    file.write_text(example)
    config = Config.read(["--config", str(file)], {})
    assert (config.limits.budget_bytes, config.limits.default_ttl_s) == (4 * 2**30, 20.0)
    assert len(config.listeners) == 2 and not config.insecure


def test_a_size_may_be_a_number(file: Path) -> None:
    assert read(file, "memory = 1_048_576").limits.budget_bytes == 2**20


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(file: Path) -> None:
    text = 'max-sessions = 1\nmax-sequences = 1\ndrain = 1\nlisten = ["unix:/run/file.sock"]\ninsecure = true'
    config = read(
        file,
        text,
        "--max-sessions",
        "3",
        ROCMFORGE_KVCACHE_MAX_SESSIONS="2",
        ROCMFORGE_KVCACHE_MAX_SEQUENCES="2",
        ROCMFORGE_KVCACHE_INSECURE="no",
    )
    limits = config.limits
    assert (limits.max_sessions, limits.max_sequences, limits.drain_s, limits.event_ring) == (3, 2, 1.0, 65536)
    assert [str(listener) for listener in config.listeners] == ["unix:/run/k.sock"], "a list is replaced, not added to"
    assert not config.insecure
    assert config.echo["origins"] == {
        "listen": "flag",
        "max-sessions": "flag",
        "max-sequences": "environment",
        "insecure": "environment",
        "drain": "file",
    }


def test_the_environment_may_name_the_file_and_a_flag_another(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("drain = 2")
    file.write_text("drain = 1\nmax-sessions = 7")
    environ = {"ROCMFORGE_KVCACHE_CONFIG": str(file)}
    assert Config.read(LISTEN, environ).limits.drain_s == 1.0
    limits = Config.read([*LISTEN, "--config", str(other)], environ).limits
    assert (limits.drain_s, limits.max_sessions) == (2.0, 256), "one file, not two"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-sesions = 8", "FILE: max-sesions: no such setting; see --help"),
        ("max_sessions = 8", "FILE: max_sessions: no such setting; did you mean max-sessions"),
        ('"--drain" = 8', "FILE: --drain: no such setting; did you mean drain"),
        ('config = "other.toml"', "FILE: config: no such setting; see --help"),
        ("[kvcache]\ndrain = 1", "FILE: kvcache: no such setting; see --help"),
        ("[drain]\nseconds = 1", "FILE: drain: is a table; expected an integer or a float"),
        ("memory = true", "FILE: memory: is a boolean; expected a string or an integer"),
        ("memory = 1.5", "FILE: memory: is a float; expected a string or an integer"),
        ("memory = [1]", "FILE: memory: is an array; expected a string or an integer"),
        ("max-sessions = true", "FILE: max-sessions: is a boolean; expected an integer"),
        ('max-sessions = "8"', "FILE: max-sessions: is a string; expected an integer"),
        ("drain = 07:32:00", "FILE: drain: is a date or a time; expected an integer or a float"),
        ("arena-dir = 5", "FILE: arena-dir: is an integer; expected a string"),
        ("insecure = 1", "FILE: insecure: is an integer; expected a boolean"),
        ('insecure = "true"', "FILE: insecure: is a string; expected a boolean"),
        ('listen = "unix:/run/k.sock"', "FILE: listen: is a string; expected an array, each entry a string"),
        ("listen = [50052]", "FILE: listen: has an integer; expected a string"),
        ('memory = "12 parsecs"', "FILE: memory 12 parsecs: expected a size such as"),
        ("memory = 0", "FILE: memory 0: expected a size .* from 1 to"),
        ("memory = -5", "FILE: memory -5: expected a size"),
        ("max-sessions = 0", "FILE: max-sessions 0: expected an integer from 1 to 65536"),
        ("drain = -0.5", "FILE: drain -0.5: expected seconds from 0 to 3600"),
        ("drain = nan", "FILE: drain nan: expected seconds from 0 to 3600"),
        ("session-ttl = inf", "FILE: session-ttl inf: expected seconds from 1 to 600"),
        ('eviction = "fifo"', "FILE: eviction fifo: expected"),
        ('listen = ["nonsense"]', "FILE: listen nonsense: expected unix:/path or host:port"),
        ('arena-dir = ""', "FILE: arena-dir : expected a directory"),
        ("drain = 1\ndrain 2", r"--config FILE: not valid TOML: .*\(at line 2, column 7\)"),
        ("drain = 1\ndrain = 2\n", r"--config FILE: not valid TOML: .*\(at line 2, column 10\)"),
        ("drain =", r"--config FILE: not valid TOML: .*\(at end of document\)"),
        (f"drain = {'9' * 5000}", "--config FILE: not valid TOML: .*4300 digits"),
        (f"drain = {'[' * 30000}", "--config FILE: not valid TOML: "),
        ("# " + "x" * MAX_BYTES, f"--config FILE: too large; the limit is {MAX_BYTES} bytes"),
    ],
)
def test_a_bad_file_is_named_with_its_key_and_what_is_wanted(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    flags = ["--config", str(file)]
    if "listen" not in text:
        flags += LISTEN
    with pytest.raises(InvalidConfiguration, match="^" + words.replace("FILE", re.escape(str(file)))):
        Config.read(flags, {})


def test_a_bad_value_that_is_beaten_still_has_to_be_a_setting_and_nothing_else(file: Path) -> None:
    assert read(file, 'drain = "soon"', "--drain", "1").limits.drain_s == 1.0
    with pytest.raises(InvalidConfiguration, match="no such setting"):
        read(file, "drian = 1", "--drain", "1")


def test_a_file_as_large_as_it_may_be_is_read(file: Path) -> None:
    text = "drain = 1\n"
    assert read(file, text + "#" * (MAX_BYTES - len(text))).limits.drain_s == 1.0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("folder", "cannot be read: Is a directory"),
        (b"drain = 1\n\xff = 2", r"not valid UTF-8 \(at line 2\)"),
        (b"\x00", "not valid TOML: "),
    ],
)
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_file_that_cannot_be_read_is_named_with_who_named_it(
    file: Path, content: Any, words: str, by_flag: bool
) -> None:
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    flags, environ, origin = ["--config", str(file)], {}, "--config"
    if not by_flag:
        flags, environ, origin = [], {"ROCMFORGE_KVCACHE_CONFIG": str(file)}, "ROCMFORGE_KVCACHE_CONFIG"
    with pytest.raises(InvalidConfiguration, match=f"^{origin} {re.escape(str(file))}: {words}") as caught:
        Config.read([*LISTEN, *flags], environ)
    assert caught.value.field == origin


@pytest.mark.parametrize(
    ("name", "words"), [("", "expected the path of a file"), ("a\0b", "cannot be read: .*null byte")]
)
def test_a_name_that_no_file_has(name: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^--config.*: {words}"):
        Config.read(["--config", name], {})


def test_flags_have_to_be_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Config.read(["--mem", "1GiB"], {})
    assert caught.value.code == 2 and "unrecognized arguments: --mem" in capsys.readouterr().err


def test_the_help_tells_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        Config.read(["--help"], {})
    told = capsys.readouterr().out
    assert "--config FILE" in told and "some-flag = 8" in told


def test_the_start_event_echoes_every_setting_and_who_set_it(tmp_path: Path, file: Path) -> None:
    file.write_text('memory = "1MiB"\nmax-sessions = 3')
    with kvcache(tmp_path, "--config", str(file), "--max-sessions", "4") as daemon:
        started = daemon.started()
    assert started["config"] == str(file)
    assert started["origins"] == {
        "arena-dir": "flag",
        "listen": "flag",
        "max-sessions": "flag",
        "memory": "file",
    }
    settings = started["settings"]
    assert (settings["memory"], settings["max-sessions"], settings["drain"]) == (2**20, 4, 30.0)
    assert settings["listen"] == [f"unix:{tmp_path}/kvcache.sock"] and settings["tls-cert"] is None
    json.dumps(Config.read(LISTEN, {}).echo, allow_nan=False)
    told = subprocess.run(
        [sys.executable, "-m", "services.kvcache", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    assert set(re.findall(r"^  --([a-z-]+)", told, re.MULTILINE)) - {"config", "version"} == set(settings)


def test_a_bad_file_ends_the_daemon_with_one_sentence_and_status_2(file: Path) -> None:
    file.write_text("drain = 1\nmemory = oops")
    done = subprocess.run(
        [sys.executable, "-m", "services.kvcache", "--config", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == f"rocmforge kvcache: --config {file}: not valid TOML: Invalid value (at line 2, column 10)\n"
