"""House rules that no linter knows. Each check is a function over text or names, and is shown to be able to fail."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests import tools

ROOT = Path(__file__).parents[2]

#: Put together here, so that this file does not hold them. A mirror or another machine must serve as well.
FORBIDDEN = [
    *("pypi" + ".org", "python" + "hosted", "registry." + "npmjs", "proxy." + "golang", "deb.debian" + ".org"),
    *("/" + "work/", "/" + "farm/"),
]
LARGEST = 1 << 20
#: What lies here is the system's. A file that is not there is /proc/none: nobody can make it.
SYSTEM = ("bin", "dev", "etc", "opt", "proc", "run", "sys", "usr")
#: Methods of gRPC, what is typed in a chat, and words of messages.
NO_PATHS = ("/SubmitGeneration", "/rocmforge.", "/help", "/nonsense", "/reset", "/system", "/path", "/resolve/", "/s)")

#: Test files in which mypy lets errors of some codes pass, as they did when it first read them. Lower it with each that
#: is mended: a new file has none.
LENIENT_FILES = 45

#: Errors that say little by their type.
MANY_CAUSES = {
    *(
        "BaseException",
        "Exception",
        "AssertionError",
        "OSError",
        "RuntimeError",
        "SystemExit",
        "TypeError",
        "ValueError",
    ),
    *("FieldInvalid", "ForwardFailed", "InvalidConfiguration", "ModelInvalid", "ServiceError", "RpcError"),
    *("CompileError", "KernelError", "Refused", "Unfit"),
}


def listed(*flags: str) -> list[str] | None:
    """What git lists; None without git, or outside a checkout."""
    git = tools.TOOLS["git"].find()
    if git is None:
        return None
    done = subprocess.run([git, "ls-files", "-z", *flags], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\0") if done.returncode == 0 else None


def project_files() -> list[str]:
    """Every file that is or would be committed; outside a git checkout, every file."""
    names = listed("--cached", "--others", "--exclude-standard")
    if names is None:
        names = []
        for folder, folders, files in os.walk(ROOT):
            folders[:] = [name for name in folders if name == ".ci" or (name[0] not in "._" and name != "build")]
            names += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in files if name != ".git"]
    return sorted(name for name in set(names) if name and (ROOT / name).is_file())


FILES = project_files()


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every file that is text."""
    for name in FILES:
        data = (ROOT / name).read_bytes()
        if b"\0" not in data[:8192]:
            yield name, data.decode("utf-8", errors="replace")


def python(*tops: str) -> dict[str, str]:
    """Name -> source of the Python files below some top folders."""
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in FILES
        if name.endswith(".py") and PurePosixPath(name).parts[0] in tops
    }


def asserts(source: str) -> list[int]:
    """Lines with an assert: `python -O` drops it, so it checks nothing that came from outside."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def sleeps(source: str) -> list[int]:
    """Lines that call or import time.sleep: a test waits for an event with a deadline, or is handed a clock."""
    found = []
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Attribute) and node.attr == "sleep" and getattr(node.value, "id", "") == "time"
        taken = (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and any(alias.name == "sleep" for alias in node.names)
        )
        if called or taken:
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


#: What a loop's condition calls that waits, or takes something away.
WAITS = {"read", "readline", "acquire"}


def spins(source: str) -> list[int]:
    """Lines of loops that wait and do nothing else: they take the processor from what they wait for."""
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]
    return [
        loop.lineno
        for loop in loops
        if all(isinstance(line, ast.Pass) for line in loop.body)
        and not {node.attr for node in ast.walk(loop.test) if isinstance(node, ast.Attribute)} & WAITS
    ]


def any_failure(source: str) -> list[int]:
    """Lines where a test takes whatever goes wrong for what it looks for: an error that has many causes, unexamined."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.With):
            continue
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and item.optional_vars is None:
                kinds = {name.id for name in ast.walk(call.args[0]) if isinstance(name, ast.Name)}
                if kinds & MANY_CAUSES and not any(keyword.arg == "match" for keyword in call.keywords):
                    found.append(node.lineno)
    return found


def lenient(source: str) -> bool:
    """Whether mypy is to overlook something in the whole of a file."""
    return re.search(r"^# mypy:", source, re.MULTILINE) is not None


def fixed_paths(source: str) -> list[str]:
    """Absolute paths that a test names and that are not of the system: somebody may have made such a file."""
    tree = ast.parse(source)
    # What follows a value in an f-string is the rest of a path.
    rests = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    words = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in rests
    ]
    paths = [found[1] for word in words for found in re.finditer(r"(?:^|=|unix:)(/[\w.][^\s'\"]*)", word)]
    return [path for path in paths if path.split("/")[1] not in SYSTEM and not path.startswith(NO_PATHS)]


def forbidden(text: str) -> list[str]:
    """Registry hosts and paths of somebody's machine that a text names."""
    return [word for word in FORBIDDEN if word in text]


def too_large(name: str, size: int) -> bool:
    """Whether a file is too large to commit; weights, and what checks them, may be."""
    parts = PurePosixPath(name).parts
    return size > LARGEST and parts[0] != "models" and parts[:2] != ("tests", "models")


