"""What some tests need and a machine may lack: a compiler, git, grpcurl, a model. scripts/tools.txt lists them.

A test says ``@pytest.mark.needs("g++")``, or, where that hangs on something else, calls `need`. Without the tool it is
skipped, and the run ends with the line of `told`: how much was not shown, and what to install. In CI such a skip fails
the run (tests/conftest.py).
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "scripts" / "tools.txt"
#: How the reason of each such skip begins.
NEEDS = "needs "


@dataclass(frozen=True, slots=True)
class Tool:
    """A row: it is found as a ``kind`` of that ``place``, and ``way`` (apt, go, make) installs it from ``source``."""

    name: str
    kind: str
    place: str
    way: str
    source: str

    def find(self) -> str | None:
        """Where it is, or None."""
        if self.kind == "program":
            named = os.environ.get("CXX") if self.name == "g++" else None
            return shutil.which(named or self.place, path=f"{ROOT}/build/bin:{os.environ.get('PATH', '')}")
        if self.kind == "uid":
            return self.place if os.geteuid() == int(self.place) else None
        if self.kind == "module":
            return self.place if importlib.util.find_spec(self.place) else None
        return next(glob.iglob(str(ROOT / self.place)), None)


def parsed(text: str) -> dict[str, Tool]:
    """The tools of a table, by name. Raises ValueError for a row that is none."""
    tools = {}
    for row in text.splitlines():
        if not row.strip() or row.startswith("#"):
            continue
        try:
            name, found, installed = (column.strip() for column in row.split("|"))
            (kind, place), (way, source) = found.split(), installed.split()[:2]
        except ValueError:
            raise ValueError(f"not `name | kind place | way source ...`: {row}") from None
        if kind not in ("program", "module", "file", "uid") or way not in ("apt", "go", "make", "run") or name in tools:
            raise ValueError(f"an unknown way to find or to install it, or its second row: {row}")
        tools[name] = Tool(name, kind, place, way, source)
    return tools


TOOLS = parsed(TABLE.read_text(encoding="utf-8"))


def path_of(name: str) -> str:
    """Where a tool is; skips the test when it is not there."""
    need(name)
    return str(TOOLS[name].find())


def lacking(names: Iterable[str]) -> list[str]:
    """Which of the tools are not there. Raises KeyError for one that the table does not have."""
    return [name for name in names if TOOLS[name].find() is None]


def need(*names: str) -> None:
    """Skip the test unless all of the tools are there."""
    if absent := lacking(names):
        pytest.skip(NEEDS + ", ".join(absent))


def told(reasons: Iterable[str]) -> str | None:
    """One line for the end of a run: what these skips did not show, and what would; None if there are none."""
    wanted = [reason.removeprefix(NEEDS).split(", ") for reason in reasons if reason.startswith(NEEDS)]
    if not wanted:
        return None
    absent = [tool for tool in TOOLS.values() if any(tool.name in names for names in wanted)]
    ways = {tool.way for tool in absent}
    packages = {tool.source for tool in absent if tool.way == "apt"}
    if "go" in ways and lacking(["go"]):
        packages.add(TOOLS["go"].source)
    steps = [f"apt install {' '.join(sorted(packages))}"] if packages else []
    steps += ["make tools"] if ways - {"apt", "run"} else []
    steps += sorted({f"run them as {tool.source}" for tool in absent if tool.way == "run"})
    names = ", ".join(tool.name for tool in absent)
    tests = "1 test" if len(wanted) == 1 else f"{len(wanted)} tests"
    return (
        f"not shown, without {names}: {tests}. To show: {' && '.join(steps)} (as root, make test INSTALL=1 does it all)"
    )
