"""Arrows point one way: `__main__ -> server -> servicer -> domain -> memory`.

The engine and the daemon never import each other, domain modules know neither the wire nor the arrays, and generated
code stays at the edges. All of it is read from the sources, so nothing has to be importable for it.
"""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Pure Python: told the time, handed bytes; they run and are tested without gRPC and without arrays. Folders and files.
DOMAIN = (
    *("services.common.errors", "services.common.histogram", "services.common.call_stats"),
    *("services.common.access.identity", "services.common.tracing.span"),
    *("rocmforge.client.errors", "rocmforge.client.demands", "rocmforge.client.layout"),
    *(f"services.kvcache.{room}" for room in ("cache", "pool", "lease", "eviction", "tiers")),
    *(f"services.engine.{room}" for room in ("scheduling", "delivery")),
    *("services.engine.pages.source", "services.engine.pages.local", "services.engine.sampling.result"),
)
NOT_IN_DOMAIN = (
    *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "numpy", "cupy", "torch"),
    *("rocmforge.kvcache", "rocmforge.engine"),
    *("prometheus_client", "opentelemetry"),
)

#: What may import generated code: where messages come in and go out.
EDGES = (
    *("services.kvcache.api", "services.kvcache.server", "services.kvcache.__main__"),
    *("services.engine.api", "services.engine.cli", "services.engine.server", "services.engine.__main__"),
    *(f"rocmforge.client.{name}" for name in ("messages", "step", "cache")),
    *("rocmforge.conformance.proxy", "rocmforge.conformance.stage"),
    "services.top.looking",
)
GENERATED = ("rocmforge.kvcache", "rocmforge.engine")

#: What the services take of the client: the daemon, whom it is a client of, no more than this.
DAEMON_TAKES = (
    *("rocmforge.client.errors", "rocmforge.client.demands"),
    *("rocmforge.client.arena.gpu_ipc", "rocmforge.client.transport.paths"),
)
#: The session itself is behind the engine's seam.
SESSION = ("rocmforge.client.cache", "rocmforge.client.step", "rocmforge.client.lease", "rocmforge.client.messages")
SEAM = "services.engine.pages.daemon"

#: The folders that modules are read from, and where their names begin.
CLIENT = "clients/python/rocmforge"
ROOTS = {CLIENT: "clients/python"}

#: What each room may import of its own service; a room not named here may be imported by all and import nothing.
ROOMS = {
    "services.engine": {
        "api": {"delivery", "scheduling", "sampling", "text", "pages", "checkpoint"},
        "delivery": {"scheduling", "sampling"},
        "scheduling": {"sampling", "pages"},
        "sampling": {"checkpoint"},
        "model": {"scheduling", "sampling", "text", "pages", "checkpoint"},
        "text": {"checkpoint"},
    },
    "services.kvcache": {
        "api": {"scrub", "cache", "tiers", "lease", "pool", "eviction", "slices"},
        "scrub": {"cache", "pool"},
        "cache": {"lease", "pool", "eviction", "slices"},
        "kvevents": {"cache", "pool"},
        "lease": {"pool", "slices"},
        "arena": {"pool"},
        "mover": {"outer"},
        "pool": {"eviction", "slices"},
        "tiers": {"mover", "pool", "slices"},
    },
    "rocmforge.client": {
        "arena": {"transport", "errors", "events", "layout"},
        "transport": {"errors", "events"},
    },
    "kernels": {
        "attention": {"device"},
        "linear": {"device"},
        "sampling": {"device"},
        "replay": {"linear", "device"},
    },
}
#: At most so many files a folder, `__init__.py` apart; each of the client's commands has a file of its own.
MOST_FILES = 12
EXCEPT = ("services.engine.cli",)


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module name that `source`, the module named `module`, imports; `from a import b` gives a and a.b."""
    return imports_of(ast.parse(source, module), module, is_package)


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Like `imported`, of a source that is parsed."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
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


@dataclass(frozen=True, slots=True)
class Source:
    """What one file imports, and the classes it defines at its top level."""

    imports: set[str]
    classes: list[str]


@functools.cache
def sources(top: str) -> dict[str, Source]:
    """Module name -> what is in it, for every Python file below the folder `top`."""
    found = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        if path.stem.endswith(("_pb2", "_pb2_grpc")) or "__pycache__" in path.parts:
            continue
        parts = path.relative_to(ROOT / ROOTS.get(top, "")).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), name)
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        found[name] = Source(set(imports_of(tree, name, is_package)), classes)
    return found


def read(top: str) -> Imports:
    """Module name -> what it imports, for every Python file below the folder `top`."""
    return {name: source.imports for name, source in sources(top).items()}


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
    for start in sorted(module for module in modules if within(module, DOMAIN)):
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
        if within(module, ["services", "rocmforge"]) and not within(module, EDGES)
        for name in sorted(names)
        if within(name, GENERATED)
    ]


def borrowed(modules: Imports) -> list[str]:
    """What the client imports of the project, and what the services import of the client and should not."""
    wrong = []
    for module, names in modules.items():
        for name in sorted(names):
            ours = within(name, ["services", "kernels", "models", "benchmarks", "scripts", "tests"])
            if within(module, ["rocmforge"]) and ours:
                wrong.append(f"{module} imports {name}")
            daemons = within(module, ["services.kvcache"]) and within(name, ["rocmforge.client"])
            if daemons and not within(name, DAEMON_TAKES):
                wrong.append(f"{module} imports {name}")
            if within(module, ["services"]) and module != SEAM and within(name, SESSION):
                wrong.append(f"{module} imports {name}")
            if within(module, ["services", "kernels"]) and name == "rocmforge.client":
                wrong.append(f"{module} imports all of {name}")
    return wrong


def room(module: str, top: str) -> str:
    """The room below ``top`` that a module lies in; empty for a module of ``top`` itself, or elsewhere."""
    return module.removeprefix(f"{top}.").split(".")[0] if module.startswith(f"{top}.") else ""


def upward(modules: Imports) -> list[str]:
    """Imports from one room of a service into another that it may not know, or into what stands on the rooms."""
    wrong = []
    for top, allowed in ROOMS.items():
        depth = top.count(".") + 1
        inside = {module: room(module, top) for module in modules if room(module, top)}
        rooms = {name for module, name in inside.items() if module.count(".") > depth}
        for module, own in inside.items():
            if own not in rooms or own == "cli":
                continue
            for name in sorted(modules[module]):
                other = room(name, top)
                if other in inside.values() and other != own and other not in allowed.get(own, set()):
                    wrong.append(f"{module} imports {name}")
    return wrong


def circles(modules: Imports) -> list[str]:
    """Modules that import themselves through others."""
    inside = {module: {name for name in names if name in modules} - {module} for module, names in modules.items()}
    while free := [module for module, names in inside.items() if not names & inside.keys()]:
        for module in free:
            del inside[module]
    return sorted(inside)


def namesakes(modules: Imports) -> list[str]:
    """Names of files or folders in one service that differ by a plural alone; commands are called as they are typed."""
    wrong = []
    for top in ROOMS:
        parts = [module.removeprefix(top).split(".") for module in modules if within(module, [top])]
        names = {name for part in parts if "cli" not in part for name in part if name}
        wrong += [f"{top}: {name} and {name}s" for name in sorted(names) if f"{name}s" in names]
    return wrong


def crowded(modules: Imports) -> list[str]:
    """Folders with more files than one finds one's way in."""
    files = collections.Counter(module.rpartition(".")[0] for module in modules if module not in folders(modules))
    many = {folder: count for folder, count in files.items() if count > MOST_FILES and folder not in EXCEPT}
    return [f"{folder} has {count} files" for folder, count in many.items()]


