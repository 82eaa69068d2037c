# mypy: disable-error-code="attr-defined"
"""The loader of kernels, on a CuPy that only records calls; tests/rocm and GPU tests use a real one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.device import module


class CupyDouble:
    """As much of CuPy as the loader uses; a wave has 64 lanes on device 0 and 32 on device 1."""

    def __init__(self) -> None:
        self.device = 0
        self.compiled: list[tuple[str, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(id=self.device),
            runtime=SimpleNamespace(
                is_hip=False, getDeviceProperties=lambda device: {"warpSize": 32 if device else 64}
            ),
        )

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:
        def compile_it() -> None:
            if self.fails:
                raise self.fails
            self.compiled.append(options)

        def function(name: str) -> Any:
            def kernel(grid: Any, block: Any, args: Any, **rest: Any) -> None:
                self.launches.append((name, grid, block, args, rest))

            return SimpleNamespace(kernel=kernel)

        return SimpleNamespace(compile=compile_it, get_function=function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> CupyDouble:
    double = CupyDouble()
    monkeypatch.setitem(sys.modules, "cupy", double)
    monkeypatch.setattr(module, "_loaded", {})
    return double


def test_a_source_is_compiled_once_for_a_device(cupy: CupyDouble) -> None:
    first = module.load("norm", {"RF_TYPE": "BF16"})
    assert module.load("norm", {"RF_TYPE": "BF16"}) is first
    assert module.load("norm", {"RF_TYPE": "F16"}) is not first
    cupy.device = 1
    assert module.load("norm", {"RF_TYPE": "BF16"}) is not first
    assert cupy.compiled == [
        ("-std=c++17", "-DRF_WAVE=64", "-DRF_TYPE=BF16"),
        ("-std=c++17", "-DRF_WAVE=64", "-DRF_TYPE=F16"),
        ("-std=c++17", "-DRF_WAVE=32", "-DRF_TYPE=BF16"),
    ]


def test_a_launch_is_as_it_was_asked_for(cupy: CupyDouble) -> None:
    pages = module.load("pages")
    pages.launch("zero_pages", 3, (32, 2), [None, np.int32(4)], shared=16, stream="a stream")
    pages.launch("zero_pages", (3, 1), 64, [])
    (name, grid, block, args, rest), second = cupy.launches
    assert (name, grid, block, rest) == ("zero_pages", (3,), (32, 2), {"shared_mem": 16, "stream": "a stream"})
    # A null pointer is a number as wide as one: of None CuPy makes no argument at all.
    assert [type(argument) for argument in args] == [np.intp, np.int32] and args == (0, 4)
    assert second == ("zero_pages", (3, 1), (64,), (), {"shared_mem": 0, "stream": None})
    for grid, block in ((0, 64), ((1, 0), 64), (1, 0)):
        with pytest.raises(ValueError, match="each extent must be at least 1"):
            pages.launch("zero_pages", grid, block, [])


def test_what_is_not_declared_is_not_compiled(cupy: CupyDouble) -> None:
    with pytest.raises(ValueError, match="kernel 'none': must be one of"):
        module.load("none")
    with pytest.raises(ValueError, match=r"norm\.hip: RF_TYPE=F64: must be one of F32, F16, BF16"):
        module.load("norm", {"RF_TYPE": "F64"})
    assert not cupy.compiled


def test_a_log_is_told_by_its_first_lines(cupy: CupyDouble) -> None:
    cupy.fails = RuntimeError("\n".join(f"line {number}" for number in range(100)))
    with pytest.raises(module.KernelError) as raised:
        module.load("norm", {"RF_TYPE": "BF16"})
    text = str(raised.value)
    assert text.startswith("norm.hip does not compile with -std=c++17 -DRF_WAVE=64 -DRF_TYPE=BF16:\nline 0\nline 1\n")
    assert text.endswith(f"line {module.LOG_LINES - 1}")
    # The next attempt is one.
    cupy.fails = None
    module.load("norm", {"RF_TYPE": "BF16"})


@pytest.mark.parametrize(
    ("is_hip", "found", "hinted"), [(True, None, True), (True, "/usr/bin/x", False), (False, None, False)]
)
def test_rocm_without_hipcc_is_told(
    cupy: CupyDouble, monkeypatch: pytest.MonkeyPatch, is_hip: bool, found: str | None, hinted: bool
) -> None:
    cupy.cuda.runtime.is_hip = is_hip
    cupy.fails = RuntimeError("Failed to get hipcc include dirs")
    monkeypatch.setattr(module.shutil, "which", lambda name: found)
    with pytest.raises(module.KernelError) as raised:
        module.load("norm", {"RF_TYPE": "BF16"})
    assert ("hipcc is not on PATH" in str(raised.value)) == hinted


def test_importing_it_imports_no_cupy() -> None:
    code = "import sys, kernels.device.module; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=module.source.FOLDER.parent).returncode == 0
