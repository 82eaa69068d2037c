"""``python -m services.engine cancel``: cancel requests by id."""

from __future__ import annotations

import argparse

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client

NAME = "cancel"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if any request could not be cancelled."""
    return client.each_id(NAME, _parser().parse_args(arguments), "CancelGeneration", pb.CancelGenerationRequest)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Cancel requests, submitted or streaming. Requests that have ended are unaffected.")
    parser.add_argument("id", nargs="+", metavar="ID", help="request id")
    return parser
