"""The kernels' tests once more on a real NVIDIA GPU, under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.gpus import ROOT, environment, gpu_or_skip

TOOLS = ("memcheck", "racecheck")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_touch_what_is_theirs_alone(tool: str) -> None:
    if gpu_or_skip().runtime.is_hip:
        pytest.skip("no GPU that compute-sanitizer can watch")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", "-k", "cupy"]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, env=environment(os.environ), capture_output=True, text=True, timeout=880
    )
    told = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, told
    assert re.search(r"\b[1-9]\d* passed", done.stdout), told
    assert re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", done.stdout + done.stderr), told
