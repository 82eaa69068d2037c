"""The requests of a run, and what they generate when nothing happens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.verdict import Expected
from tests.generation import request
from tests.processes import ROOT, Service

MODEL = ROOT / "models" / "shakespeare"
LOCAL_PAGES = 512

SCENES = (
    "ROMEO:\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n",
    "KING HENRY V:\nOnce more unto the breach, dear friends, once more;\nOr close the wall up with our English dead.\n",
    "HAMLET:\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n",
    "",
)


def requests(seed: int, count: int) -> list[engine_pb2.GenerateRequest]:
    """Requests of a few beginnings, greedy and drawn, of one sample and of several, short and long."""
    draw = random.Random(f"requests {seed}")
    found = []
    for at in range(count):
        prompt = draw.choice(SCENES) * draw.randint(1, 2) + f"Enter citizen {draw.randrange(at + 1)}.\n" * draw.randint(
            0, 4
        )
        samples = draw.choice((1, 1, 1, 2, 4))
        sampling: dict[str, Any] = {"temperature": 0.0, "seed": draw.randrange(1 << 32)}
        if draw.random() < 0.7 or samples > 1:
            sampling["temperature"] = draw.choice((0.7, 1.0))
            sampling["top_p"] = draw.choice((0.9, 1.0))
            sampling["top_k"] = draw.choice((0, 50))
        if draw.random() < 0.2:
            sampling["repetition_penalty"] = 1.2
        message = request(
            prompt or f"Citizen {at}:", draw.choice((4, 20, 60, 120)), sampling=sampling, priority=draw.randint(-1, 1)
        )
        message.n = samples
        found.append(message)
    return found


def undisturbed(directory: Path, messages: list[engine_pb2.GenerateRequest]) -> Expected:
    """What they generate on an engine with pages of its own, which knows no daemon and sees no fault."""
    flags = ["--model", str(MODEL), "--kvcache", "local", "--local-pages", str(LOCAL_PAGES)]
    service = Service("services.engine", directory / "alone.sock", flags, directory / "alone.log")
    try:
        stub = engine_pb2_grpc.EngineServiceStub(service.wait_serving().channel)
        tokens: dict[tuple[int, int], list[int]] = {}
        text: dict[tuple[int, int], str] = {}
        for item in stub.BatchGenerate(engine_pb2.BatchGenerateRequest(requests=messages), timeout=600):
            if item.HasField("error"):
                raise AssertionError(f"request {item.index} fails when nothing happens: {item.error}")
            key = (item.index, item.response.sample)
            tokens.setdefault(key, []).extend(item.response.token_ids)
            text[key] = text.get(key, "") + item.response.text
        return {key: (tokens[key], text[key]) for key in tokens}
    except grpc.RpcError as error:
        raise AssertionError(f"{error}\n{service.log()}") from error
    finally:
        service.close()
