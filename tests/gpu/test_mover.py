"""The mover between a GPU's pages and pinned host memory, in two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gpus import ROOT, host
from tests.kvcache.mover.rig import PAGES


def test_pages_of_a_gpu_go_to_host_memory_and_back(tmp_path: Path) -> None:
    machine = host(1)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.moving", str(tmp_path), "0"],
        cwd=ROOT,
        env=dict(machine.environment),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert seen.pop("attached") == [True, "", True, ""]
    assert seen.pop("out") == [True] * (PAGES // 2)
    assert "0000:ff:00.0" in seen.pop("another GPU")
    assert seen == {
        "back": True,
        "from file": "filled",
        "first page": True,
        "gpu to gpu": "failed",
        "attached again": True,
        "again": True,
        "no handle": False,
        "after": False,
        "restarts": 1,
    }
    if not machine.is_real:
        from tests.simulators.rocm import standin

        assert standin.leftovers(standin.machine_of(dict(machine.environment))) == []
