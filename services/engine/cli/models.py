"""``python -m services.engine models``: list the models that engines serve."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import json_format

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.engine.cli import client

NAME = "models"

TIMEOUT_S = 10.0
_COLUMNS = ("TARGET", "MODEL", "ARCHITECTURE", "PARAMETERS", "CONTEXT", "VOCABULARY", "BACKEND", "PAGES", "CHAT")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if any engine did not answer."""
    flags = _parser().parse_args(arguments)
    targets = [client.reached(flags, address) for address in flags.targets or [flags.target]]

    def body(stub: Any) -> int:
        found: list[tuple[client.Target, pb.GetModelResponse]] = []
        for target in targets:
            if not client.await_serving(NAME, target, flags.wait):
                continue
            try:
                found.append((target, _ask(target)))
            except grpc.RpcError as error:
                client.say(NAME, client.describe(client.failure(error, target)))
        if flags.json:
            listed = [
                {"target": str(target), **json_format.MessageToDict(model, preserving_proto_field_name=True)}
                for target, model in found
            ]
            print(json.dumps(listed, indent=2))
        elif found:
            print("\n".join(table([row(str(target), model) for target, model in found])))
        return 0 if len(found) == len(targets) else 1

    return client.run(NAME, targets[0], body)


def _ask(target: client.Target) -> pb.GetModelResponse:
    with client.connect(target) as channel:
        return engine_pb2_grpc.EngineServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=TIMEOUT_S)


def row(target: str, model: pb.GetModelResponse) -> tuple[str, ...]:
    """The model of one engine, as the cells of a row."""
    chat = "yes" if model.has_chat_template else "unusable" if model.chat_template_error else "no"
    return (
        *(target, model.model_id, model.architecture, f"{model.parameters / 1e6:.1f} M", str(model.max_context)),
        *(str(model.vocab_size), model.backend, f"{model.page_size} x {model.page_bytes // model.page_size} B", chat),
    )


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines under a heading, with columns as narrow as their cells allow."""
    cells = [_COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "List the models that engines serve.")
    parser.add_argument(
        "targets", nargs="*", metavar="ADDR", help="engines: unix:/path or host:port (default: --target)"
    )
    parser.add_argument("--json", action="store_true", help="print every field of each as a JSON list")
    return parser
