"""BLAS computes small models on the calling thread, unless told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels import blas

ROOT = Path(__file__).parents[2]
OPENBLAS = sys.platform == "linux" and "openblas" in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]  # type: ignore[call-overload, index]

LOAD = """
from kernels import blas
from services.engine.model import Model
Model.load("models/shakespeare")
print(blas.threads())
"""


def threads_after_loading(**environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in blas.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_a_small_model_is_computed_on_one_thread() -> None:
    assert threads_after_loading() == ("1" if OPENBLAS else "None")


@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_the_environment_has_the_last_word(variable: str) -> None:
    assert threads_after_loading(**{variable: "2"}) == ("2" if OPENBLAS else "None")


def test_without_openblas_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in blas.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(blas, "_libraries", list)
    assert blas.use_one_thread() is False
    assert blas.threads() is None
