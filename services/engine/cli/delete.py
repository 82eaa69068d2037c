"""``python -m services.engine delete``: forget submitted generations that are over."""

from __future__ import annotations

import argparse
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import call

NAME = "delete"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if one of them could not be deleted."""
    flags = _parser().parse_args(arguments)
    try:
        messages = [pb.DeleteGenerationRequest(request_id=name) for name in flags.id]
    except UnicodeError:
        call.say(NAME, "ID must be UTF-8")
        return 2

    def body(stub: Any) -> int:
        status = 0
        for message in messages:
            try:
                stub.DeleteGeneration(message)
            except grpc.RpcError as error:
                call.say(NAME, call.describe(call.failure(error, flags.target)))
                status = 1
        return status

    return call.run(NAME, flags.target, body)


def _parser() -> argparse.ArgumentParser:
    parser = call.parser(NAME, "Forget submitted generations that are over; one that is not is left alone, and told.")
    parser.add_argument("id", nargs="+", metavar="ID", help="what `submit` printed")
    return parser
