"""docs/threats.md is held to the code: each promise names tests, and they are there."""

from __future__ import annotations

import re

import pytest

from tests.house.docs.test_lineage import ROOT, names

PAGE = ROOT / "docs" / "threats.md"


def faults(row: str) -> list[str]:
    """What is wrong with a row of the promises."""
    cells = [cell.strip() for cell in row.strip().strip("|").split(" | ")]
    if len(cells) != 3 or not all(cells):
        return [f"{len(cells)} cells, or an empty one: {row}"]
    tests = re.findall(r"`(tests/[^`:]+)::([^`]+)`", cells[2])
    if not tests:
        return [f"no test: {cells[1]}"]
    return [f"{path}::{name}" for path, name in tests if not (ROOT / path).exists() or name not in names(path)]


def promises() -> list[str]:
    section = PAGE.read_text().split("## What is promised")[1].split("\n## ")[0]
    return re.findall(r"^\| (?!to \||-).*$", section.replace("|---", "|-"), re.MULTILINE)


def test_each_promise_names_its_tests() -> None:
    rows = [row for row in promises() if not row.startswith("|-")]
    assert len(rows) >= 10
    assert [fault for row in rows for fault in faults(row)] == []


@pytest.mark.parametrize(
    "row",
    [
        "| all | Nobody gets in. | |",
        "| all | Nobody gets in. | `tests/house/docs/test_threats.py` |",
        "| all | Nobody gets in. | `tests/house/docs/test_threats.py::test_no_such` |",
        "| all | Nobody gets in. | `tests/house/no_such_file.py::test_it` |",
    ],
)
def test_a_promise_without_a_test_is_found(row: str) -> None:
    assert faults(row)
