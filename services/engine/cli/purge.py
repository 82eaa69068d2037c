"""``python -m services.engine purge``: delete all submitted generations that have ended."""

from __future__ import annotations

import argparse
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client
from services.engine.cli.request_flags import Unfit, span_of

NAME = "purge"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    flags = _parser().parse_args(arguments)
    try:
        message = pb.PurgeGenerationsRequest(older_than=span_of("older-than", flags.older_than))
    except Unfit as unfit:
        client.say(NAME, str(unfit))
        return 2

    def body(stub: Any) -> int:
        print(stub.PurgeGenerations(message).purged)
        return 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Delete all submitted generations that have ended, and print how many.")
    parser.add_argument(
        "--older-than",
        type=float,
        default=0.0,
        metavar="S",
        help="only those that ended at least S seconds ago (default: all)",
    )
    return parser
