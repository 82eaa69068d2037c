"""The build frame: every pin is exact and complete, and `make run` hands a prompt over as it was typed."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[2]
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = TOML["project"]
CLIENT = tomllib.loads((ROOT / "clients" / "python" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==[A-Za-z0-9.!+]+$")


def pins(text: str) -> dict[NormalizedName, str]:
    """Canonical name -> line of a constraints file; ValueError for a line that is not `name==version`."""
    found = dict[NormalizedName, str]()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = PIN.match(line)
            if not match:
                raise ValueError(f"not name==version: {line}")
            found[canonicalize_name(match[1])] = line
    return found


def needed(requirements: list[str]) -> set[NormalizedName]:
    """Names of the requirements and of all that they need in turn, as far as it is installed here."""
    todo, seen = [Requirement(line) for line in requirements], set[NormalizedName]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        try:
            todo += [Requirement(line) for line in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional extra that is not installed
    return seen


CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_all_that_is_installed_is_pinned() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    ours = {canonicalize_name(PROJECT["name"]), canonicalize_name(CLIENT["name"])}
    everything = needed([*PROJECT["dependencies"], *CLIENT["dependencies"], *extras])
    assert everything - pins(CONSTRAINTS).keys() - ours == set()


def test_the_client_is_the_one_of_this_checkout_and_needs_little() -> None:
    assert f"{CLIENT['name']}=={CLIENT['version']}" in PROJECT["dependencies"]
    names = {Requirement(line).name for line in CLIENT["dependencies"]}
    assert names == {"googleapis-common-protos", "grpcio", "numpy", "protobuf"}


def test_a_constraint_is_a_name_and_a_version() -> None:
    assert pins(CONSTRAINTS)
    for bad in ("numpy>=2", "numpy", "numpy==2.4.6 --hash=sha256:0", "numpy @ https://example.org/numpy.whl"):
        with pytest.raises(ValueError, match="name==version"):
            pins(bad)


def seconds(source: str) -> list[float]:
    """What the timeout marks of a test file say."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.timeout"]
    return [float(ast.literal_eval(mark.args[0])) for mark in marks]


def test_no_test_may_take_longer_than_the_last_resort_lets_it() -> None:
    """The run is ended after `faulthandler_timeout`, whatever a mark says."""
    options = TOML["tool"]["pytest"]["ini_options"]
    files = (ROOT / "tests").rglob("*.py")
    marks = [mark for path in files for mark in seconds(path.read_text(encoding="utf-8"))]
    assert marks and seconds("import pytest\n\npytestmark = pytest.mark.timeout(900)") == [900.0]
    assert max(options["timeout"], *marks) < options["faulthandler_timeout"]


@pytest.mark.needs("make")
@pytest.mark.parametrize(
    "prompt",
    [
        """it's "quoted" and $HOME, $$ and `id`""",
        "two\nlines, and a # that is no comment",
        "$(shell echo expanded) $(info expanded) ${PROMPT}",
        "back\\slash at the end \\",
        "ROMEO: wherefore? éü — 火 ; | & < > * = :=",
        "",
    ],
)
def test_make_run_hands_over_the_prompt_as_it_was_typed(tmp_path: Path, prompt: str) -> None:
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys\n"
        f"pathlib.Path({str(seen)!r}).write_text(repr((sys.argv[1:], os.environ['PROMPT'])), encoding='utf-8')\n"
    )
    python.chmod(0o755)
    # -o: the environment that runs this test is set up already.
    command = ["make", "-s", "-o", "setup", "run", f"PY={python}", f"PROMPT={prompt}"]
    # ... and the flags of a make that runs this test are not for this one.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert seen.read_text(encoding="utf-8") == repr((["scripts/demo.py", "run"], prompt))


def hooks() -> list[str]:
    """The commands of the hooks of .pre-commit-config.yaml."""
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^ *- repo: *(.*)$", text, re.MULTILINE) == ["local"], "a hook that is fetched"
    return re.findall(r"^ *entry: *(.*)$", text, re.MULTILINE)


def parts_of_lint() -> list[str]:
    """What `make lint` is made of."""
    found = re.search(r"^lint:([^#\n]*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return found[1].split()


def test_a_commit_is_held_to_what_make_lint_checks() -> None:
    assert hooks() == [f"make {part}" for part in parts_of_lint()] != []


def test_services_start_their_children_by_path() -> None:
    """`python -m` finds nothing of an installed wheel, and imports what lies in the current folder first."""
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "services").rglob("*.py"))
        if "sys.executable" in path.read_text(encoding="utf-8") and path.name != "launch.py"
    ]
    assert found == []
