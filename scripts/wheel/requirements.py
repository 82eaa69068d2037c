"""Prints what an image installs, a requirement a line: ``requirements.py VARIANT``, for the Dockerfile.

These are the dependencies of both wheels, the extra of the variant and what traces need, without what the Dockerfile
installs by itself. VARIANT ``tiers``: what ``kvcache-tiers`` has besides.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

#: The client is built from this repository; tokenizers comes without its dependencies.
APART = ("rocmforge-client", "tokenizers")


def requirements(projects: list[dict[str, Any]], variant: str) -> list[str]:
    """The requirements of a variant: cpu, or an extra of the first project. Raises KeyError for an unknown one."""
    extras = projects[0]["optional-dependencies"]
    if variant == "tiers":
        return sorted(extras["tiers"])
    wanted = [line for project in projects for line in project["dependencies"]] + extras["otel"]
    wanted += [] if variant == "cpu" else extras[variant]
    return sorted({line for line in wanted if not line.startswith(APART)})


if __name__ == "__main__":
    files = (Path("pyproject.toml"), Path("clients/python/pyproject.toml"))
    read = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    print(*requirements(read, sys.argv[1]), sep="\n")
