"""Pages as torch tensors, where there is torch: in vLLM's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import kvcache
from tests.vllm.real.peers import ROOT

SCRIPT = Path(__file__).parent / "inside" / "torch_views.py"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8"])
def test_tensors_of_torch_are_the_same_memory(tmp_path: Path, dtype: str) -> None:
    roots = f"{ROOT / 'clients' / 'python'}:{ROOT / 'protos'}"
    with kvcache(tmp_path) as daemon:
        done = subprocess.run(
            [
                os.environ["ROCMFORGE_VLLM"],
                str(Path(__file__).parent / "inside" / "torch_views.py"),
                daemon.address,
                dtype,
            ],
            env={**os.environ, "PYTHONPATH": os.environ.get("ROCMFORGE_VLLM_PATH", roots)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
