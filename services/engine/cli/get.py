"""``python -m services.engine get``: print the output of a submitted generation so far."""

from __future__ import annotations

import argparse
from typing import Any

from google.protobuf import json_format

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.engine.cli import client
from services.engine.cli.printing import print_sample

NAME = "get"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if the generation failed."""
    flags = _parser().parse_args(arguments)
    try:
        message = pb.GetGenerationRequest(request_id=flags.id)
    except UnicodeError:
        client.say(NAME, "ID must be UTF-8")
        return 2

    def body(stub: Any) -> int:
        generation = stub.GetGeneration(message).generation
        failed = generation.HasField("error")
        if flags.json:
            print(json_format.MessageToJson(generation, preserving_proto_field_name=True))
        else:
            if generation.text:
                print(generation.text, end="" if generation.text.endswith("\n") else "\n")
            for at, sample in enumerate(generation.samples):
                print_sample(at, sample.text)
            if failed:
                client.say(NAME, client.describe(rpc.error_from_status(generation.error)))
            elif generation.state != pb.GENERATION_STATE_DONE:
                tokens = sum(len(one.token_ids) for one in (generation, *generation.samples))
                client.say(NAME, f"not done: {tokens} tokens so far")
        return 1 if failed else 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Print the output of a submitted generation so far.")
    parser.add_argument("id", metavar="ID", help="id printed by `submit`")
    parser.add_argument("--json", action="store_true", help="print the whole generation as JSON")
    return parser
