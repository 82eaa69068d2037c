"""Folders of a dozen files and files of one noun, in the whole project, tests and benchmarks too."""

from __future__ import annotations

import pytest

from tests.house.rooms import (
    COMMANDS,
    MEASURED,
    MOST_LINES,
    MOST_LINES_OF_TESTS,
    Plan,
    crowded,
    lengths,
    plan,
    too_long,
)
from tests.house.test_imports import CLIENT, ROOT, read

PAGE = (ROOT / "docs/structures.md").read_text(encoding="utf-8")
ROW = "| `services/a.py` | 400 | one table |\n"


def test_no_folder_is_crowded() -> None:
    assert crowded(list(lengths())) == []


def test_no_file_is_longer_than_it_may_be() -> None:
    assert too_long(lengths(), PAGE) == []


def test_where_commands_lie_every_file_is_one() -> None:
    """What benchmarks share has a folder of its own, so that one sees what can be run."""
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert "def main(" in path.read_text(encoding="utf-8"), path
    assert all((ROOT / folder).is_dir() for folder in COMMANDS)


def test_the_plan_of_each_part_can_be_drawn() -> None:
    modules = {**read("services"), **read("kernels"), **read(CLIENT)}
    for top in MEASURED:
        found = plan(modules, top)
        assert found.rooms > 1 and found.arrows >= found.floors - 1, top


@pytest.mark.parametrize(
    ("lines", "page", "words"),
    [
        ({"services/a.py": MOST_LINES + 1}, "", "at most 320"),
        ({"tests/test_a.py": MOST_LINES_OF_TESTS + 1}, "", "at most 500"),
        ({"services/a.py": 401}, ROW, "at most 400"),
        ({"services/a.py": MOST_LINES}, ROW, "need no row"),
        ({}, ROW, "is not there"),
        ({"services/a.py": 400}, ROW.replace("one table", ""), "without a reason"),
    ],
)
def test_each_fault_of_a_length_is_found(lines: dict[str, int], page: str, words: str) -> None:
    [fault] = too_long(lines, page)
    assert words in fault


def test_lengths_that_are_allowed_are_no_fault() -> None:
    allowed = {"services/a.py": 400, "services/b.py": MOST_LINES, "tests/test_a.py": MOST_LINES_OF_TESTS}
    assert too_long(allowed, ROW) == []


def test_a_thirteenth_file_is_found_and_a_conftest_is_none() -> None:
    folder = [*(f"tests/a/test_{at}.py" for at in range(12)), "tests/a/conftest.py", "tests/a/__init__.py"]
    assert crowded(folder) == []
    assert crowded([*folder, "tests/a/b.py"]) == ["tests/a has 13 files: at most 12"]


def test_the_plan_of_a_house_that_is_known() -> None:
    modules = {
        "a.top": {"a.left.one", "a.right"},
        "a.left.one": {"a.left.two", "a.ground", "b.c"},
        "a.left.two": set(),
        "a.right": {"a.ground"},
        "a.ground": set[str](),
        "b.c": {"a.top"},
    }
    assert plan(modules, "a") == Plan(rooms=4, arrows=4, floors=3)
    with pytest.raises(ValueError, match="circle"):
        plan({"a.b": {"a.c"}, "a.c": {"a.b"}}, "a")
