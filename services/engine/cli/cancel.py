"""``python -m services.engine cancel``: end requests by their ids."""

from __future__ import annotations

import argparse
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import call

NAME = "cancel"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if one of them could not be cancelled."""
    flags = _parser().parse_args(arguments)
    try:
        messages = [pb.CancelGenerationRequest(request_id=name) for name in flags.id]
    except UnicodeError:
        call.say(NAME, "ID must be UTF-8")
        return 2

    def body(stub: Any) -> int:
        status = 0
        for message in messages:
            try:
                stub.CancelGeneration(message)
            except grpc.RpcError as error:
                call.say(NAME, call.describe(call.failure(error, flags.target)))
                status = 1
        return status

    return call.run(NAME, flags.target, body)


def _parser() -> argparse.ArgumentParser:
    parser = call.parser(NAME, "End requests, submitted or not. One that is over stays as it is.")
    parser.add_argument("id", nargs="+", metavar="ID", help="a request's id")
    return parser
