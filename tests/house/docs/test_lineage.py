"""docs/lineage.md is held to the code: every id once, every path, symbol and test there."""

from __future__ import annotations

import ast
import collections
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "lineage.md"

IDS = [
    *(f"K{number:02}" for number in range(1, 37)),
    *(f"BUG-KV-{number:03}" for number in range(1, 14)),
    *("FIX-5", "FIX-9", "FIX-10", "MODEL-2"),
]


@functools.cache
def names(path: str) -> set[str]:
    """What a Python file defines: its functions, classes and variables, methods as ``Class.method``."""
    found: set[str] = set()
    todo: list[tuple[str, ast.stmt]] = [("", node) for node in ast.parse((ROOT / path).read_text()).body]
    for prefix, node in todo:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            todo += [(f"{prefix}{node.name}.", member) for member in node.body]
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))
    return found


def has(path: str, symbol: str) -> bool:
    """Whether a file that exists has a symbol: a definition of Python or of a proto, a word of anything else."""
    if path.endswith(".py"):
        return symbol in names(path)
    kinds = r"(?:service|rpc|message|enum)\s+" if path.endswith(".proto") else ""
    return re.search(rf"\b{kinds}{re.escape(symbol)}\b", (ROOT / path).read_text()) is not None


def faults(row: str) -> list[str]:
    """What is wrong with a row of the table."""
    cells = [cell.strip() for cell in row.strip().strip("|").split(" | ")]
    if len(cells) != 5 or not all(cells):
        return [f"{cells[0]}: {len(cells)} cells, or an empty one"]
    first, _, where, held, _ = cells
    wrong = []
    for cell, mark, what in ((where, "#", "place"), (held, "::", "test")):
        references = re.findall(r"`([^`]+)`", cell)
        if not references:
            wrong.append(f"{first}: names no {what}")
        for reference in references:
            path, found, symbol = reference.partition(mark)
            if not found or (mark == "::" and not path.startswith("tests/")):
                wrong.append(f"{first}: {reference} is no {what}")
            elif not (ROOT / path).is_file():
                wrong.append(f"{first}: there is no {path}")
            elif not has(path, symbol) or (mark == "::" and not symbol.lower().startswith("test")):
                wrong.append(f"{first}: {path} has no {what} {symbol}")
    return wrong


def rows() -> list[str]:
    return re.findall(r"^\| (?:K\d|BUG|FIX|MODEL).*\|$", PAGE.read_text(), re.MULTILINE)


def test_every_id_is_there_once() -> None:
    counted = collections.Counter(row.split()[1] for row in rows())
    assert counted == collections.Counter(IDS)


def test_every_place_and_test_is_there() -> None:
    assert [fault for row in rows() for fault in faults(row)] == []


GOOD = (
    "| K01 a | b | `services/common/errors.py#ModelInvalid` "
    "| `tests/house/docs/test_lineage.py::test_each_fault` | why |"
)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("why", "", "an empty one"),
        ("| b ", "", "4 cells"),
        ("`services/common/errors.py#ModelInvalid`", "nowhere", "names no place"),
        ("`tests/house/docs/test_lineage.py::test_each_fault`", "none", "names no test"),
        ("#ModelInvalid", "#ModelInval", "no place ModelInval"),
        ("#ModelInvalid", "", "is no place"),
        ("errors.py#ModelInvalid", "faults.py#ModelInvalid", "no services/common/faults.py"),
        (
            "services/common/errors.py#ModelInvalid",
            "protos/rocmforge/engine/v1/engine.proto#Generates",
            "no place Generates",
        ),
        ("::test_each_fault", "::test_each", "no test test_each"),
        ("::test_each_fault", "::faults", "no test faults"),
        ("tests/house/docs/test_lineage.py", "services/common/errors.py", "is no test"),
    ],
)
def test_each_fault(old: str, new: str, words: str) -> None:
    assert faults(GOOD) == []
    assert old in GOOD
    [fault] = faults(GOOD.replace(old, new))
    assert words in fault
