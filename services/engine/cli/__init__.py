"""``python -m services.engine COMMAND``: the client commands for a running engine, one module each.

Each module has ``main(arguments) -> exit status``: 0 on success, 1 if the engine rejected or failed the request or was
not serving within ``--wait``, 2 for invalid flags, 130 if interrupted.
"""

from __future__ import annotations

import importlib

COMMANDS = (
    *("generate", "chat", "batch", "submit", "watch", "get", "cancel", "delete", "purge"),
    *("models", "status", "bench"),
)


def run(command: str, arguments: list[str]) -> int:
    """Run one of COMMANDS. Returns the exit status."""
    return int(importlib.import_module(f"{__name__}.{command}").main(arguments))