def folders(modules: Imports) -> set[str]:
    """The modules that other modules lie in."""
    return {module.rpartition(".")[0] for module in modules}


def twice(classes: dict[str, list[str]]) -> list[str]:
    """Names of classes that one service, or `kernels`, has more than once; private ones are their file's own."""
    wrong = []
    for top in ROOMS:
        found: dict[str, list[str]] = {}
        for module, names in classes.items():
            for name in names:
                if within(module, [top]) and not name.startswith("_"):
                    found.setdefault(name, []).append(module)
        wrong += [f"{name}: {', '.join(where)}" for name, where in sorted(found.items()) if len(where) > 1]
    return wrong


def pickled(modules: Imports) -> list[str]:
    """Imports of pickle, or of what is pickle by another name: unpickling runs whatever the bytes say."""
    bad = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")
    return [f"{module} imports {name}" for module, names in modules.items() for name in names if within(name, bad)]


@pytest.fixture(scope="module")
def services() -> Imports:
    return {**read("services"), **read(CLIENT)}


@pytest.fixture(scope="module")
def project() -> Imports:
    return {**read("services"), **read(CLIENT), **read("kernels")}


def test_the_engine_and_the_daemon_never_import_each_other(services: Imports) -> None:
    assert crossings(services) == []


def test_domain_modules_import_neither_grpc_nor_arrays(services: Imports) -> None:
    assert impure(services) == []


def test_generated_code_is_imported_at_the_edges_only(services: Imports) -> None:
    assert generated_inside(services) == []


def test_the_client_stands_alone_and_the_services_take_little_of_it(project: Imports) -> None:
    assert borrowed(project) == []


def test_the_errors_need_neither_grpc_nor_arrays() -> None:
    """Not even by way of the package that they are in."""
    code = "import sys, services.common.errors as e; sys.exit(bool({'grpc', 'numpy', 'google'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_name_in_a_rule_exists(project: Imports) -> None:
    named = {*DOMAIN, *EDGES, *EXCEPT, *DAEMON_TAKES, *SESSION, SEAM}
    for top, rooms in ROOMS.items():
        named |= {f"{top}.{name}" for room in rooms.items() for name in (room[0], *room[1])}
    assert sorted(named - project.keys()) == []


def test_arrows_between_rooms_point_one_way(project: Imports) -> None:
    assert upward(project) == []
    assert circles(project) == []


def test_rooms_have_no_namesakes_and_are_not_crowded(project: Imports) -> None:
    assert namesakes(project) == []
    assert crowded(project) == []


