"""`python -m services.engine doctor`: which checks it makes, and the whole of it beside a daemon."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.doctor.check import Status, run
from services.engine import doctor
from services.engine.config import BUNDLED_MODEL, Config
from tests.doctor.fakes import CUDA, ROCM, FakeMachine
from tests.processes import ROOT, kvcache


def config(tmp_path: Path, *flags: str) -> Config:
    return Config.read(["--listen", f"unix:{tmp_path}/e.sock", "--kvcache", f"unix:{tmp_path}/k.sock", *flags], {})


def statuses(machine: FakeMachine, config: Config, peer: int | None = None) -> dict[str, Status]:
    return {name: finding.status for name, finding in run(doctor.checks(machine, config, peer))}


def on_gpu(tmp_path: Path, *flags: str) -> Config:
    return config(tmp_path, "--device", "gpu", *flags)


def machine(tmp_path: Path, **environ: Any) -> FakeMachine:
    one = FakeMachine(**environ).folder(str(tmp_path)).prints("roundtrip", {"error": ""})
    one.connecting[f"unix:{tmp_path}/k.sock"] = 0
    return one


def test_without_a_gpu(tmp_path: Path) -> None:
    found = statuses(machine(tmp_path), config(tmp_path))
    assert {found[name] for name in ("listen", "open files", "model", "KV-cache daemon")} == {Status.OK}
    assert {status for name, status in found.items() if "GPU" in name or "kernel" in name} == {Status.SKIPPED}


def test_the_address_of_metrics_is_looked_at(tmp_path: Path) -> None:
    taken = machine(tmp_path)
    assert "metrics" not in statuses(taken, config(tmp_path))
    assert statuses(taken, config(tmp_path, "--metrics", "127.0.0.1:9464"))["metrics"] is Status.OK
    taken.binding["127.0.0.1:9464"] = errno.EADDRINUSE
    assert statuses(taken, config(tmp_path, "--metrics", "127.0.0.1:9464"))["metrics"] is Status.FAILED


def test_with_all_that_a_gpu_needs(tmp_path: Path) -> None:
    good = machine(tmp_path, CUPY_CACHE_DIR=str(tmp_path)).amd().stack(ROCM).process("self").process(7, {})
    good.programs["hipcc"] = "/opt/rocm/bin/hipcc"
    assert set(statuses(good, on_gpu(tmp_path), 7).values()) == {Status.OK}


def test_a_rocm_without_its_compiler(tmp_path: Path) -> None:
    bare = machine(tmp_path).amd().stack(ROCM)
    bare.read_only.add("/")
    found = statuses(bare, on_gpu(tmp_path))
    assert found["kernel compiler"] is found["kernel cache"] is Status.FAILED
    assert statuses(machine(tmp_path).nvidia().stack(CUDA), on_gpu(tmp_path))["kernel compiler"] is Status.OK


def test_a_gpu_that_the_runtime_does_not_have(tmp_path: Path) -> None:
    found = statuses(machine(tmp_path).amd().stack(ROCM), on_gpu(tmp_path, "--gpu", "1"))
    assert found["GPU runtime"] is Status.FAILED and found["GPU memory, for real"] is Status.SKIPPED


def test_a_model_that_is_not_there_and_no_daemon(tmp_path: Path) -> None:
    bad = machine(tmp_path)
    bad.connecting.clear()
    found = statuses(bad, config(tmp_path, "--model", str(tmp_path / "none")))
    assert found["model"] is found["KV-cache daemon"] is Status.FAILED
    shutil.copytree(BUNDLED_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    found = statuses(bad, config(tmp_path, "--model", str(tmp_path / "model")))
    assert found["model"] is Status.FAILED
    found = statuses(bad, config(tmp_path, "--kvcache", "local"))
    assert found["KV-cache daemon"] is Status.SKIPPED


def doctored(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.engine", "doctor", *words]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=100)


def test_beside_its_daemon(tmp_path: Path) -> None:
    with kvcache(tmp_path) as daemon:
        flags = ["--listen", f"unix:{tmp_path}/e.sock", "--kvcache", daemon.address, "--model", str(BUNDLED_MODEL)]
        done = doctored("--peer", str(daemon.pid), *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "kvcache.sock answers" in " ".join(done.stdout.split())
        assert f"process {daemon.pid} shares ipc, pid, net" in done.stdout
        daemon.stop()
        gone = doctored(*flags)
        assert gone.returncode == 1 and "-> start the daemon (python -m services.kvcache)" in gone.stdout
    assert not (tmp_path / "e.sock").exists()


def test_help_tells_its_own_flags() -> None:
    done = doctored("--help")
    assert done.returncode == 0
    for words in ("--peer PID", "--json", "Exit status: 0", "python -m services.engine"):
        assert words in done.stdout
