"""``python -m services.engine token NAME``: make a token that an engine with ``--tokens`` takes."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.access.tokens import Tokens, make_token
from services.common.errors import InvalidConfiguration
from services.common.parser import Parser
from services.engine.cli import client
from services.launch import typed

NAME = "token"


def main(arguments: list[str] | None = None) -> int:
    """Print a new token, which is stored nowhere, and add its hash to the file of ``--tokens``. Returns the exit
    status.
    """
    parser = Parser(
        prog=f"{typed('services.engine')} {NAME}",
        description="Make a token for a client of the engine, and print it. It is shown only now: the engine's file "
        "has its hash. Without --tokens, the line for that file is printed to standard error.",
    )
    parser.add_argument("name", metavar="NAME", help="who will have it: its holder is known as token:NAME")
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help="add the hash to this file, which is made if it is missing"
    )
    flags = parser.parse_args(arguments)
    try:
        token, line = make_token(flags.name)
    except ValueError as error:
        client.say(NAME, f"{flags.name}: {error}")
        return 2
    if flags.tokens is None:
        client.say(NAME, f"the line for the file of --tokens is {line}")
    else:
        try:
            _add(flags.tokens, line)
        except OSError as error:
            client.say(NAME, f"--tokens {flags.tokens}: {error.strerror or error}")
            return 1
        except InvalidConfiguration as error:
            client.say(NAME, error.message)
            return 1
    print(token)
    return 0


def _add(path: Path, line: str) -> None:
    """Add a line to a file that only this user can read. Raises OSError, InvalidConfiguration for a file whose other
    lines are unusable.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "r+", encoding="utf-8") as file:
        Tokens(path)
        before = file.read()
        file.write(("" if not before or before.endswith("\n") else "\n") + line + "\n")
