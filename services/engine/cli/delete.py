"""``python -m services.engine delete``: delete submitted generations that have ended."""

from __future__ import annotations

import argparse

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client

NAME = "delete"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if any generation could not be deleted."""
    return client.each_id(NAME, _parser().parse_args(arguments), "DeleteGeneration", pb.DeleteGenerationRequest)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Delete submitted generations that have ended; it is an error if one has not.")
    parser.add_argument("id", nargs="+", metavar="ID", help="id printed by `submit`")
    return parser