def generated(name: str) -> bool:
    """Whether a file is generated code."""
    return PurePosixPath(name).stem.endswith(("_pb2", "_pb2_grpc"))


def undocumented(source: str) -> list[str]:
    """Public names without a docstring: the module, its classes and functions, and their public methods.

    The methods of a servicer are the protocol's, documented in the .proto; an override says so, or is trivial.
    """
    tree = ast.parse(source)
    if not tree.body:
        return []
    missing = [] if ast.get_docstring(tree) else ["the module"]
    todo: list[tuple[str, ast.stmt]] = [("", node) for node in tree.body]
    while todo:
        prefix, node = todo.pop(0)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            missing.append(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
            if not any(base.endswith("Servicer") for base in bases):
                todo += [(f"{prefix}{node.name}.", member) for member in node.body]
    return missing


def test_validation_is_never_an_assert() -> None:
    found = {name: asserts(source) for name, source in python("services", "kernels", "scripts", "clients").items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_test_sleeps() -> None:
    found = {name: sleeps(source) for name, source in python("tests").items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_test_spins() -> None:
    found = {name: spins(source) for name, source in python("tests").items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_test_takes_any_failure_for_the_one_it_looks_for() -> None:
    found = {name: any_failure(source) for name, source in python("tests").items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_mypy_overlooks_no_more_than_it_did() -> None:
    assert [
        name
        for name, source in python("services", "kernels", "scripts", "benchmarks", "clients").items()
        if lenient(source)
    ] == []
    assert sum(lenient(source) for source in python("tests").values()) == LENIENT_FILES


def test_no_test_names_a_path_outside_of_its_own_directory() -> None:
    # The machine of tests/doctor is made up, and so are its paths.
    sources = {name: source for name, source in python("tests").items() if not name.startswith("tests/doctor/")}
    found = {name: fixed_paths(source) for name, source in sources.items() if ROOT / name != Path(__file__)}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_no_registry_host_and_no_machine_path() -> None:
    found = {name: forbidden(text) for name, text in texts()}
    assert {name: words for name, words in found.items() if words} == {}


def test_no_large_file() -> None:
    assert [name for name in FILES if too_large(name, (ROOT / name).stat().st_size)] == []


@pytest.mark.needs("git")
def test_generated_code_is_not_committed() -> None:
    names = listed()
    if names is None:
        pytest.skip("not a git checkout")
    assert [name for name in names if generated(name)] == []


def test_every_public_name_has_a_docstring() -> None:
    found = {name: undocumented(source) for name, source in python("services", "kernels", "clients").items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 10
    assert python("services")
    assert "Makefile" in dict(texts())


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (asserts, "def f(x):\n    assert x > 0", "def f(x):\n    if x <= 0:\n        raise ValueError"),
        (sleeps, "import time\ntime.sleep(1)", "import time\ntime.monotonic()"),
        (sleeps, "from time import sleep", "from time import monotonic"),
        (spins, "while not f():\n    pass", "while not f():\n    g()"),
        (spins, "while not c.done():\n    pass", "while not c.read():\n    pass"),
        (any_failure, "with pytest.raises(Exception):\n    f()", "with pytest.raises(Exception, match='x'):\n    f()"),
        (any_failure, "with pytest.raises((KeyError, OSError)):\n    f()", "with pytest.raises(KeyError):\n    f()"),
        (any_failure, "with a, pytest.raises(SystemExit):\n    f()", "with pytest.raises(SystemExit) as e:\n    f()"),
        (lenient, '# mypy: disable-error-code="misc"\nx = 1', "x = 1  # mypy: it is checked"),
        (fixed_paths, "run('/nonexistent')", "run('/proc/none')"),
        (fixed_paths, "run('unix:/tmp/k.sock')", "run(f'unix:{folder}/k.sock')"),
        (fixed_paths, "run('CXX=/mine/cc')", "run(folder + 'm.sock')"),
        (forbidden, "https://" + FORBIDDEN[0] + "/simple", "https://example.org/framework/"),
        (forbidden, f"cd {FORBIDDEN[-2]}main", "cd somewhere/main"),
        (undocumented, "x = 1", '"""About x."""\nx = 1'),
        (undocumented, '"""Doc."""\nclass A:\n    pass', '"""Doc."""\nclass _A:\n    pass'),
        (undocumented, '"""Doc."""\nasync def f():\n    pass', '"""Doc."""\nasync def f():\n    """Doc."""'),
        (
            undocumented,
            '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): pass',
            '"""Doc."""\nclass A(x.KvCacheServiceServicer):\n    """Doc."""\n    def f(self): pass',
        ),
        (generated, "protos/a/v1/a_pb2.py", "protos/a/v1/a.proto"),
        (generated, "protos/a/v1/a_pb2.pyi", "services/common/rpc.py"),
        (generated, "protos/a/v1/a_pb2_grpc.py", "docs/pb2.md"),
    ],
)
def test_each_check_can_fail(check, bad: str, good: str) -> None:  # type: ignore[no-untyped-def]
    assert check(bad)
    assert not check(good)


def test_the_size_check_can_fail() -> None:
    assert too_large("docs/picture.png", LARGEST + 1)
    assert not too_large("docs/picture.png", LARGEST)
    assert not too_large("models/shakespeare/model.safetensors", LARGEST + 1)
