"""The commands of docs/operations.md, typed as they stand there, print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.healthcheck import wait_serving
from tests.processes import ROOT

PAGE = ROOT / "docs" / "operations.md"


def examples() -> list[tuple[str, str]]:
    """The commands of the page, in order, and what it says that they print."""
    found = []
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for typed in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = typed.partition("\n")
            found.append((command, printed))
    return found


def steady(printed: str) -> str:
    """What is printed without what differs from run to run."""
    return re.sub(r"^rocmforge_[\w-]{43}$", "TOKEN", printed, flags=re.MULTILINE)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Both services on their default sockets, in a runtime directory of the test's own."""
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ROCMFORGE_")}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        whole = {**kept, "XDG_RUNTIME_DIR": folder, "PATH": path, "OPENBLAS_NUM_THREADS": "1"}
        arena = ["--arena-dir", f"{folder}/arena"]
        started = []
        try:
            for module, words in (("kvcache", arena), ("engine", ["--listen", f"unix:{folder}/rocmforge/engine.sock"])):
                command = [sys.executable, "-m", f"services.{module}", *words]
                one = subprocess.Popen(command, cwd=ROOT, env=whole, stderr=subprocess.DEVNULL)
                started.append(one)
                address = f"unix:{folder}/rocmforge/{module}.sock"
                wait_serving(address, alive=lambda one=one: one.poll() is None, timeout_s=120)  # type: ignore[misc]
            yield whole
        finally:
            for one in started:
                one.kill()
                one.wait(60)


def test_the_commands_print_what_the_page_says(environment: dict[str, str]) -> None:
    found = examples()
    assert len(found) >= 6
    for command, printed in found:
        words = ["bash", "-c", command]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, steady(done.stdout)) == (0, printed), f"{command}\n{done.stderr}"
