"""``python -m services.engine drain``: let the engine finish what runs, and send requests elsewhere."""

from __future__ import annotations

import argparse
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client

NAME = "drain"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 also when requests are still live after --wait."""
    flags = _parser().parse_args(arguments)

    def body(stub: Any) -> int:
        # Begun by a call of its own: a wait that ends does not say whether the drain began.
        live = stub.Drain(pb.DrainRequest()).live_requests
        if flags.wait:
            try:
                live = stub.Drain(pb.DrainRequest(wait=True), timeout=flags.wait).live_requests
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                live = stub.Drain(pb.DrainRequest()).live_requests
        print(f"draining, {live} requests live")
        return 1 if flags.wait and live else 0

    return client.run(NAME, client.reached(flags), body)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(
        NAME,
        "Have the engine turn unready and reject new requests, while those that run go on. The process stays until it "
        "is sent SIGTERM. It cannot be taken back.",
        waits=False,
    )
    parser.add_argument(
        "--wait",
        type=client.seconds,
        default=0.0,
        metavar="S",
        help="wait up to S seconds until no request is live (default %(default)g)",
    )
    return parser
