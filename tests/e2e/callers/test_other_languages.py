"""The programs of docs/other-languages.md, typed as they stand there, against an engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import protos_bundle
from tests import tools
from tests.contract.archives import unpack
from tests.e2e.conftest import Pair
from tests.processes import ROOT

BUF = ROOT / "build" / "npm" / "node_modules" / ".bin" / "buf"
NODE_MODULES = ROOT / "build" / "node" / "node_modules"


def page(language: str) -> tuple[list[str], str]:
    """What a section has one type, and what is printed at the end."""
    section = (ROOT / "docs" / "other-languages.md").read_text().split(f"\n## {language}\n")[1].split("\n## ")[0]
    block = re.search(r"^```\n(\$ .*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    *first, last = block[1].split("$ ")[1:]
    typed, printed = last.split("\n", 1)
    return [*(line.rstrip("\n") for line in first), typed], printed


@pytest.fixture(scope="module")
def protos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, unpacked."""
    folder = tmp_path_factory.mktemp("protos")
    unpack(protos_bundle.write(folder), folder)
    [unpacked] = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


def check(pair: Pair, command: list[str], printed: str, environment: dict[str, str], folder: Path) -> None:
    """A program prints what the page says, and the reason of an error, over TCP and a unix socket."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        typed = [*command, *arguments]
        return subprocess.run(typed, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    done = run(pair.engine.tcp())
    assert done.returncode == 0, done.stderr
    assert re.sub(r"\d+$", "N", done.stdout.strip()) == re.sub(r"\d+$", "N", printed.strip())
    failed = run(pair.engine.address, "")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.strip() == "FIELD_INVALID: prompt.text is empty"


@pytest.mark.needs("node", "node-client")
def test_node(pair: Pair, protos: Path) -> None:
    node = tools.path_of("node")
    typed, printed = page("Node")
    assert typed[-1] == f"node generate.js ../../build/protos/{protos.name}"
    program = [node, "generate.js", str(protos)]
    environment = {**os.environ, "NODE_PATH": str(NODE_MODULES)}
    check(pair, program, printed, environment, ROOT / "examples" / "node")


@pytest.mark.needs("go", "node", "buf", "go-client")
def test_go(pair: Pair, protos: Path, tmp_path: Path) -> None:
    typed, printed = page("Go")
    assert [line for line in typed if line.startswith("go install ")] == installs()
    folder = tmp_path / "go"
    shutil.copytree(ROOT / "examples" / "go", folder, ignore=shutil.ignore_patterns("enginev1", "client"))
    path = f"{ROOT / 'build' / 'bin'}:{BUF.parent}:{os.environ['PATH']}"
    # Nothing is fetched now, and go.mod and go.sum are complete.
    environment = {**os.environ, "PATH": path, "GOPROXY": "off", "GOFLAGS": "-mod=readonly", "PROTOS": str(protos)}
    [generate] = [line for line in typed if line.startswith("buf generate ")]
    assert typed[-1] == "go run ."
    for command in (generate, "go build -o client ."):
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, f"{shlex.quote(command)}: {done.stderr}"
    assert subprocess.run(["gofmt", "-l", "main.go"], cwd=folder, capture_output=True, text=True).stdout == ""
    check(pair, [str(folder / "client")], printed, environment, folder)


def installs() -> list[str]:
    """What `make clients` installs for Go, as the page has it typed."""
    makefile = (ROOT / "Makefile").read_text()
    return [f"go install {module}" for module in re.findall(r"^PROTOC_GEN_\w+ := (\S+)$", makefile, re.MULTILINE)]
