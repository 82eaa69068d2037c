"""A build hook of hatchling: generates the code of protos and puts it into a wheel.

    [tool.hatch.build.hooks.custom]
    path = "clients/python/build_hook.py"
    protos = ["rocmforge/engine/v1/engine.proto"]

``protos`` are below ``folder``, by default ``protos``, where a source distribution has them in any case. An editable
install has them generated in place. A wheel without generated code imports nothing, so a proto that is missing or does
not compile fails the build.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What protoc and its plugins make of NAME.proto.
MADE = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(folder: Path, names: list[str], out: Path) -> list[Path]:
    """Generate the code of ``names``, relative to ``folder``, below ``out``. Returns the files, relative to ``out``.

    Raises RuntimeError with protoc's message, or if a file did not come.
    """
    for name in names:
        if not (folder / name).is_file():
            raise RuntimeError(f"{folder / name}: no such proto")
    # An isolated build has googleapis-common-protos in a folder of its own.
    rpc = importlib.util.find_spec("google.rpc")
    if rpc is None or not rpc.submodule_search_locations:
        raise RuntimeError("googleapis-common-protos is missing, which has google/rpc/status.proto")
    roots = [folder, Path(rpc.submodule_search_locations[0]).parents[1]]
    command = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{root}" for root in roots)]
    targets = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    done = subprocess.run([*command, *targets, *names], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"protoc failed: {done.stderr.strip()}")
    made = [Path(name.removesuffix(".proto") + ending) for name in names for ending in MADE]
    missing = [str(path) for path in made if not (out / path).is_file()]
    if missing:
        raise RuntimeError(f"protoc did not write {', '.join(missing)}")
    return made


class ProtosHook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate, and add what was generated to the wheel."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        folder = root / self.config.get("folder", "protos")
        if not folder.is_dir():
            folder = root / "protos"
        if version == "editable":
            generate(folder, self.config["protos"], folder)
            return
        self._out = Path(tempfile.mkdtemp(prefix="protos-"))
        for path in generate(folder, self.config["protos"], self._out):
            build_data["force_include"][str(self._out / path)] = path.as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was generated for the wheel."""
        if hasattr(self, "_out"):
            shutil.rmtree(self._out)
