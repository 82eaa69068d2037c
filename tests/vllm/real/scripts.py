"""The scripts of inside/, as commands for the Python that ROCMFORGE_VLLM names, and what they import."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLIENT = (ROOT / "clients" / "python", ROOT / "protos")


def command(name: str, *words: str) -> list[str]:
    """The command that runs a script of that name."""
    return [os.environ["ROCMFORGE_VLLM"], str(Path(__file__).parent / "inside" / f"{name}.py"), *words]


def importing_client() -> dict[str, str]:
    """The environment of a script that imports the client, or the one installed at ROCMFORGE_VLLM_PATH."""
    path = ":".join(map(str, CLIENT))
    return {**os.environ, "PYTHONPATH": os.environ.get("ROCMFORGE_VLLM_PATH", path)}


def importing_tests() -> dict[str, str]:
    """The environment of a script that imports modules of tests/ and the client."""
    return {**os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *CLIENT)))}
