"""``python -m services COMMAND``, installed ``rocmforge COMMAND``: all that is not a service itself."""

from __future__ import annotations

import importlib
import os
import sys

from services.common.errors import ServiceError
from services.common.parser import Parser
from services.engine import cli
from services.launch import typed

#: Commands that are modules with ``main(words) -> exit status``.
_MODULES = {
    "token": "services.engine.cli.token",
    "healthcheck": "services.healthcheck",
    "top": "services.top.__main__",
}
_DEMO = {"demo": "run", "up": "up", "down": "down"}
_DOCTORS = ("kvcache", "engine")

_EPILOG = f"""commands of an engine's client:
  {", ".join(cli.COMMANDS)}

others:
  demo                   start both services, generate a text, stop them; PROMPT in the environment is its prompt
  up, down               start both services in the background; stop them
  doctor kvcache|engine  check whether this machine can run a service, with the service's own flags
  first-light            try everything on this machine's GPU, and write a report to send
  top                    watch the daemon and its engines in the terminal
  healthcheck            ask a service once whether it serves
  token                  make a token for a client

Each has its own --help. The services are {typed("services.kvcache")} and {typed("services.engine")}."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: the command's own, 2 if there is no such command."""
    words = sys.argv[1:] if arguments is None else arguments
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in cli.COMMANDS:
        return cli.run(command, rest)
    if command in _MODULES:
        return int(importlib.import_module(_MODULES[command]).main(rest))
    if command in _DEMO:
        demo = importlib.import_module("scripts.demo")
        return int(demo.main([_DEMO[command], *rest]))
    if command == "first-light":
        return int(importlib.import_module("services.doctor.__main__").main(words))
    parser = Parser(prog=typed("services"), description="ROCmForge's commands.", epilog=_EPILOG)
    parser.add_argument("command", metavar="COMMAND", help="see below")
    if command == "doctor":
        if not rest or rest[0] not in _DOCTORS:
            parser.error(f"doctor: expected {' or '.join(_DOCTORS)}")
        try:
            return int(importlib.import_module(f"services.{rest[0]}.doctor").main(rest[1:], os.environ))
        except ServiceError as error:
            print(f"rocmforge doctor {rest[0]}: {error.message}", file=sys.stderr)
            return 2
    parser.parse_args([command])
    parser.error(f"{command}: no such command")


if __name__ == "__main__":
    sys.exit(main())
