"""The rule of tests/fast.py: what starts a process, compiles or searches is not fast, however it comes by it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast import FOLLOWED, ROOT, SLOW, is_fast


@pytest.mark.parametrize(
    ("source", "fast"),
    [
        ("import json\nfrom services.kvcache import cache", True),
        ("import subprocess", False),
        ("def late():\n    from subprocess import run", False),
        ("from hypothesis import given", True),
        ("from hypothesis.stateful import rule", False),
        ("from tests.engine import starter", False),
        ("from tests.engine.middle import start", False),
        ("from tests.engine.plain import start", True),
        ("import benchmarks.peers", False),
        ("from tests.engine.running import RunningEngine", False),
    ],
)
def test_a_file_is_as_fast_as_what_it_imports(tmp_path: Path, source: str, fast: bool) -> None:
    files = {
        "tests/engine/test_it.py": source,
        "tests/engine/starter.py": "import subprocess",
        "tests/engine/middle.py": "from tests.engine.plain import x\nfrom tests.engine.starter import start",
        "tests/engine/plain.py": "from tests.engine.plain import start",
        "benchmarks/peers.py": "import multiprocessing",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert is_fast(tmp_path / "tests/engine/test_it.py", tmp_path) == fast
    (tmp_path / "tests/engine/conftest.py").write_text("import subprocess")
    assert not is_fast(tmp_path / "tests/engine/test_it.py", tmp_path)


def test_what_hypothesis_runs_is_left_out_and_so_are_files_that_are_slow() -> None:
    files = ["tests/engine/checkpoint/gguf/test_merges.py", "tests/engine/test_engine_process.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "--fast", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    names = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
    source = (ROOT / files[0]).read_text(encoding="utf-8")
    given = re.findall(r"^@given.*\ndef (\w+)", source, re.MULTILINE)
    assert done.returncode == 0 and names and given and not set(names) & set(given), done.stdout


def test_the_rule_knows_the_suite() -> None:
    files = {path.relative_to(ROOT).as_posix(): is_fast(path) for path in (ROOT / "tests").rglob("test_*.py")}
    assert not files["tests/engine/api/test_servicer.py"]  # which serves an engine
    assert files["tests/engine/scheduling/test_scheduler.py"] and files["tests/kvcache/cache/test_cache.py"]
    for folder in ("e2e", "gpu", "rocm"):
        assert not any(fast for name, fast in files.items() if name.startswith(f"tests/{folder}/")), folder
    assert not files["tests/simulators/cpu/test_executor.py"] and not files["tests/kernels/hip/test_norm.py"]


def test_every_slow_module_of_ours_exists() -> None:
    ours = [name for name in SLOW if name.split(".")[0] in FOLLOWED]
    assert ours and all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in ours)
