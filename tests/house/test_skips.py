"""The rule of tests/conftest.py: in CI a skip that is not for lack of a GPU fails the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_pytest(folder: Path, body: str, ci: str, gpu: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest on one test file, beside our conftest.py and nothing else of ours."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_sample.py").write_text(f"import pytest\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    environment = {**os.environ, "CI": ci, "ROCMFORGE_TEST_GPU": gpu}
    return subprocess.run([*command, "."], cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


SKIPPED = "@pytest.mark.skip(reason='{}')\ndef test_one():\n    pass\n"


@pytest.mark.parametrize(
    ("body", "ci", "code"),
    [
        (SKIPPED.format("no network"), "true", 1),
        (SKIPPED.format("no network"), "", 0),
        (SKIPPED.format("no GPU: cupy is not installed"), "true", 0),
        ("def test_one():\n    pytest.skip('no reason')\n", "true", 1),
        ("pytest.importorskip('there_is_no_such_module')\n", "true", 1),
        ("@pytest.mark.xfail\ndef test_one():\n    raise ValueError\n", "true", 0),
        ("def test_one():\n    pass\n", "true", 0),
    ],
)
def test_only_a_missing_gpu_excuses_a_skip_in_ci(tmp_path: Path, body: str, ci: str, code: int) -> None:
    (tmp_path / "test_other.py").write_text("def test_that_passes():\n    pass\n")
    done = run_pytest(tmp_path, body, ci)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("CI fails on these" in done.stdout) == (code == 1), done.stdout


@pytest.mark.parametrize(
    ("reason", "code"),
    [("no GPU: cupy is not installed", 1), ("no GPU 1: there are 1", 0), ("no network", 1)],
)
def test_a_run_for_the_gpu_fails_without_one(tmp_path: Path, reason: str, code: int) -> None:
    done = run_pytest(tmp_path, SKIPPED.format(reason) + "\ndef test_two():\n    pass\n", "", gpu="1")
    assert done.returncode == code, done.stdout + done.stderr
    assert ("a run for the GPU fails on these" in done.stdout) == (code == 1), done.stdout