def test_no_class_name_is_there_twice_in_a_service() -> None:
    everything = {**sources("services"), **sources(CLIENT), **sources("kernels")}
    assert twice({name: source.classes for name, source in everything.items()}) == []


def test_tests_mirror_the_rooms() -> None:
    """A folder of tests below tests/engine, tests/kvcache or tests/kernels is named after the room it is of."""
    for top in ("services/engine", "services/kvcache", "kernels"):
        tests = ROOT / "tests" / top.removeprefix("services/")
        folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
        assert folders, tests
        for folder in folders:
            assert (ROOT / top / folder).is_dir(), f"{tests / folder} mirrors nothing"
    for path in (ROOT / "tests" / "clients").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests" / "clients")
        assert (ROOT / CLIENT / "client" / folder).is_dir(), f"{path} mirrors nothing"


def test_nothing_is_pickled() -> None:
    everything = {
        name: names
        for top in ("services", "kernels", "scripts", "benchmarks", CLIENT)
        for name, names in read(top).items()
    }
    assert pickled(everything) == []


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        (crossings, "services.engine.scheduling.loop", "from services.kvcache import pages"),
        (crossings, "services.engine.loop", "from ..kvcache.pages import Page"),
        (crossings, "services.kvcache.pool.pool", "def late():\n    import services.engine.model.decoder"),
        (crossings, "services.kvcache.pool.pool", "from services import engine"),
        (
            crossings,
            "services.kvcache.pool.pool",
            "import importlib\nimportlib.import_module('services.engine.model.decoder')",
        ),
        (impure, "services.kvcache.pool.pages.page_table", "import numpy as np"),
        (impure, "services.engine.scheduling.scheduler", "from google.protobuf import any_pb2"),
        (impure, "services.common.errors", "import grpc.aio"),
        (impure, "services.engine.delivery.traces", "from opentelemetry import trace"),
        (generated_inside, "services.engine.model.decoder", "from rocmforge.engine.v1 import engine_pb2"),
        (generated_inside, "rocmforge.client.lease", "from rocmforge.kvcache.v1 import kvcache_pb2"),
        (borrowed, "rocmforge.client.lease", "from services.common import rpc"),
        (borrowed, "services.kvcache.lease.sessions", "from rocmforge.client.layout import PageLayout"),
        (borrowed, "services.engine.scheduling.loop", "from rocmforge.client.cache import KvCache"),
        (borrowed, "services.engine.model.backend", "from rocmforge.client import Gpu"),
        (pickled, "services.engine.model.decoder", "from pickle import loads"),
        (pickled, "kernels.load", "import pickle"),
    ],
)
def test_each_check_can_fail(check, module: str, source: str) -> None:  # type: ignore[no-untyped-def]
    assert check({module: set(imported(source, module))})
    errors = "rocmforge.client.errors" if module.startswith("rocmforge") else "services.common.errors"
    assert not check({module: set(imported(f"import json\nfrom {errors} import ServiceError", module))})


@pytest.mark.parametrize(
    ("check", "modules", "found"),
    [
        (
            upward,
            {
                "services.engine.scheduling.loop": {"services.engine.delivery.streams"},
                "services.engine.delivery.streams": set(),
            },
            1,
        ),
        (upward, {"services.engine.scheduling.loop": {"services.engine.server"}, "services.engine.server": set()}, 1),
        (
            upward,
            {
                "services.engine.delivery.streams": {"services.engine.scheduling.loop"},
                "services.engine.scheduling.loop": set(),
            },
            0,
        ),
        (
            upward,
            {"services.engine.server": {"services.engine.api.servicer"}, "services.engine.api.servicer": set()},
            0,
        ),
        (circles, {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, 4),
        (circles, {"a": {"b"}, "b": {"c"}, "c": set()}, 0),
        (namesakes, {"services.kvcache.pool": set(), "services.kvcache.cache.pools": set()}, 1),
        (namesakes, {"services.kvcache.pool": set(), "services.engine.pools": set()}, 0),
        (crowded, {f"kernels.a.m{i}": set() for i in range(13)}, 1),
        (crowded, {f"kernels.a.m{i}": set() for i in range(12)}, 0),
        (twice, {"kernels.a": ["Plan"], "kernels.b": ["Plan"]}, 1),
        (twice, {"kernels.a": ["_Plan"], "kernels.b": ["_Plan"], "services.engine.c": ["Plan"]}, 0),
    ],
)
def test_each_rule_of_rooms_can_fail(check, modules: Imports, found: int) -> None:  # type: ignore[no-untyped-def]
    assert len(check(modules)) == found


def test_a_domain_module_may_not_reach_arrays_through_another_module() -> None:
    modules = {
        "services.kvcache.pool.pages.page_table": {"services.kvcache.helper"},
        "services.kvcache.helper": {"services.kvcache.deeper"},
        "services.kvcache.deeper": {"numpy"},
    }
    assert impure(modules) == [
        "services.kvcache.pool.pages.page_table -> services.kvcache.helper -> services.kvcache.deeper -> numpy"
    ]
