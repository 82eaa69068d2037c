"""The wheel from a clean copy of the sources, installed outside the checkout: it runs, and installs one name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.healthcheck import wait_serving
from services.version import VERSION
from tests.contract.archives import unpack
from tests.processes import ROOT, START_S

pytestmark = [pytest.mark.needs("git", "venv"), pytest.mark.timeout(600)]

#: Names that others install too: the application must not take theirs for its own, nor hide them from users.
TAKEN = ("services", "kernels", "models", "scripts")
PROTO = "protos/rocmforge/engine/v1/engine.proto"


def clean_copy(folder: Path) -> Path:
    """The tracked files as they are here, without anything that is generated."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), str(source))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_copy(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = build(source, out)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def client(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of clients/python, which the other one needs."""
    out = tmp_path_factory.mktemp("client")
    done = build(source / "clients" / "python", out)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def scripts(wheel: Path, client: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the console scripts, in an environment that has the dependencies and nothing of the checkout.

    Somebody else's packages are installed there under the names of ours.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    installed = next((home / "venv" / "lib").glob("python*/site-packages"))
    (home / "dependencies").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        # Nor are .pth files read there, such as the one of the editable checkout.
        if not path.name.lower().startswith(("rocmforge", "_rocmforge")):
            (home / "dependencies" / path.name).symlink_to(path)
    (installed / "dependencies.pth").write_text(f"{home / 'dependencies'}\n")
    for name in TAKEN:
        (installed / name).mkdir()
        (installed / name / "__init__.py").write_text("OWNER = 'somebody else'\n")
    done = pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel), str(client))
    assert done.returncode == 0, done.stdout + done.stderr
    return python.parent


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A current folder in which every name of ours is a trap; its own name is short, for sockets."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        for taken in TAKEN:
            Path(name, taken).mkdir()
            Path(name, taken, "__init__.py").write_text("raise ImportError('imported from the current folder')\n")
        yield Path(name)


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROCMFORGE"))}
    return {**kept, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}


def run(program: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *words], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120
    )


@contextlib.contextmanager
def serving(program: Path, address: str, *words: str, folder: Path) -> Iterator[None]:
    log = folder / f"{program.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), "--listen", address, *words],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        try:
            wait_serving(address, alive=lambda: process.poll() is None, timeout_s=START_S)
        except (ChildProcessError, TimeoutError) as error:
            raise AssertionError(f"{error}\n{log.read_text()}") from error
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"rocmforge", f"rocmforge-{VERSION}.dist-info"}
    # A namespace: other distributions put packages into it.
    assert "rocmforge/__init__.py" not in names
    assert "rocmforge/_app/services/kvcache/__main__.py" in names
    assert "rocmforge/_app/kernels/hip/common.h" in names
    assert "rocmforge/_app/models/shakespeare/model.safetensors" in names
    assert "rocmforge/engine/v1/engine_pb2_grpc.py" in names
    assert not [name for name in names if name.startswith(("rocmforge/kvcache/", "rocmforge/client/"))], "the client's"
    assert not [name for name in names if "__pycache__" in name or name.endswith(".proto")]


def test_no_file_is_in_both_wheels(wheel: Path, client: Path) -> None:
    names, others = (set(zipfile.ZipFile(one).namelist()) for one in (wheel, client))
    assert {"rocmforge/client/cache.py", "rocmforge/kvcache/v1/kvcache_pb2_grpc.py"} <= others
    assert not names & others and not [name for name in others if "_app" in name]


def test_the_client_is_built_from_its_source_distribution_alone(source: Path, client: Path, tmp_path: Path) -> None:
    folder = source / "clients" / "python"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    unpack(archive, tmp_path)
    done = build(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(made).namelist()) == set(zipfile.ZipFile(client).namelist())


def test_both_services_and_a_generation(scripts: Path, elsewhere: Path) -> None:
    daemon, engine = f"unix:{elsewhere}/k.sock", f"unix:{elsewhere}/e.sock"
    kvcache = ("--arena-dir", str(elsewhere / "arena"), "--memory", "64MiB")
    with serving(scripts / "rocmforge-kvcache", daemon, *kvcache, folder=elsewhere):
        with serving(scripts / "rocmforge-engine", engine, "--kvcache", daemon, folder=elsewhere):
            words = ("generate", "--target", engine, "--temperature", "0", "--max-tokens", "8", "ROMEO:")
            done = run(scripts / "rocmforge", *words, folder=elsewhere)
            assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
            done = run(scripts / "rocmforge", "healthcheck", engine, folder=elsewhere)
            assert (done.returncode, done.stdout) == (0, "SERVING\n")


def test_the_doctor_starts_its_child_processes(scripts: Path, elsewhere: Path) -> None:
    words = ("doctor", "kvcache", "--json", "--arena-dir", str(elsewhere / "arena"))
    done = run(scripts / "rocmforge", *words, folder=elsewhere)
    found = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found["shared memory, for real"]["status"] == "ok", done.stdout + done.stderr


def test_the_demo(scripts: Path, elsewhere: Path) -> None:
    done = run(scripts / "rocmforge", "demo", folder=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "48 of 51 tokens" in done.stdout and done.stdout.endswith("Both stopped.\n")


@pytest.mark.parametrize("program", ["rocmforge", "rocmforge-engine", "rocmforge-kvcache"])
def test_every_program_has_a_version_and_help_of_its_own_name(scripts: Path, elsewhere: Path, program: str) -> None:
    done = run(scripts / program, "--version", folder=elsewhere)
    assert (done.returncode, done.stdout) == (0, f"rocmforge {VERSION}\n")
    done = run(scripts / program, "--help", folder=elsewhere)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {program} ")
    assert "python -m" not in done.stdout


def test_other_packages_of_these_names_are_their_owners(scripts: Path, tmp_path: Path) -> None:
    code = f"import importlib; print({{importlib.import_module(name).OWNER for name in {TAKEN}}})"
    done = run(scripts / "python", "-c", code, folder=tmp_path)
    assert done.stdout == "{'somebody else'}\n", done.stderr


@pytest.mark.parametrize("broken", ["syntax = nonsense;\n", None])
def test_a_proto_that_does_not_compile_or_is_missing_fails_the_build(
    source: Path, tmp_path: Path, broken: str | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    if broken is None:
        (copy / PROTO).unlink()
    else:
        (copy / PROTO).write_text(broken)
    done = build(copy, tmp_path / "out")
    assert done.returncode != 0
    assert "engine.proto" in done.stdout + done.stderr
    assert not list(tmp_path.glob("out/*.whl"))
