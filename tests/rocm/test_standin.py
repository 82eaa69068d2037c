"""The build of the stand-in, and the wheel on it as a whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulators.rocm import standin

ROOT = Path(__file__).parents[2]


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


def test_the_wheel_is_the_pinned_one_and_takes_itself_to_be_on_rocm(machine: dict[str, str]) -> None:
    pinned = re.search(r"^cupy-rocm-7-0==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    code = "import cupy; print(cupy.__version__, cupy.cuda.runtime.is_hip, cupy.cuda.runtime.runtimeGetVersion())"
    done = python(code, machine)
    assert done.stdout.split() == [pinned[1], "True", "70051831"], done.stderr


def test_every_extension_of_the_wheel_loads_with_all_its_symbols(machine: dict[str, str]) -> None:
    code = """
import importlib, pathlib
import cupy
root = pathlib.Path(cupy.__file__).parents[1]
files = sorted(root.rglob("*.so"))
for file in files:
    name = ".".join(file.relative_to(root).parts).partition(".cpython")[0]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
print(len(files), "extensions")
"""
    done = python(code, {**machine, "LD_BIND_NOW": "1"})
    *problems, last = done.stdout.splitlines()
    # The only one that needs a package which the product does without.
    assert [line for line in problems if "scipy" not in line] == [], done.stderr
    assert int(last.split()[0]) > 50


def test_what_is_not_there_says_so(machine: dict[str, str]) -> None:
    done = python("import cupy; cupy.cuda.profiler.start()", machine)
    assert done.returncode == -6
    assert "stand-in HIP: roctracer_start is not there" in done.stderr
    done = python("import cupy; cupy.sort(cupy.zeros(10))", machine)
    assert done.returncode == -6
    assert re.search(r"stand-in HIP: \w+ is not there", done.stderr)


def test_each_environment_is_a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HSA_ENABLE_IPC_MODE_LEGACY", "1")
    first, second = standin.environment(wave=32), standin.environment()
    assert standin.machine_of(first) != standin.machine_of(second)
    assert standin.machine_of(standin.environment(machine="mine")) == "mine"
    # Kernels of one wave are not found by a process with another.
    assert first["CUPY_CACHE_DIR"] != second["CUPY_CACHE_DIR"]
    assert "HIP_VISIBLE_DEVICES" not in first
    assert "HSA_ENABLE_IPC_MODE_LEGACY" not in first


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HIPSTANDIN_WAVE", "48", "32 or 64 lanes"),
        ("HIPSTANDIN_DEVICES", "two", "no whole number"),
        ("HIPSTANDIN_MEMORY", "1GiB", "no whole number"),
        ("HIPSTANDIN_MACHINE", "a/b", "without dots and slashes"),
    ],
)
def test_a_bad_setting_ends_the_process(machine: dict[str, str], variable: str, value: str, said: str) -> None:
    code = """
import ctypes
hip = ctypes.CDLL("libamdhip64.so.7")
hip.hipMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1))
hip.hipDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 87, 0)
"""
    done = python(code, {**machine, variable: value})
    assert done.returncode == -6
    assert f"{variable}={value}" in done.stderr
    assert said in done.stderr


def test_an_idle_one_checks_and_runs_nothing(machine: dict[str, str]) -> None:
    code = """
import cupy, numpy
from kernels.device import module
from kernels.linear import gemm
x = cupy.zeros((1, 64), numpy.float32)
x.set(numpy.ones((1, 64), numpy.float32))
out = cupy.empty((1, 32), numpy.float32)
out.set(numpy.full((1, 32), 7, numpy.float32))
loaded = module.load("activation", {"RF_TYPE": "F32"})
loaded.launch("silu_mul", (1, 1), 256, [x, out, numpy.int32(32)])
gemm.linear(x, cupy.empty((32, 64), numpy.float32), out)
print(cupy.asnumpy(out).tolist() == [[7.0] * 32])
loaded.launch("silu_mul", (1, 1), 2048, [x, out, numpy.int32(32)])
"""
    done = python(code, {**machine, "HIPSTANDIN_IDLE": "1"})
    assert done.stdout == "True\n", done.stderr
    assert "hipErrorInvalidConfiguration" in done.stderr
    assert standin.environment(idle=True)["HIPSTANDIN_IDLE"] == "1"


def test_it_is_built_once() -> None:
    folder = standin.build()
    before = (folder / "lib" / "libamdhip64.so.7").stat()
    assert standin.build() == folder
    after = (folder / "lib" / "libamdhip64.so.7").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "COMPILER", "no-such-compiler")
    with pytest.raises(standin.Unavailable, match="no-such-compiler is not installed"):
        standin.build()
    command = [sys.executable, "-m", "tests.simulators.rocm.standin"]
    env = {**os.environ, "CXX": "no-such-compiler"}
    for arguments, status in ([], 1), (["build"], 0):
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (status, "")
        assert "no-such-compiler is not installed" in done.stderr


def test_a_shell_can_take_the_environment_over() -> None:
    show = '"$PYTHON" -c "import cupy; print(cupy.cuda.runtime.is_hip)"'
    shell = f'eval "$("$PYTHON" -m tests.simulators.rocm.standin)" && {show}'
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.stdout == "True\n", done.stderr
