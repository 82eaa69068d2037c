"""docs/guarantees.md is held to the tests: each promise names some, and they are there."""

from __future__ import annotations

import re

import pytest

from tests.house.docs.test_lineage import ROOT, names

PAGE = ROOT / "docs" / "guarantees.md"
HEAD = ["promise", "held by", "cost"]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


def rows() -> list[str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [line for line in lines if cells(line) != HEAD and set(line) != {"|", "-"}]


def faults(row: str) -> list[str]:
    """What is wrong with a row."""
    found = cells(row)
    if len(found) != 3 or not all(found):
        return [f"{found[0]}: {len(found)} cells, or an empty one"]
    promise, held, _ = found
    tests = re.findall(r"`([^`]+)`", held)
    wrong = [] if tests else [f"{promise}: names no test"]
    for test in tests:
        path, _, name = test.partition("::")
        if not path.startswith("tests/") or not (ROOT / path).is_file():
            wrong.append(f"{promise}: there is no file of tests {path}")
        elif not name.lower().startswith("test") or name not in names(path):
            wrong.append(f"{promise}: {path} has no test {name}")
    return wrong


def test_every_promise_has_a_test_that_is_there() -> None:
    assert len(rows()) > 30
    assert [fault for row in rows() for fault in faults(row)] == []


def test_no_promise_is_made_twice() -> None:
    promises = [cells(row)[0] for row in rows()]
    assert len(promises) == len(set(promises))


GOOD = "| A promise | `tests/house/docs/test_guarantees.py::test_each_fault` | none |"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" | none", "", "2 cells"),
        ("none", "", "an empty one"),
        ("`tests/house/docs/test_guarantees.py::test_each_fault`", "some", "names no test"),
        ("::test_each_fault", "::test_every_fault", "no test test_every_fault"),
        ("::test_each_fault", "::faults", "no test faults"),
        ("::test_each_fault", "", "has no test"),
        ("test_guarantees.py", "test_promises.py", "no file of tests tests/house/docs/test_promises.py"),
        ("tests/house/docs/test_guarantees.py", "Makefile", "no file of tests Makefile"),
    ],
)
def test_each_fault(old: str, new: str, words: str) -> None:
    assert faults(GOOD) == []
    assert old in GOOD
    [fault] = faults(GOOD.replace(old, new))
    assert words in fault
