"""``python -m services.engine generate``: stream a completion to the terminal."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from services.engine.cli import client
from services.engine.cli.printing import print_samples, print_text, summary
from services.engine.cli.request_flags import Unfit, add_chat, add_flags, add_prompt, add_samples, from_flags

NAME = "generate"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status. An interrupt or a closed standard output cancels the request."""
    flags = _parser().parse_args(arguments)
    try:
        if flags.timeout is not None and not 0 < flags.timeout < math.inf:
            raise Unfit(f"--timeout {flags.timeout:g}: expected more than 0 seconds")
        request = from_flags(flags)
    except Unfit as unfit:
        client.say(NAME, str(unfit))
        return 2
    except KeyboardInterrupt:
        return 130

    def body(stub: Any) -> int:
        responses = stub.Generate(request, timeout=flags.timeout)
        finishes = print_samples(responses) if request.n > 1 else [print_text(responses)]
        for finish in finishes:
            if flags.show_usage and finish is not None:
                print(summary(finish), file=sys.stderr)
        return 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Stream a completion of PROMPT to standard output.")
    add_prompt(parser)
    add_chat(parser)
    add_flags(parser)
    add_samples(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="deadline for the whole call, in seconds (default: none)"
    )
    parser.add_argument(
        "--show-usage", action="store_true", help="print token counts, times and the seed to standard error"
    )
    return parser
