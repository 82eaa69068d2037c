"""Implements ``make protos-bundle``: packs the protos, for clients in any language, into ``build/protos``.

``rocmforge-protos-VERSION.tar.gz`` compiles by itself: it has our protos, every file that they import, and the errors'
details, with a ``buf.yaml`` for buf and a ``descriptor.binpb`` for what reads a FileDescriptorSet. The same protos make
the same bytes, on any machine with the pinned protoc and zlib.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from services.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
#: Errors carry these in ``Any``s, so none of the project's files imports them.
DETAILS = ("google/rpc/code.proto", "google/rpc/error_details.proto")
BUF_YAML = b"version: v2\n"


class CannotBundle(Exception):
    """The bundle could not be built; the message is protoc's."""


def roots() -> list[Path]:
    """The import roots: the project's protos, googleapis-common-protos, and protoc's own."""
    installed = Path(sysconfig.get_path("purelib"))
    return [ROOT / "protos", installed, installed / "grpc_tools" / "_proto"]


def describe() -> bytes:
    """The serialized FileDescriptorSet of the bundle, comments included. Raises CannotBundle."""
    own = sorted(path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos").rglob("*.proto"))
    with tempfile.TemporaryDirectory(prefix="protos-") as name:
        target = Path(name) / "descriptor.binpb"
        options = [*(f"-I{root}" for root in roots()), "--include_imports", "--include_source_info"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *options, f"--descriptor_set_out={target}", *own]
        done = subprocess.run([*command, *DETAILS], capture_output=True, text=True)
        if done.returncode:
            raise CannotBundle(done.stderr.strip())
        return target.read_bytes()


def files() -> dict[str, bytes]:
    """The contents of every file by its name in the bundle. Raises CannotBundle."""
    descriptor = describe()
    found = {"LICENSE": (ROOT / "LICENSE").read_bytes(), "buf.yaml": BUF_YAML, "descriptor.binpb": descriptor}
    for file in FileDescriptorSet.FromString(descriptor).file:
        found[file.name] = next(path for root in roots() if (path := root / file.name).is_file()).read_bytes()
    return found


def pack(folder: str, contents: dict[str, bytes]) -> bytes:
    """A reproducible .tar.gz of ``contents`` below ``folder``: no times, hosts or users are recorded."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as compressed:
        with tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name, data in sorted(contents.items()):
                member = tarfile.TarInfo(f"{folder}/{name}")  # mode 0644, owner root, mtime 1970
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def write(folder: Path) -> Path:
    """Write the bundle to ``folder`` atomically and return its path. Raises CannotBundle."""
    name = f"rocmforge-protos-{VERSION}"
    data = pack(name, files())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.tar.gz"
    with tempfile.TemporaryDirectory(prefix=".protos-", dir=folder) as part:
        (Path(part) / target.name).write_bytes(data)
        os.replace(Path(part) / target.name, target)
    return target


def main() -> int:
    """Returns the exit status."""
    try:
        print(write(ROOT / "build" / "protos").relative_to(ROOT))
    except (CannotBundle, OSError) as error:
        print(f"protos-bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
