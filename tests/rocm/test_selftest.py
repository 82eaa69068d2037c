"""The self-test of matrix units as an engine's start runs it: on the stand-in, whose units can be made wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulators.rocm import standin

ROOT = Path(__file__).parents[2]

# Kernels are compiled by g++ on the first run.
pytestmark = pytest.mark.timeout(600)

STARTED = """
import json
import structlog
from structlog.testing import capture_logs
from benchmarks.parts.shapes import RandomCheckpoint, TINY
from services.engine.model.backend import on_gpu
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
import cupy, numpy as np
from kernels import ops_numpy
backend = on_gpu(0, "bf16", None, 16)
with capture_logs() as events:
    backend.prepare(TINY)
model, plain = Model(RandomCheckpoint.of(TINY), backend.ops, "bf16"), Model(RandomCheckpoint.of(TINY), ops_numpy)
rows = [Row(range(5, 75), 0, range(5), True)]
from services.engine.pages.private import private_pages
wanted = plain.forward(rows, private_pages(plain.geometry(16), 5))
memory = backend.private(model.geometry(16, "bf16"), 5)
found = cupy.asnumpy(model.forward(rows, backend.view(memory)))
backend.finish()
error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
units = {dict(key)["RF_MATRIX"] for (_, name, *key) in __import__("kernels.device.module").device.module._loaded
         if name in ("attention_decode", "attention_prefill")}
print(json.dumps({"units": backend.matrix_units(), "events": events, "error": error, "compiled": sorted(units)}))
"""


def started(fault: str) -> dict[str, Any]:
    environment = standin.environment(memory=64 << 20, fault=fault)
    done = subprocess.run(
        [sys.executable, "-c", STARTED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_amds_units_are_used_where_they_are_right() -> None:
    told = started("")
    assert (told["units"], told["compiled"]) == ("used", ["2"])
    assert told["error"] < 0.05
    [event] = [event for event in told["events"] if event["event"] == "matrix_units"]
    assert event["log_level"] == "info" and event["state"] == "used"


def test_units_that_are_wrong_are_told_and_not_used() -> None:
    told = started("matrix")
    # The first wrong kernel was compiled for the test; the model's steps used the scalar ones, and are right.
    assert (told["units"], told["compiled"]) == ("wrong", ["0", "2"])
    assert told["error"] < 0.05
    [event] = [event for event in told["events"] if event["event"] == "matrix_units_wrong"]
    assert event["log_level"] == "warning" and event["kernel"].startswith("attention_decode")
    assert event["error"] > 10 * event["bound"]


TUNED = """
import json, os, sys
from pathlib import Path
from structlog.testing import capture_logs
from benchmarks.parts.shapes import TINY
from kernels.device import tuning
from services.common.errors import InvalidConfiguration
from services.engine.model.backend import AUTO, on_gpu
path = Path(sys.argv[1])
group = TINY.query_heads // TINY.kv_heads
key = "BF16", "BF16", TINY.head_dim, group
chosen = tuning.Tuning({key: (False, False, 1)}, {(1, 64, 64, 2): 0, (2, 64, 64, 2): 3})
path.write_text(chosen.as_json("gfx942"))
told = {}
with capture_logs() as events:
    backend = on_gpu(0, "bf16", None, 16, tuned=str(path))
    backend.prepare(TINY)
told["events"], told["units"] = events, backend.matrix_units()
from kernels.linear import gemv
told["few"] = [backend.ops._few(gemv.Product(rows, 64, 64, 2)) for rows in (1, 2)]
path.write_text(chosen.as_json("gfx90a"))
try:
    on_gpu(0, "bf16", None, 16, tuned=str(path))
except InvalidConfiguration as error:
    told["error"] = error.message
path.rename(tuning.default_path("gfx942"))
with capture_logs() as events:
    told["ignored"] = on_gpu(0, "bf16", None, 16, tuned=AUTO).ops._tuned == tuning.NOTHING
told["warnings"] = events
tuning.default_path("gfx942").write_text(chosen.as_json("gfx942"))
told["found"] = on_gpu(0, "bf16", None, 16, tuned=AUTO).ops._tuned == chosen
told["off"] = on_gpu(0, "bf16", None, 16).ops._tuned == tuning.NOTHING
print(json.dumps(told))
"""


def test_an_engine_uses_the_kernels_of_the_tuning_file(tmp_path: Path) -> None:
    (tmp_path / "rocmforge").mkdir()
    environment = {**standin.environment(memory=64 << 20), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", TUNED, str(tmp_path / "t.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["units"] == "none"  # matrix units are right here, and the file says that scalar kernels are faster
    assert told["few"] == [False, True]
    assert [event["event"] for event in told["events"]] == ["tuning", "occupancy_unknown", "matrix_units"]
    assert "arch is 'gfx90a'; this GPU is gfx942" in told["error"] and told["error"].startswith("--tuning ")
    [event] = told["warnings"]
    assert (event["event"], event["log_level"], told["ignored"]) == ("tuning_ignored", "warning", True)
    assert told["found"] and told["off"]
