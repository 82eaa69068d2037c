"""`python -m services.kvcache doctor`: which checks it makes, and the whole of it on this machine."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from services.doctor.check import Status, run
from services.kvcache import doctor
from services.kvcache.config import Config
from tests.doctor.fakes import ROCM, FakeMachine
from tests.processes import ROOT, Service, engine, kvcache

GPU_CHECKS = ["GPU device nodes", "GPUs that are visible", "CuPy", "GPU runtime", "GPU memory", "sharing of GPU memory"]


def config(tmp_path: Path, *flags: str) -> Config:
    return Config.read(["--listen", f"unix:{tmp_path}/k.sock", "--arena-dir", f"{tmp_path}/arena", *flags], {})


def statuses(machine: FakeMachine, config: Config, peer: int | None = None) -> dict[str, Status]:
    return {name: finding.status for name, finding in run(doctor.checks(machine, config, peer))}


def machine(tmp_path: Path, **environ: str) -> FakeMachine:
    return FakeMachine(**environ).folder(str(tmp_path)).prints("roundtrip", {"error": ""})


def test_a_cpu_daemon_is_not_asked_for_a_gpu(tmp_path: Path) -> None:
    found = statuses(machine(tmp_path), config(tmp_path))
    gpu = {name: status for name, status in found.items() if "GPU" in name or name == "CuPy"}
    assert set(gpu.values()) == {Status.SKIPPED} and set(gpu) >= set(GPU_CHECKS)
    assert {found[name] for name in ("listen", "shared memory", "shared memory, for real", "open files")} == {Status.OK}


def test_the_address_of_metrics_is_looked_at(tmp_path: Path) -> None:
    taken = machine(tmp_path)
    assert "metrics" not in statuses(taken, config(tmp_path))
    assert statuses(taken, config(tmp_path, "--metrics", "127.0.0.1:9464"))["metrics"] is Status.OK
    taken.binding["127.0.0.1:9464"] = errno.EADDRINUSE
    assert statuses(taken, config(tmp_path, "--metrics", "127.0.0.1:9464"))["metrics"] is Status.FAILED


def test_a_gpu_daemon_lacks_a_gpu(tmp_path: Path) -> None:
    broken = machine(tmp_path).prints("probe", {"error": "no CuPy"})
    found = statuses(broken, config(tmp_path, "--device", "gpu"))
    assert found["GPU device nodes"] is found["CuPy"] is Status.FAILED


def test_a_gpu_daemon_with_all_it_needs(tmp_path: Path) -> None:
    good = machine(tmp_path).amd().stack(ROCM).process("self").process(7, {})
    found = statuses(good, config(tmp_path, "--device", "gpu", "--memory", "100GiB"), peer=7)
    assert set(found.values()) == {Status.OK}
    assert "shared memory" not in found, "its pages are not there"
    assert found["GPU memory, for real"] is Status.OK


def test_a_gpu_budget_beyond_the_gpu(tmp_path: Path) -> None:
    found = statuses(machine(tmp_path).amd().stack(ROCM), config(tmp_path, "--device", "gpu", "--memory", "1TiB"))
    assert found["GPU memory"] is Status.FAILED


def test_a_gpu_that_is_there_and_not_asked_for_only_warns(tmp_path: Path) -> None:
    broken = machine(tmp_path).device("/dev/kfd").prints("probe", {"error": "no CuPy"})
    found = statuses(broken, config(tmp_path))
    assert found["GPU device nodes"] is found["CuPy"] is Status.WARNING
    assert Status.FAILED not in found.values()


# --- the whole --------------------------------------------------------------------------------------------------------


def doctored(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.kvcache", "doctor", *words],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=250,
    )


def flags(tmp_path: Path) -> list[str]:
    return ["--listen", f"unix:{tmp_path}/k.sock", "--arena-dir", f"{tmp_path}/arena", "--memory", "1MiB"]


def test_this_machine_can_run_a_daemon(tmp_path: Path) -> None:
    done = doctored(*flags(tmp_path), "--peer", str(os.getpid()))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("The KV-cache daemon with --device cpu --memory 1048576:")
    assert any(line.startswith("ok       shared memory, for real") for line in lines)
    assert any(line.startswith("ok       namespaces") for line in lines)
    assert "FAILED" not in done.stdout and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_json_is_an_object_a_check(tmp_path: Path) -> None:
    done = doctored("--json", *flags(tmp_path))
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(told) > 10
    assert all(set(one) == {"check", "status", "found", "change"} for one in told)
    assert {one["status"] for one in told} <= {"ok", "warning", "skipped"}


def addresses_of(*told: str) -> list[str]:
    return [word for address in told for word in ("--listen", address)]


def test_what_its_own_running_service_holds_is_no_failure(tmp_path: Path) -> None:
    with kvcache(tmp_path, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0") as daemon:
        tcp = daemon.tcp()
        metrics = daemon.started()["metrics"]
        words = [*addresses_of(daemon.address, tcp), "--metrics", metrics, "--arena-dir", f"{tmp_path}/arena"]
        done = doctored(*words, "--memory", "1MiB", "--json")
        assert done.returncode == 0, done.stdout
        found = [json.loads(line)["found"] for line in done.stdout.splitlines()]
        assert [one for one in found if "in use" in one] == [
            f"{address} is in use by the running KV-cache daemon" for address in (daemon.address, tcp, metrics)
        ]
        assert alive(daemon)


def test_what_another_holds_fails(tmp_path: Path) -> None:
    """Another program, and the other service, on the address meant for this one."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        engine(tmp_path, "local", "--metrics", "127.0.0.1:0", model=ROOT / "models" / "shakespeare") as other,
    ):
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        metrics = other.started()["metrics"]
        words = [*addresses_of(other.address, silent), "--metrics", metrics, "--arena-dir", f"{tmp_path}/arena"]
        done = doctored(*words, "--memory", "1MiB", "--json")
        told = [json.loads(line) for line in done.stdout.splitlines()]
        found = [one["found"] for one in told if one["status"] == "failed"]
        assert done.returncode == 1
        assert found == [f"{address} is in use" for address in (other.address, silent, metrics)]


