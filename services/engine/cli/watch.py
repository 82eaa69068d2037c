"""``python -m services.engine watch``: stream a submitted generation to the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from services import rpc
from services.engine.cli import call
from services.engine.cli.answer import print_text, summary

NAME = "watch"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if the generation failed. An interrupt leaves the generation alone."""
    flags = _parser().parse_args(arguments)
    try:
        message = pb.WatchGenerationRequest(request_id=flags.id, from_token=flags.from_token)
    except UnicodeError:
        call.say(NAME, "ID must be UTF-8")
        return 2
    except ValueError:
        call.say(NAME, f"--from-token {flags.from_token}: out of range")
        return 2

    def body(stub: Any) -> int:
        failures: list[str] = []

        def responses() -> Iterator[pb.GenerateResponse]:
            for one in stub.WatchGeneration(message):
                if one.WhichOneof("result") == "error":
                    failures.append(call.describe(rpc.error_from_status(one.error)))
                else:
                    yield one.response

        finish = print_text(responses())
        for failure in failures:
            call.say(NAME, failure)
        if flags.show_usage and finish is not None:
            print(summary(finish), file=sys.stderr)
        return 1 if failures else 0

    return call.run(NAME, flags.target, body)


def _parser() -> argparse.ArgumentParser:
    parser = call.parser(NAME, "Stream a submitted generation to standard output: what there is, then what comes.")
    parser.add_argument("id", metavar="ID", help="what `submit` printed")
    parser.add_argument("--from-token", type=int, default=0, metavar="N", help="leave out the first N tokens")
    parser.add_argument("--show-usage", action="store_true", help="tell counts, times and the seed on standard error")
    return parser
