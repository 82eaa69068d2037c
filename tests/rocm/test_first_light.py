"""First light on the stand-in: it runs to its end, and each fault comes out as a sentence of the report."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.device import tuning
from tests.gpus import environment
from tests.simulators.rocm import standin

ROOT = Path(__file__).parents[2]

# Kernels are compiled by g++ on the first run.
pytestmark = pytest.mark.timeout(900)


def first_light(folder: Path, *flags: str, fault: str = "", status: int = 1) -> tuple[dict[str, Any], str]:
    """The JSON of a run, and its page."""
    # Memory of its own, so that what is free is nobody else's.
    env = environment(standin.environment(memory=256 << 20, fault=fault))
    command = [sys.executable, "-m", "services.doctor", "first-light", "--tiny", "--out", str(folder), *flags]
    if "--limit-factor" not in flags:
        command += ["--limit-factor", "6"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-2000:]
    data: dict[str, Any] = json.loads((folder / "first-light.json").read_text())
    return data, (folder / "first-light.md").read_text()


def failures(data: dict[str, Any]) -> list[str]:
    """What failed, in order."""
    return [one["sentence"] for step in data["steps"] for one in step["found"] if one["result"] == "failed"]


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    data, page = first_light(tmp_path, status=0)
    assert [step["state"] for step in data["steps"]] == ["passed"] * 8
    assert failures(data) == []
    assert "Everything passed." in page
    machine = data["machine"]
    assert (machine["architecture"], machine["runtime"], machine["wave"]) == ("gfx942", "HIP", 64)
    sentences = [one["sentence"] for step in data["steps"] for one in step["found"]]
    for said in (
        "200 handles open at a time: both processes saw",
        "kill -9 of the owner",
        "sampling, top-p: NumPy's tokens",
        "right with matrix units",
        "tapes: 8 steps were replayed",
        "greedy tokens of the bundled model on the GPU",
        "the tuning file is one that an engine takes",
    ):
        assert any(said in sentence for sentence in sentences), said
    # Nothing tells whose machine it was.
    for text in (json.dumps(data), page):
        assert str(tmp_path) not in text and str(ROOT) not in text
        assert socket.gethostname() not in text and str(Path.home()) not in text
    # What was chosen of shapes without a meaning is not where engines look for it, and is a file that they take.
    tuned = tuning.read(tmp_path / "tuning.json", "gfx942")
    assert {key[:2] for key in tuned.attention} == {("BF16", "INT8"), ("BF16", "BF16")}


@pytest.mark.parametrize(
    ("inject", "step", "said"),
    [
        ("wrong-bytes", "sharing", "the other process saw 1 wrong words in buffer 0"),
        ("refused-handle", "sharing", "1 handle: GPU 0: ipcOpenMemHandle: "),
        ("wrong-ordinal", "sharing", "GPU 0 is 0000:03:00.0 in one process and another GPU in the other"),
        ("slow-memory", "bandwidth", "memory that another process owns is slow"),
    ],
)
def test_a_fault_is_a_sentence(tmp_path: Path, inject: str, step: str, said: str) -> None:
    data, page = first_light(tmp_path, "--only", step, "--inject", inject)
    assert said in failures(data)[0]
    assert said in page


def test_a_hang_is_a_sentence_and_the_last(tmp_path: Path) -> None:
    flags = ("--only", "sharing", "--only", "bandwidth", "--inject", "hang", "--limit-factor", "0.15")
    data, page = first_light(tmp_path, *flags)
    assert [step["state"] for step in data["steps"]] == ["hung", "not run"]
    assert "no end within 27 s" in failures(data)[0] and "the GPU may need a reset" in page


@pytest.mark.parametrize(
    ("fault", "step", "said"),
    [
        (
            "handles",
            "sharing",
            "40 handles open at a time: the other process saw 1024 wrong words in buffer 35; it shows",
        ),
        ("matrix", "arithmetic", "attention_decode, tiles of 16 with matrix units is wrong by"),
    ],
)
def test_a_fault_of_the_machine_is_a_sentence(tmp_path: Path, fault: str, step: str, said: str) -> None:
    data, _ = first_light(tmp_path, "--only", step, fault=fault)
    assert said in failures(data)[0]
