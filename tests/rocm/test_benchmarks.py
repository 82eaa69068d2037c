"""Benchmarks that are for a GPU, on the stand-in: they run and say what they should. No time means anything: each is
taken a few times only; a step is replayed from the third on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulators.rocm import standin

ROOT = Path(__file__).parents[2]

# Kernels are compiled by g++ on the first run.
pytestmark = pytest.mark.timeout(600)


def rows(code: str, idle: bool) -> list[dict[str, object]]:
    """What a benchmark prints as JSON."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=standin.environment(memory=256 << 20, idle=idle), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


LAUNCHES = """
import json
from benchmarks import launches
from kernels.replay.tapes import Tapes
made, begin = [], Tapes.__init__
Tapes.__init__ = lambda self, *arguments: made.append(self) or begin(self, *arguments)
launches.main(["--json", "--layers", "1", "--steps", "10"])
print(json.dumps({name: sum(getattr(tapes, name) for tapes in made) for name in ("recorded", "replayed")}))
"""


def test_what_starting_a_step_costs_the_host() -> None:
    *found, tapes = rows(LAUNCHES, idle=True)
    assert [row["name"] for row in found] == [
        "a kernel alone", "a product alone",
        "decode of 1, 1 layers, one by one", "decode of 1, 1 layers, from tapes",
        "decode of 16, 1 layers, one by one", "decode of 16, 1 layers, from tapes",
        "a prompt's last 16 tokens, 1 layers, one by one", "a prompt's last 16 tokens, 1 layers, from tapes",
    ]  # fmt: skip
    assert all(float(str(row["value"])) > 0 for row in found)
    assert all(float(str(found[at]["ratio"])) > 0 for at in (3, 5, 7))
    # What is measured as replayed is: steps of three kinds, ten of each at least.
    assert tapes["recorded"] == 3 and int(str(tapes["replayed"])) >= 30


ARENA = """
from benchmarks.parts import arena, rows, steps
from benchmarks.parts.shapes import TINY
from benchmarks.parts.stand import Stand
arena.WARM, arena.RUNS, steps.WARM, steps.STEPS = 1, 2, 2, 3
for row in arena.measure(Stand.on_gpu(TINY, "48MiB"), "tiny", (1, 3), 40):
    print(rows.as_json(row))
"""


def test_the_daemons_memory_beside_ones_own() -> None:
    found = rows(ARENA, idle=False)
    assert [str(row["name"]).removeprefix("tiny, ") for row in found] == [
        "copy", "attention, pages as they are", "attention, pages of a layer each", "decode of 1", "decode of 3"
    ]  # fmt: skip
    assert all(float(str(row["value"])) > 0 and float(str(row["ratio"])) > 0 for row in found)


FLIPS = """
from benchmarks.parts import flips, rows, steps
from benchmarks.parts.shapes import TINY
from benchmarks.parts.stand import Stand
flips.InvariantOps.ROWS, steps.WARM, steps.STEPS = 8, 2, 3
as_it_is, invariant = Stand.on_gpu(TINY), Stand.on_gpu(TINY, make_ops=flips.InvariantRandomOps)
prompts = flips.arbitrary(as_it_is, 4, 20)
for stand, name in ((as_it_is, "tiny"), (invariant, "invariant")):
    for row in flips.measure(stand, name, prompts, 4, (3,)):
        print(rows.as_json(row))
for row in flips.costs(invariant, as_it_is, "tiny", (1,), 40):
    print(rows.as_json(row))
"""


def test_tokens_that_depend_on_their_company() -> None:
    *found, cost = rows(FLIPS, idle=False)
    ways = ["alone again", "batches of 3", "prompts in chunks of 6", "after a prefix hit"]
    assert [row["name"] for row in found] == [f"{name}, {way}" for name in ("tiny", "invariant") for way in ways]
    # A product of the stand-in is the same in any batch, and so is one that always has the same rows.
    assert [row["value"] for row in found if "invariant" in str(row["name"]) or "again" in str(row["name"])] == [0] * 5
    assert cost["name"] == "tiny, invariant, decode of 1" and float(str(cost["ratio"])) > 0
