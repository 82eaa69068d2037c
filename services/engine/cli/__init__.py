"""``python -m services.engine COMMAND``: clients of a running engine, one module a command.

Each has ``main(arguments) -> exit status``: 0, 1 when the engine refused, failed or did not serve within ``--wait``,
2 for bad flags, 130 when interrupted.
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