def test_a_service_that_takes_certificates_is_known_by_its_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    pairs = {}
    for name in ("own", "another"):
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        pairs[name] = ["--tls-cert", f"{tmp_path}/{name}.pem", "--tls-key", f"{tmp_path}/{name}.key"]
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca = ["--tls-client-ca", f"{tmp_path}/ca.pem"]
    with kvcache(tmp_path, "--listen", "127.0.0.1:0", *pairs["own"], *ca) as daemon:
        words = [*addresses_of(daemon.tcp()), "--arena-dir", f"{tmp_path}/arena", "--memory", "1MiB"]
        done = doctored(*words, *pairs["own"], *ca)
        assert done.returncode == 0 and "in use by the running KV-cache daemon" in " ".join(done.stdout.split())
        assert doctored(*words, *pairs["another"], *ca).returncode == 1


def alive(daemon: Service) -> bool:
    return daemon.process.poll() is None and not daemon.events("kvcache_stopped")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "much"], "rocmforge kvcache: --memory much: expected a size"),
        (["--device", "tpu"], "rocmforge kvcache: --device tpu: expected cpu or gpu"),
        (["--peer", "me"], "'me' is not a process id"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_flags_that_cannot_be_end_with_status_2(words: list[str], told: str) -> None:
    done = doctored(*words)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_settings_come_from_the_environment_too(tmp_path: Path) -> None:
    done = doctored(*flags(tmp_path), ROCMFORGE_KVCACHE_DEVICE="gpu", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "FAILED   GPUs that are visible" in done.stdout
    assert "HIP_VISIBLE_DEVICES is '': it hides every GPU" in done.stdout


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m services.kvcache doctor {' '.join(flags(tmp_path))} | head -1"
    done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith("The KV-cache daemon") and done.stderr == ""
