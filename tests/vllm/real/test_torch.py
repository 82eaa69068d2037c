"""Pages as torch tensors, where there is torch: in vLLM's environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.processes import kvcache
from tests.vllm.real.scripts import command, importing_client


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8"])
def test_tensors_of_torch_are_the_same_memory(tmp_path: Path, dtype: str) -> None:
    with kvcache(tmp_path) as daemon:
        done = subprocess.run(
            command("torch_views", daemon.address, dtype),
            env=importing_client(),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
