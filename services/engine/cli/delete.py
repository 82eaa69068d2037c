"""``python -m services.engine delete``: forget submitted generations that are over."""

from __future__ import annotations

import argparse

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client

NAME = "delete"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if one of them could not be deleted."""
    return client.each_id(NAME, _parser().parse_args(arguments), "DeleteGeneration", pb.DeleteGenerationRequest)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Forget submitted generations that are over; one that is not is left alone, and told.")
    parser.add_argument("id", nargs="+", metavar="ID", help="what `submit` printed")
    return parser
