"""``python -m services.engine watch``: stream a submitted generation to the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.engine.cli import client
from services.engine.cli.printing import print_samples, print_text, summary

NAME = "watch"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if the generation failed. An interrupt does not affect the generation."""
    flags = _parser().parse_args(arguments)
    try:
        message = pb.WatchGenerationRequest(request_id=flags.id)
    except UnicodeError:
        client.say(NAME, "ID must be UTF-8")
        return 2
    try:
        if len(flags.from_token) == 1:
            message.from_token = flags.from_token[0]
        else:
            message.from_tokens.extend(flags.from_token)
    except ValueError:
        client.say(NAME, f"--from-token {' '.join(map(str, flags.from_token))}: out of range")
        return 2
    try:
        message.without_samples.extend(flags.without_sample)
    except ValueError:
        client.say(NAME, f"--without-sample {' '.join(map(str, flags.without_sample))}: out of range")
        return 2

    def body(stub: Any) -> int:
        failures: list[str] = []
        stream = stub.WatchGeneration(message)
        first = next(stream, None)  # says whether there are several samples

        def responses() -> Iterator[pb.GenerateResponse]:
            for one in chain([first] if first is not None else [], stream):
                if one.WhichOneof("result") == "error":
                    failures.append(client.describe(rpc.error_from_status(one.error)))
                else:
                    yield one.response

        finishes = print_samples(responses()) if first and first.samples else [print_text(responses())]
        for failure in failures:
            client.say(NAME, failure)
        for finish in finishes:
            if flags.show_usage and finish is not None:
                print(summary(finish), file=sys.stderr)
        return 1 if failures else 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Stream a submitted generation to standard output, from its beginning.")
    parser.add_argument("id", metavar="ID", help="id printed by `submit`")
    parser.add_argument(
        "--from-token",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="skip the first N tokens; with several samples, repeat once per sample, in order",
    )
    parser.add_argument(
        "--without-sample",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="skip sample N, counted from 0; repeatable",
    )
    parser.add_argument(
        "--show-usage", action="store_true", help="print token counts, times and the seed to standard error"
    )
    return parser
