"""The bundle of protos compiles by itself, with protoc and with buf, and is reproducible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from scripts import protos_bundle
from services.version import VERSION
from tests import tools
from tests.contract.archives import unpack
from tests.processes import ROOT

BUF = ROOT / "build" / "npm" / "node_modules" / ".bin" / "buf"
OURS = ["rocmforge/engine/v1/engine.proto", "rocmforge/kvcache/v1/kvcache.proto"]
#: protoc without the protos that it brings with it.
BARE_PROTOC = "import sys; from grpc_tools import protoc; sys.exit(protoc.main(['protoc', *sys.argv[1:]]))"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return protos_bundle.write(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def unpacked(bundle: Path, tmp_path: Path) -> Path:
    """The bundle's folder, in an otherwise empty one."""
    unpack(bundle, tmp_path)
    [folder] = tmp_path.iterdir()
    return folder


def protos(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.proto"))


def test_it_has_our_protos_as_they_are(unpacked: Path) -> None:
    assert unpacked.name == bundle_name()
    assert [name for name in protos(unpacked) if name.startswith("rocmforge/")] == OURS
    for name in OURS:
        assert (unpacked / name).read_bytes() == (ROOT / "protos" / name).read_bytes()
    assert (unpacked / "google" / "rpc" / "error_details.proto").is_file()


def bundle_name() -> str:
    return f"rocmforge-protos-{VERSION}"


def test_protoc_compiles_it_with_nothing_else(unpacked: Path, tmp_path: Path) -> None:
    flags = ["-I.", "--python_out=made", "--grpc_python_out=made", f"--descriptor_set_out={tmp_path / 'set'}"]
    (unpacked / "made").mkdir()
    command = [sys.executable, "-I", "-c", BARE_PROTOC, *flags, *protos(unpacked)]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for name in OURS:
        assert (unpacked / "made" / name.replace(".proto", "_pb2_grpc.py")).is_file()


def test_protoc_misses_a_file_that_is_taken_out(unpacked: Path) -> None:
    """So the test above is one: this protoc brings no files of its own."""
    (unpacked / "google" / "protobuf" / "duration.proto").unlink()
    command = [sys.executable, "-I", "-c", BARE_PROTOC, "-I.", f"--descriptor_set_out={os.devnull}", OURS[0]]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, timeout=60)
    assert done.returncode and "google/protobuf/duration.proto" in done.stderr


def test_buf_builds_it(unpacked: Path, tmp_path: Path) -> None:
    tools.need("node")
    command = [tools.path_of("buf"), "build", "-o", str(tmp_path / "buf.binpb")]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = FileDescriptorSet.FromString((tmp_path / "buf.binpb").read_bytes())
    assert sorted(file.name for file in built.file) == protos(unpacked)


def test_the_descriptor_set_is_of_these_files(unpacked: Path) -> None:
    described = FileDescriptorSet.FromString((unpacked / "descriptor.binpb").read_bytes())
    assert sorted(file.name for file in described.file) == protos(unpacked)
    pool = DescriptorPool()
    for file in described.file:  # in an order in which they can be added
        pool.Add(file)
    assert pool.FindServiceByName("rocmforge.engine.v1.EngineService").methods_by_name["Generate"]
    [engine] = [file for file in described.file if file.name == OURS[0]]
    assert any("Streams generated text." in place.leading_comments for place in engine.source_code_info.location)


def test_the_same_protos_make_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    """In another process, with another umask, of files of another time, from elsewhere."""
    copy = tmp_path / "elsewhere"
    for name in ("protos", "scripts"):
        shutil.copytree(ROOT / name, copy / name, copy_function=shutil.copy)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    script = "import os, sys; os.umask(0o077); from scripts.protos_bundle import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(copy), "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = copy / done.stdout.strip()
    assert made.name == bundle.name == f"{bundle_name()}.tar.gz"
    assert made.read_bytes() == bundle.read_bytes()
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_proto_that_does_not_compile_makes_no_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    broken = tmp_path / "protos" / OURS[0]
    broken.write_text(broken.read_text() + "message Broken { Nothing nothing = 1; }\n")
    monkeypatch.setattr(protos_bundle, "ROOT", tmp_path)
    with pytest.raises(protos_bundle.CannotBundle, match='"Nothing" is not defined'):
        protos_bundle.files()
