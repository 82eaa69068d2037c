"""The rule of tests/tools.py: a test that lacks a tool is skipped, and the run says what would show it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tools
from tests.house.test_house import FILES

ROOT = Path(__file__).parents[2]
INSTALLER = ROOT / "scripts" / "install-tools.sh"

#: A file of each kind of tests that need a program, and of those that start processes and need none.
KINDS = {
    "tests/kernels/hip/test_norm.py": "g++",
    "tests/simulators/cpu/test_executor.py": "g++",
    "tests/rocm/test_pinned.py": "g++",
    "tests/gpu/test_doctor.py": "g++",
    "tests/kernels/device/test_targets.py": "clang",
    "tests/e2e/callers/test_grpcurl.py": "grpcurl",
    "tests/e2e/callers/test_api_docs.py": "grpcurl",
    "tests/e2e/callers/test_reflection.py": "ghz",
    "tests/e2e/callers/test_other_languages.py": "node go",
    "tests/house/test_house.py": "git",
    "tests/house/test_build.py": "make",
    "tests/deploy/test_kubernetes.py": "kustomize",
    "tests/deploy/test_observability.py": "promtool prometheus",
    "tests/kvcache/outer/test_store.py": "redis",
    "tests/kvcache/test_config.py": "",
}


def without_programs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a machine that has Python and no other program."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "CXX", "ROCMFORGE_TEST_GPU")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    environment = {**kept, "PATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program is found, below build/ neither."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)


def test_every_test_is_collected_without_a_program(tmp_path: Path) -> None:
    done = without_programs(tmp_path / "bin", "--collect-only", "tests")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert int(re.findall(r"(\d+) tests collected", done.stdout)[0]) > 2000


def test_a_file_of_each_kind_passes_without_a_program(tmp_path: Path) -> None:
    # What Go installs into build/bin is found there whatever the PATH, and runs.
    found = {name for name, tool in tools.TOOLS.items() if tool.way == "go" and not tools.lacking([name])}
    files = [file for file, names in KINDS.items() if not found & set(names.split())]
    # What HIPRTC compiles needs a library and no program.
    done = without_programs(tmp_path / "bin", *files, "-k", "not hiprtc")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    [last] = [line for line in done.stdout.splitlines() if line.startswith("not shown, without ")]
    assert "To show: apt install " in last
    for name in {name for file in files for name in KINDS[file].split()}:
        assert name in last.partition(":")[0], last


def test_there_is_a_kind_for_every_program_that_a_test_needs() -> None:
    marked = re.compile(r"""(?:mark\.needs|tools\.need|path_of)\(\s*"([^"]+)""")
    named = {name for file in FILES if file.startswith("tests/") and file.endswith(".py") and "test_tools" not in file
             for name in marked.findall((ROOT / file).read_text(encoding="utf-8"))}  # fmt: skip
    programs = {name for name in named if tools.TOOLS[name].kind == "program"}
    assert programs and programs - {name for names in KINDS.values() for name in names.split()} == set()


def test_what_a_run_did_not_show_is_one_line(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools.told([]) is None
    assert tools.told(["no GPU: none", "no reason"]) is None
    assert tools.told(["needs g++", "needs git", "needs g++, git"]) == (
        "not shown, without git, g++: 3 tests. To show: apt install g++ git (as root, make test INSTALL=1 does it all)"
    )
    assert tools.told(["needs grpcurl"]) == (
        "not shown, without grpcurl: 1 test. To show: apt install golang-go && make tools "
        "(as root, make test INSTALL=1 does it all)"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert tools.told(["needs other-users"]) == (
        "not shown, without other-users: 1 test. To show: run them as root (as root, make test INSTALL=1 does it all)"
    )
    assert tools.told(["needs smollm2"]) == (
        "not shown, without smollm2: 1 test. To show: make tools (as root, make test INSTALL=1 does it all)"
    )


def test_a_tool_that_is_in_no_row_is_an_error(bare: None) -> None:
    with pytest.raises(KeyError, match="gcc"):
        tools.need("gcc")
    with pytest.raises(pytest.skip.Exception, match=r"^needs g\+\+, git$"):
        tools.need("g++", "git")


@pytest.mark.parametrize(
    "row", ["g++ | program g++", "g++ | pogram g++ | apt g++", "g++ | program g++ | brew g++", "g++ | g++ | apt g++"]
)
def test_a_row_that_is_none_is_an_error(row: str) -> None:
    with pytest.raises(ValueError, match=re.escape(row)):
        tools.parsed(row)


def test_a_package_is_named_in_the_table_alone() -> None:
    """The list is one: neither CI nor the installer names packages of their own, but that of certificates."""
    packages = {tool.source for tool in tools.TOOLS.values() if tool.way in ("apt", "go")} - {"git", "make", "python3"}
    for path in (ROOT / ".ci" / "run", INSTALLER, ROOT / "Makefile"):
        words = set(re.split(r"[\s()'\"]+", re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.M)))
        assert words & (packages - {"g++", "npm", "nodejs"}) == set(), path.name


def stand_in(folder: Path, name: str, body: str) -> None:
    """A program that is a line of shell."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The installer with a table of its own, and programs that write down how they were called."""
    root, programs = tmp_path / "project", tmp_path / "programs"
    (root / "scripts").mkdir(parents=True)
    (root / "build").mkdir()
    programs.mkdir()
    shutil.copy(INSTALLER, root / "scripts")
    for name in ("bash", "dirname", "timeout", "sleep", "mkdir", "cat", "env"):
        found = shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    stand_in(programs, "make", f'echo "make $*" >>"{root}/log"')
    stand_in(programs, "apt-get", f'echo "apt-get $*" >>"{root}/log"')
    stand_in(programs, "go", f'[ "$1" = env ] && echo go1.19 && exit; echo "go $*" >>"{root}/log"; >"$GOBIN/curling"')
    return root


TABLE = """# A comment.
here    | program bash           | apt here-package
absent  | program absent-program | apt absent-package
file    | file build/*.there     | apt file-package
curling | program curling        | go example.org/curling v2 v1
model   | file build/models/m    | make model
"""


def install(project: Path, user: str) -> subprocess.CompletedProcess[str]:
    programs = project.parent / "programs"
    stand_in(programs, "id", f"echo {user}")
    (project / "scripts" / "tools.txt").write_text(TABLE)
    environment = {"PATH": str(programs), "CXX": "no-compiler"}
    command = [str(programs / "bash"), str(project / "scripts" / "install-tools.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_root_installs_what_is_missing_and_hears_what_still_is(project: Path) -> None:
    (project / "build" / "is.there").touch()
    done = install(project, "0")
    update, packages, *rest = (project / "log").read_text().splitlines()
    assert update.endswith(" update") and packages.endswith(" ca-certificates absent-package")
    assert rest == ["make setup", "go install example.org/curling@v1", "make model"]
    assert (done.returncode, done.stderr) == (1, "still missing: absent model\n")


def test_others_hear_what_to_install_and_have_the_rest_fetched(project: Path) -> None:
    done = install(project, "1000")
    assert (project / "log").read_text().splitlines()[0] == "make setup"
    assert done.returncode == 0
    assert done.stderr.splitlines()[0].endswith(": apt install absent-package file-package")
