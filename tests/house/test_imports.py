"""Arrows point one way: `__main__ -> server -> servicer -> domain -> memory`.

The engine and the daemon never import each other, domain modules know neither the wire nor the arrays, and generated
code stays at the edges. All of it is read from the sources, so nothing has to be importable for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Pure Python: told the time, handed bytes; they run and are tested without gRPC and without arrays.
KVCACHE = (
    *("layout", "lru", "pages", "prefix", "sequence", "sequences", "sessions", "quarantine", "pool", "pools"),
    *("keytable", "cache", "events", "explain", "demand", "density", "eviction", "reuse"),
)
ENGINE = (
    *("sequence", "scheduler", "step", "admission", "waiting", "turnover", "deadlines", "pagesource", "localpages"),
    *("loop", "streams", "output", "generation", "generations", "observations", "choice", "holds"),
)
DOMAIN = {
    "services.errors",
    "services.distribution",
    "services.calls",
    *(f"services.kvcache.{name}" for name in KVCACHE),
    *(f"services.engine.{name}" for name in ENGINE),
}
NOT_IN_DOMAIN = (
    *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "rocmforge", "numpy", "cupy"),
    "prometheus_client",
)

#: Modules that may import generated code: the edges where messages come in and go out.
EDGES = {"servicer", "messages", "server", "kvclient", "__main__"}
CLIENTS = ("services.engine.cli",)


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module name that `source`, the module named `module`, imports; `from a import b` gives a and a.b."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source, module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether `name` is one of the packages or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


Imports = dict[str, set[str]]


def read(top: str) -> Imports:
    """Module name -> what it imports, for every Python file below the folder `top`."""
    found: Imports = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        if path.stem.endswith(("_pb2", "_pb2_grpc")) or "__pycache__" in path.parts:
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = set(imported(path.read_text(encoding="utf-8"), name, is_package))
    return found


def crossings(modules: Imports) -> list[str]:
    """Imports of the daemon in the engine, and of the engine in the daemon."""
    engine, daemon = "services.engine", "services.kvcache"
    other = {engine: daemon, daemon: engine}
    return [
        f"{module} imports {name}"
        for module, names in modules.items()
        for own, foreign in other.items()
        if within(module, [own])
        for name in sorted(names)
        if within(name, [foreign])
    ]


def impure(modules: Imports) -> list[str]:
    """What a domain module reaches and must not, itself or through other modules of the project."""
    wrong = []
    for start in sorted(DOMAIN & modules.keys()):
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop()
            for name in sorted(modules[path[-1]]):
                if within(name, NOT_IN_DOMAIN):
                    wrong.append(" -> ".join([*path, name]))
                elif name in modules and name not in seen:
                    seen.add(name)
                    paths.append([*path, name])
    return wrong


def generated_inside(modules: Imports) -> list[str]:
    """Imports of generated code away from the edges."""
    return [
        f"{module} imports {name}"
        for module, names in modules.items()
        if within(module, ["services"]) and module != "services.rpc" and not within(module, CLIENTS)
        if module.rpartition(".")[2] not in EDGES
        for name in sorted(names)
        if within(name, ["rocmforge"])
    ]


def pickled(modules: Imports) -> list[str]:
    """Imports of pickle, or of what is pickle by another name: unpickling runs whatever the bytes say."""
    bad = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")
    return [f"{module} imports {name}" for module, names in modules.items() for name in names if within(name, bad)]


@pytest.fixture(scope="module")
def services() -> Imports:
    return read("services")


def test_the_engine_and_the_daemon_never_import_each_other(services: Imports) -> None:
    assert crossings(services) == []


def test_domain_modules_import_neither_grpc_nor_arrays(services: Imports) -> None:
    assert DOMAIN & services.keys(), "none of the domain modules exists: is the list above out of date?"
    assert impure(services) == []


def test_generated_code_is_imported_at_the_edges_only(services: Imports) -> None:
    assert generated_inside(services) == []


def test_nothing_is_pickled() -> None:
    everything = {
        name: names for top in ("services", "kernels", "scripts", "benchmarks") for name, names in read(top).items()
    }
    assert pickled(everything) == []


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        (crossings, "services.engine.loop", "from services.kvcache import pages"),
        (crossings, "services.engine.loop", "from ..kvcache.pages import Page"),
        (crossings, "services.kvcache.pool", "def late():\n    import services.engine.model"),
        (crossings, "services.kvcache.pool", "from services import engine"),
        (crossings, "services.kvcache.pool", "import importlib\nimportlib.import_module('services.engine.model')"),
        (impure, "services.kvcache.pages", "import numpy as np"),
        (impure, "services.engine.scheduler", "from google.protobuf import any_pb2"),
        (impure, "services.errors", "import grpc.aio"),
        (generated_inside, "services.engine.model", "from rocmforge.engine.v1 import engine_pb2"),
        (pickled, "services.engine.model", "from pickle import loads"),
        (pickled, "kernels.load", "import pickle"),
    ],
)
def test_each_check_can_fail(check, module: str, source: str) -> None:  # type: ignore[no-untyped-def]
    assert check({module: set(imported(source, module))})
    assert not check({module: set(imported("import json\nfrom services.errors import ServiceError", module))})


def test_a_domain_module_may_not_reach_arrays_through_another_module() -> None:
    modules = {
        "services.kvcache.pages": {"services.kvcache.helper"},
        "services.kvcache.helper": {"services.kvcache.deeper"},
        "services.kvcache.deeper": {"numpy"},
    }
    assert impure(modules) == ["services.kvcache.pages -> services.kvcache.helper -> services.kvcache.deeper -> numpy"]
