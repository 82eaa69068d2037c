"""Which tests `make test-fast` runs: those that start no process, serve no engine, compile no kernel, search no
histories or states, replay no traffic, compute no reference model and measure no memory.

The rule reads imports. A file that reaches one of `SLOW` or `SERVED` itself, or through modules of tests/ and
benchmarks/, is left out; of the others, so is each test that hypothesis runs.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW = frozenset(
    {
        "subprocess",
        "multiprocessing",
        "hypothesis.stateful",
        "tests.protocol.search",
        "benchmarks.eviction",
        "tests.models.references.plain_forward",
        "tracemalloc",
    }
)
#: An engine behind its socket: most of its tests wait for generations. Its conftest.py knows it, whoever asks for one.
SERVED = frozenset({"tests.engine.running"})
#: Where imports are followed: what the product itself may start is for its tests to avoid.
FOLLOWED = ("tests", "benchmarks")


def imported(source: str) -> Iterator[str]:
    """The modules that a source imports, anywhere in it; ``from a import b`` gives a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _names(path: Path) -> frozenset[str]:
    return frozenset(imported(path.read_text(encoding="utf-8")))


def _reaches(path: Path, modules: frozenset[str], root: Path) -> bool:
    """Whether a file imports one of the modules, itself or through others of `FOLLOWED`."""
    todo, seen = [path], set[Path]()
    while todo:
        one = todo.pop()
        if one in seen or not one.is_file():
            continue
        seen.add(one)
        names = _names(one)
        if names & modules:
            return True
        todo += [root / f"{name.replace('.', '/')}.py" for name in names if name.split(".")[0] in FOLLOWED]
    return False


def is_fast(path: Path, root: Path = ROOT) -> bool:
    """Whether neither the file nor what it imports serves an engine or reaches one of `SLOW`, and no conftest.py above
    it reaches one of `SLOW`.
    """
    conftests = [folder / "conftest.py" for folder in path.parents if root / "tests" in folder.parents]
    return not (_reaches(path, SLOW | SERVED, root) or any(_reaches(one, SLOW, root) for one in conftests))
