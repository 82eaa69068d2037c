"""What sets families apart, on a GPU: a bias of queries, keys and values, and a norm of each head of q and k."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpus import ROOT, host
from tests.models.checkpoints import write_checkpoint
from tests.models.families import FAMILIES, family_tensors

pytestmark = pytest.mark.timeout(600)

FORWARD = """
import sys
import cupy
import numpy as np
from kernels.ops_cupy import CupyOps
from services.engine.model.batch import Row
from services.engine.model.decoder import Model

folder, dtype, kv_dtype, limit = sys.argv[1:]
tokens = np.random.default_rng(0).integers(0, 128, 50).tolist()
batches = [
    [Row(tokens[:20], 0, [2, 0], False), Row(tokens[:3], 0, [4], True)],
    [Row(tokens[20:49], 20, [2, 0, 1, 3], True), Row(tokens[3:4], 3, [4], True)],
    [Row(tokens[49:], 49, [2, 0, 1, 3], True)],
]
expected = Model.load(folder)
g = expected.geometry(16)
pages = np.zeros((5, g.layers, 2, g.kv_heads, 16, g.head_dim), np.float32)
found = Model.load(folder, CupyOps(0, dtype, kv_dtype, 16), dtype)
per_number = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}[kv_dtype]
scales = 4 * g.layers * 2 * g.kv_heads if kv_dtype == "int8" else 0
arena = cupy.full((5, pages[0].size * per_number + scales), 0xCD, np.uint8)
for batch in batches:
    want, got = expected.forward(batch, pages), found.forward(batch, arena).get()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(error)
    if not error < float(limit):
        sys.exit(f"{error} is not less than {limit}")
"""


@pytest.mark.parametrize(
    ("family", "stored", "dtype", "kv_dtype", "limit"),
    [
        ("qwen2", "float32", "f32", "f32", "1e-5"),
        ("qwen3", "float32", "f32", "f32", "1e-5"),
        ("qwen2", "float32", "f32", "int8", "3e-2"),
        ("qwen3", "bfloat16", "bf16", "int8", "5e-2"),
        ("llama3", "float16", "f16", "f16", "1e-2"),
    ],
)
def test_the_logits_are_those_of_numpy(
    tmp_path: Path, family: str, stored: str, dtype: str, kv_dtype: str, limit: str
) -> None:
    config: dict[str, Any] = FAMILIES[family] | {"head_dim": 64, "hidden_size": 128}
    write_checkpoint(tmp_path, config, family_tensors(config, 0), dtype=stored)
    words = [sys.executable, "-c", FORWARD, str(tmp_path), dtype, kv_dtype, limit]
    done = subprocess.run(words, cwd=ROOT, env=host(1).environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
