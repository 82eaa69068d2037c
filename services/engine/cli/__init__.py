"""``python -m services.engine COMMAND``: the client commands for a running engine, one module each.

Each module has ``main(arguments) -> exit status``: 0 on success, 1 if the engine rejected or failed the request, was
not serving within ``--wait`` or is not to be trusted, 2 for invalid flags, 130 if interrupted.
"""

from __future__ import annotations

import importlib
import sys

from services.common.errors import InvalidConfiguration

COMMANDS = (
    *("generate", "chat", "batch", "submit", "watch", "get", "cancel", "delete", "purge"),
    *("models", "status", "bench", "drain"),
)


def run(command: str, arguments: list[str]) -> int:
    """Run one of COMMANDS. Returns the exit status."""
    module = importlib.import_module(f"{__name__}.{command}")
    try:
        return int(module.main(arguments))
    except InvalidConfiguration as error:
        print(f"rocmforge {command}: {error.reason}: {error.message}", file=sys.stderr)
        return 1
