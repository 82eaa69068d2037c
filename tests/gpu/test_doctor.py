"""Both doctors on a machine that has a GPU, real or stood in for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import World
from tests.gpus import ROOT, Host


def doctored(module: str, host: Host, *words: str, **environ: str) -> dict[str, dict[str, Any]]:
    """The findings by check; the daemon's listening addresses share one name, and are left out."""
    done = subprocess.run(
        [sys.executable, "-m", module, "doctor", "--json", *words],
        cwd=ROOT,
        env={**host.environment, **environ},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return {told["check"]: told for told in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("module", ["services.kvcache", "services.engine"])
def test_memory_goes_round_on_this_gpu(one: World, tmp_path: Path, module: str) -> None:
    flags = ["--device", "gpu", "--listen", f"unix:{tmp_path}/s.sock"]
    found = doctored(module, one.host, *flags, ROCMFORGE_KVCACHE_MEMORY="1MiB")
    for name in ("CuPy", "GPU runtime", "GPU memory", "GPU memory, for real"):
        assert found[name]["status"] == "ok", found[name]
    assert "on GPU 0" in found["GPU memory, for real"]["found"]
    if module == "services.engine":
        assert found["kernel compiler"]["status"] == found["kernel cache"]["status"] == "ok"


def test_a_daemon_beside_it_is_compared(one: World, tmp_path: Path) -> None:
    daemon = one.daemon()
    words = [
        "--device",
        "gpu",
        "--peer",
        str(daemon.pid),
        "--kvcache",
        daemon.address,
        "--listen",
        f"unix:{tmp_path}/s.sock",
    ]
    found = doctored("services.engine", one.host, *words)
    assert {found[name]["status"] for name in ("namespaces", "KV-cache daemon", "GPUs that are visible")} == {"ok"}
    found = doctored("services.engine", one.host, *words, HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="0")
    assert found["GPUs that are visible"]["status"] == "failed"
    assert f"in process {daemon.pid}" in found["GPUs that are visible"]["found"]


def test_a_gpu_that_is_hidden_is_missed(one: World, tmp_path: Path) -> None:
    flags = ["--device", "gpu", "--listen", f"unix:{tmp_path}/s.sock"]
    found = doctored("services.kvcache", one.host, *flags, HIP_VISIBLE_DEVICES="-1", CUDA_VISIBLE_DEVICES="-1")
    assert found["GPUs that are visible"]["status"] == found["GPU runtime"]["status"] == "failed"
    assert found["GPU memory, for real"]["status"] == "skipped"
