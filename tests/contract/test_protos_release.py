"""Protos that were released stay readable: what `make lint-protos` says of those that a later change breaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tools
from tests.processes import ROOT

BUF = ROOT / "build" / "npm" / "node_modules" / ".bin" / "buf"
ENGINE = "protos/rocmforge/engine/v1/engine.proto"
RELEASED = "protos/released.binpb"


def make(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    """One of our targets, in a copy, with the tools of the original."""
    tools = [f"PY={sys.executable}", f"BUF={BUF}", "NPM=npm"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    command = ["make", "-o", "setup", "-o", "buf", target, *tools]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the protos are checked with, right after a release of them."""
    tools.need("buf", "node", "make")
    folder = tmp_path_factory.mktemp("released")
    shutil.copytree(ROOT / "protos", folder / "protos", ignore=shutil.ignore_patterns("*.py*", "*.binpb"))
    for name in ("Makefile", "buf.yaml"):
        shutil.copy(ROOT / name, folder / name)
    before = make(folder, "lint-protos")
    assert before.returncode == 0 and "nothing has been released yet" in before.stdout, before.stderr
    done = make(folder, "release-protos")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / RELEASED).stat().st_size < 1 << 16
    return folder


@pytest.fixture
def change(released: Path, tmp_path: Path) -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """Check a copy of those protos in which one passage of the engine's is another."""

    def changed(old: str, new: str) -> subprocess.CompletedProcess[str]:
        shutil.copytree(released, tmp_path / "copy")
        text = (tmp_path / "copy" / ENGINE).read_text()
        assert text.count(old) == 1
        (tmp_path / "copy" / ENGINE).write_text(text.replace(old, new))
        return make(tmp_path / "copy", "lint-protos")

    return changed


Change = Callable[[str, str], subprocess.CompletedProcess[str]]
SERVICE = "service EngineService {"
RPC = "  rpc Detokenize(DetokenizeRequest) returns (DetokenizeResponse);"
FIELD = "  uint32 cached_tokens = 2;"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (FIELD, "", 'Previously present field "2" with name "cached_tokens"'),
        (FIELD, '  reserved 2;\n  reserved "cached_tokens";', 'Previously present field "2" with name "cached_tokens"'),
        (FIELD, "  uint32 hit_tokens = 2;", 'changed name from "cached_tokens" to "hit_tokens"'),
        (FIELD, "  uint64 cached_tokens = 2;", 'changed type from "uint32" to "uint64"'),
        (RPC, "", 'Previously present RPC "Detokenize"'),
        (RPC, RPC.replace("returns (", "returns (stream "), "from server unary to server streaming"),
    ],
)
def test_what_breaks_clients_fails(change: Change, old: str, new: str, told: str) -> None:
    done = change(old, new)
    assert done.returncode != 0
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FIELD, f"{FIELD}\n  uint32 added = 100;"),
        (SERVICE, f"{SERVICE}\n  // Added. Reasons: none.\n  rpc Add(AddRequest) returns (AddResponse);"),
        (SERVICE, f"// A comment.\n{SERVICE}"),
    ],
)
def test_what_only_adds_passes(change: Change, old: str, new: str) -> None:
    if "rpc Add(" in new:
        new = f"message AddRequest {{}}\nmessage AddResponse {{}}\n{new}"
    done = change(old, new)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_that_breaks_the_last_one_is_refused(released: Path, tmp_path: Path) -> None:
    shutil.copytree(released, tmp_path / "copy")
    before = (tmp_path / "copy" / RELEASED).read_bytes()
    engine = tmp_path / "copy" / ENGINE
    engine.write_text(engine.read_text().replace(FIELD, ""))
    assert make(tmp_path / "copy", "release-protos").returncode != 0
    assert (tmp_path / "copy" / RELEASED).read_bytes() == before


def test_the_same_protos_are_released_as_the_same_bytes(released: Path, tmp_path: Path) -> None:
    shutil.copytree(released, tmp_path / "copy")
    assert make(tmp_path / "copy", "release-protos").returncode == 0
    assert (tmp_path / "copy" / RELEASED).read_bytes() == (released / RELEASED).read_bytes()
