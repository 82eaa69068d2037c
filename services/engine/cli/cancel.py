"""``python -m services.engine cancel``: end requests by their ids."""

from __future__ import annotations

import argparse

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client

NAME = "cancel"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if one of them could not be cancelled."""
    return client.each_id(NAME, _parser().parse_args(arguments), "CancelGeneration", pb.CancelGenerationRequest)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "End requests, submitted or not. One that is over stays as it is.")
    parser.add_argument("id", nargs="+", metavar="ID", help="a request's id")
    return parser
