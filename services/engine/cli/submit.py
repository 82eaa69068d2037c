"""``python -m services.engine submit``: start a generation in the background, and print its id."""

from __future__ import annotations

import argparse
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client
from services.engine.cli.request_flags import Unfit, add_chat, add_flags, add_prompt, add_samples, from_flags, span_of

NAME = "submit"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    flags = _parser().parse_args(arguments)
    try:
        message = pb.SubmitGenerationRequest(request=from_flags(flags))
        for name in ("timeout", "retention"):
            _put_span(message, name, getattr(flags, name))
        message.request.request_id = flags.id
    except Unfit as unfit:
        client.say(NAME, str(unfit))
        return 2
    except UnicodeError:
        client.say(NAME, "--id must be UTF-8")
        return 2
    except KeyboardInterrupt:
        return 130

    def body(stub: Any) -> int:
        print(stub.SubmitGeneration(message).generation.request_id)
        return 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


def _put_span(message: pb.SubmitGenerationRequest, name: str, seconds: float | None) -> None:
    if seconds is not None:
        getattr(message, name).CopyFrom(span_of(name, seconds))


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(
        NAME,
        "Start a completion of PROMPT in the background, and print its id for `watch`, `get` and `cancel`.",
    )
    add_prompt(parser)
    add_chat(parser)
    add_flags(parser)
    add_samples(parser)
    parser.add_argument(
        "--id", default="", metavar="ID", help="request id; resubmitting with it is idempotent (default: a new id)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline in seconds (default: none)")
    parser.add_argument(
        "--retention", type=float, metavar="S", help="seconds to keep it after it ends (default: the engine's)"
    )
    return parser
