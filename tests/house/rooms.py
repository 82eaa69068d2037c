"""``python -m tests.house.rooms``: rooms, arrows and floors of each part of the project; its largest folders and files.

A room is what lies directly in a service: a folder, or a file. There is an arrow from one to another if a module in the
first imports one in the second, and a floor for each room of the longest way along arrows.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from tests.house.test_imports import CLIENT, MOST_FILES, ROOT, ROOTS, Imports, read, room

#: Lines that a file may have without a row in docs/structures.md; the cases of one noun may be many.
MOST_LINES, MOST_LINES_OF_TESTS = 320, 500
#: Where the project's Python is, and where commands lie, a file for each.
TOPS = ("services", "kernels", CLIENT, "scripts", "benchmarks", "models", "examples", "tests")
COMMANDS = ("services/engine/cli", "benchmarks")
MEASURED = ("services.engine", "services.kvcache", "services.common", "kernels", "rocmforge.client")

_ROW = re.compile(r"^\| `(?P<path>[\w/]+\.py)` \| (?P<most>\d+) \| (?P<why>.*) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rooms there are, how many arrows between them, and on how many floors they lie."""

    rooms: int
    arrows: int
    floors: int


def lengths() -> dict[str, int]:
    """Lines of every Python file, by its path from the root; generated code apart."""
    found = {}
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")) and "__pycache__" not in path.parts:
                found[path.relative_to(ROOT).as_posix()] = len(path.read_text(encoding="utf-8").splitlines())
    return found


def folders(paths: list[str]) -> dict[str, int]:
    """Files in each folder, without what marks it as one."""
    counts: dict[str, int] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name not in ("__init__.py", "conftest.py"):
            counts[folder] = counts.get(folder, 0) + 1
    return counts


def crowded(paths: list[str]) -> list[str]:
    """Folders with more files than one finds one's way in."""
    return [
        f"{folder} has {count} files: at most {MOST_FILES}"
        for folder, count in folders(paths).items()
        if count > MOST_FILES and folder not in COMMANDS
    ]


def too_long(lines: dict[str, int], page: str) -> list[str]:
    """Files that are longer than they may be by the page, and what the page says of files that is not so."""
    rows = {row["path"]: row for row in _ROW.finditer(page)}
    wrong = [f"{path} is in the table and is not there" for path in rows if path not in lines]
    wrong += [f"{path} is in the table without a reason" for path, row in rows.items() if not row["why"].strip()]
    for path, count in lines.items():
        usual = MOST_LINES_OF_TESTS if path.startswith("tests/") else MOST_LINES
        most = int(rows[path]["most"]) if path in rows else usual
        if count > most:
            wrong.append(f"{path} has {count} lines: at most {most}. Is it two nouns?")
        elif path in rows and count <= usual:
            wrong.append(f"{path} is in the table, and {count} lines need no row there")
    return wrong


def plan(modules: Imports, top: str) -> Plan:
    """Rooms, arrows and floors of ``top``, which has no circles."""
    inside = {
        module: module.removeprefix(f"{top}.").split(".")[0] for module in modules if module.startswith(f"{top}.")
    }
    below: dict[str, set[str]] = {own: set() for own in inside.values()}
    for module, own in inside.items():
        below[own] |= {room(name, top) for name in modules[module]} & below.keys() - {own}
    left, floors = dict(below), 0
    while left:
        ground = [own for own, others in left.items() if not others & left.keys()]
        if not ground:
            raise ValueError(f"rooms of {top} are in a circle: {sorted(left)}")
        for own in ground:
            del left[own]
        floors += 1
    return Plan(len(below), sum(map(len, below.values())), floors)


def main() -> int:
    """Prints them; always 0."""
    modules = {name: names for top in ("services", "kernels", *ROOTS) for name, names in read(top).items()}
    print(f"{'':20} {'rooms':>5} {'arrows':>6} {'floors':>6}")
    for top in MEASURED:
        found = plan(modules, top)
        print(f"{top:20} {found.rooms:5} {found.arrows:6} {found.floors:6}")
    lines = lengths()
    for what, counts in (("files", folders(list(lines))), ("lines", lines)):
        print()
        for path, count in sorted(counts.items(), key=lambda one: -one[1])[:10]:
            print(f"{count:5} {what} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
