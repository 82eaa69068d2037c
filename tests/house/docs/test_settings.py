"""A setting is declared once, and that is all it takes: its flag, variable, key in a file, help and row in a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.common import settings
from services.common.errors import InvalidConfiguration
from services.common.settings import Program, declared, setting, table
from services.common.values import Kind, byte_size, one_of, seconds, share, switch, whole
from services.engine import config as engine
from services.kvcache import config as kvcache

PROGRAM = Program("a-program", "What it does.", "A_PROGRAM")
SERVICES = pytest.mark.parametrize("service", [engine, kvcache], ids=["engine", "kvcache"])


def _default() -> str:
    return "12KiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What several have."""

    few_words: list[str] = setting(one_of("a", "b"), ["a"], "some words", name="word", many=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Base):
    """One of each kind."""

    size: int = setting(byte_size, _default, "how large, at most 100%")
    time_s: float = setting(seconds(0, 60), 1.5, "how long", name="time", metavar="S")
    many_things: int | None = setting(whole(1, 9), None, "how many; default: all")
    part: float = setting(share, 0.5, "which part")
    quick: bool = setting(switch, False, "whether to hurry")
    derived: str = ""

    @classmethod
    def read(cls, *arguments: str, **environ: str) -> Config:
        return cls(**settings.read(cls, PROGRAM, list(arguments), environ).fields)


def test_a_declaration_is_read_from_all_four_places(tmp_path: Path) -> None:
    default = Config(few_words=["a"], size=12 << 10, time_s=1.5, many_things=None, part=0.5, quick=False)
    assert Config.read() == default
    flags = ["--word", "b", "--word", "a", "--size", "1KiB", "--time", "2", "--many-things", "3", "--part", "1"]
    other = Config(few_words=["b", "a"], size=1024, time_s=2.0, many_things=3, part=1.0, quick=True)
    assert Config.read(*flags, "--quick") == other
    variables = {"WORD": "b,a", "SIZE": "1KiB", "TIME": "2", "MANY_THINGS": "3", "PART": "1", "QUICK": "yes"}
    assert Config.read(**{f"A_PROGRAM_{name}": text for name, text in variables.items()}) == other
    file = tmp_path / "settings.toml"
    file.write_text('word = ["b", "a"]\nsize = "1KiB"\ntime = 2\nmany-things = 3\npart = 1\nquick = true')
    assert Config.read("--config", str(file)) == other
    assert Config.read("--config", str(file), "--part", "0.25", A_PROGRAM_PART="0.75", A_PROGRAM_TIME="3").part == 0.25


def test_a_field_that_is_no_setting_is_none() -> None:
    assert [one.name for one in declared(Config)] == ["word", "size", "time", "many-things", "part", "quick"]
    with pytest.raises(InvalidConfiguration, match="A_PROGRAM_DERIVED: no such setting"):
        Config.read(A_PROGRAM_DERIVED="x")


def test_a_table_says_all_of_it() -> None:
    rows = {row.name: row for row in table(Config, PROGRAM)}
    assert rows["many-things"].variable == "A_PROGRAM_MANY_THINGS" and rows["many-things"].flag == "--many-things"
    assert [(row.type, row.default) for row in rows.values()] == [
        ("a or b; repeatable", "a"),
        ("size", "12KiB"),
        ("seconds, 0 to 60", "1.5"),
        ("integer, 1 to 9", ""),
        ("number, 0 to 1", "0.5"),
        ("switch", ""),
    ]
    assert rows["size"].help == "how large, at most 100%"


@SERVICES
def test_help_and_table_have_the_same_settings(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        service.Config.read(["--help"], {})
    told = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    rows = table(service.Config, service.PROGRAM)
    assert told == ["--version", "--config", *(row.flag for row in rows)]
    assert len({row.name for row in rows}) == len(rows) > 15
    assert all(row.help and row.type and row.variable.startswith(service.PROGRAM.prefix) for row in rows)


@SERVICES
def test_a_default_in_the_table_is_one_that_can_be_set(service: Any) -> None:
    def fields(environ: Mapping[str, str]) -> dict[str, Any]:
        return settings.read(service.Config, service.PROGRAM, [], environ).fields

    rows = table(service.Config, service.PROGRAM)
    said = {row.variable: row.default.replace(", ", ",") for row in rows if row.default}
    assert fields(said) == fields({})


@SERVICES
def test_every_setting_is_told_in_a_log_event(service: Any) -> None:
    echo = service.Config.read([], {}).echo
    assert list(echo["settings"]) == [row.name for row in table(service.Config, service.PROGRAM)]


def test_kinds_say_what_they_want() -> None:
    assert Kind(str, "text").types == (str,)
    with pytest.raises(ValueError, match="expected a number from 0 to 1"):
        share("nan")
