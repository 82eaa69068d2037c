# mypy: disable-error-code="misc"
"""Many streams of a served engine: each gets its tokens whole and in order, in fewer messages than there are tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.delivery.throttle import MOST_S
from tests.engine.running import RunningEngine
from tests.generation import request

STREAMS, TOKENS = 8, 120


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    limits = ["--messages-per-s", "1", "--max-batch", str(STREAMS), "--local-pages", "256"]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits).start()
    yield one
    one.stop()


def asked(at: int) -> pb.GenerateRequest:
    return request([at + 1, 2, 3], TOKENS, request_id=f"r{at}")


def read(stream: Any) -> list[list[int]]:
    """The tokens of each message."""
    responses = [getattr(one, "response", one) for one in stream]
    assert responses[-1].HasField("finish")
    assert all(one.token_ids or one.HasField("finish") for one in responses), "a message says something"
    return [list(one.token_ids) for one in responses]


def all_of(engine: RunningEngine, begin: Any) -> list[list[list[int]]]:
    """The output of this many concurrent streams, in no more messages than the rate limit allows."""
    engine.steps.hold()
    with ThreadPoolExecutor(STREAMS) as readers:
        reading = [readers.submit(lambda at=at: read(begin(at))) for at in range(STREAMS)]
        engine.until_live(STREAMS)
        began = time.monotonic()
        engine.steps.release()
        found = [one.result(60) for one in reading]
    check_count(found, time.monotonic() - began)
    return found


def check_count(found: list[list[list[int]]], took_s: float) -> None:
    """A stream's turn comes after `MOST_S` at the latest; its first and last message have none to wait for."""
    assert sum(map(len, found)) <= STREAMS * (took_s / MOST_S + 3)


def test_streams_share_the_messages_there_are_and_lose_nothing(engine: RunningEngine) -> None:
    def submitted(at: int) -> Any:
        engine.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=asked(at)))
        return engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=f"r{at}"))

    attached = all_of(engine, lambda at: engine.stub.Generate(asked(at)))
    watched = all_of(engine, submitted)
    batch = pb.BatchGenerateRequest(requests=[request([at + 1, 2, 3], TOKENS) for at in range(STREAMS)])
    batched: list[list[list[int]]] = [[] for _ in range(STREAMS)]
    began = time.monotonic()
    for item in engine.stub.BatchGenerate(batch):
        batched[item.index].append(list(item.response.token_ids))
    check_count(batched, time.monotonic() - began)
    whole = [[token for message in messages for token in message] for messages in attached]
    assert all(len(tokens) == TOKENS for tokens in whole) and len({tuple(tokens) for tokens in whole}) > 1
    for way in (watched, batched):
        assert [[token for message in messages for token in message] for messages in way] == whole
