"""Many prompts in one call: each item is a Generate of its own, and none disturbs another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from services.engine.api.requests import MAX_ITEMS
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request

Engine = RunningEngine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    limits = ["--max-batch", "4", "--max-queue", "16", "--local-pages", "256"]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits)
    yield one.start()
    one.close()


def batch(engine: Engine, *requests: pb.GenerateRequest, **options: Any) -> Any:
    return engine.stub.BatchGenerate(pb.BatchGenerateRequest(requests=requests), **options)


def sorted_out(stream: Any) -> tuple[dict[int, list[pb.GenerateResponse]], dict[int, ServiceError]]:
    """Responses and errors by index; nothing follows an item's last."""
    responses: dict[int, list[pb.GenerateResponse]] = {}
    errors: dict[int, ServiceError] = {}
    for one in stream:
        assert one.index not in errors
        if one.WhichOneof("result") == "error":
            errors[one.index] = rpc.error_from_status(one.error)
        else:
            so_far = responses.setdefault(one.index, [])
            assert not (so_far and so_far[-1].HasField("finish"))
            so_far.append(one.response)
    return responses, errors


def test_each_item_is_answered_as_generate_would(engine: Engine) -> None:
    asked = [request(f"Act {at}", 4 + at, sampling={"temperature": 0.9, "seed": at}) for at in range(10)]
    alone = [collect(engine.stub.Generate(one))[:2] for one in asked]
    responses, errors = sorted_out(batch(engine, *asked))
    assert not errors and sorted(responses) == list(range(10))
    assert [collect(responses[at])[:2] for at in range(10)] == alone
    assert len({responses[at][0].request_id for at in range(10)}) == 10
    usage = responses[9][-1].finish.usage
    assert usage.completion_tokens == 13 and usage.HasField("time_to_first_token")


def test_answers_are_interleaved(engine: Engine) -> None:
    engine.steps.hold()
    blocker = engine.stub.Generate(request(max_tokens=1))
    assert engine.steps.reached.wait(30)
    stream = batch(engine, request([1, 2], 24), request([3, 4], 24))
    engine.until_live(3)
    engine.steps.step()
    collect(blocker)
    for _ in range(6):  # what is not read at once is merged with what comes next
        engine.steps.step()
        assert {next(stream).index for _ in range(2)} == {0, 1}
    engine.steps.release()
    assert {one.index for one in stream if one.response.HasField("finish")} == {0, 1}


def test_a_bad_item_disturbs_no_other(engine: Engine) -> None:
    def fault(step: Any) -> None:
        for chunk in step:
            if chunk.sequence.id == "fails":
                chunk.sequence.tokens[0] = 10**9  # out of the vocabulary: the model itself raises

    engine.steps.fault = fault
    context = engine.stub.GetModel(pb.GetModelRequest()).max_context
    asked = [
        request("first", 6),
        pb.GenerateRequest(),
        request("x", sampling={"top_p": 7.0}),
        request([5, 6], 5, request_id="fails"),
        request([1] * context, 5),
        request("last", 6, request_id="twice"),
        request("last", 6, request_id="twice"),
    ]
    alone = [collect(engine.stub.Generate(asked[at]))[:2] for at in (0, 5)]
    responses, errors = sorted_out(batch(engine, *asked))
    assert [collect(responses[at])[:2] for at in (0, 5)] == alone
    told = {at: (error.reason, error.field) for at, error in errors.items()}
    assert told == {
        1: ("FIELD_INVALID", "requests[1].prompt"),
        2: ("FIELD_INVALID", "requests[2].sampling.top_p"),
        3: ("FORWARD_FAILED", ""),
        4: ("PROMPT_TOO_LONG", "requests[4].prompt"),
        6: ("REQUEST_EXISTS", "requests[6].request_id"),
    }
    assert "top_p is 7.0" in errors[2].message


def test_what_the_queue_does_not_take_is_told_so_item_by_item(engine: Engine) -> None:
    engine.steps.hold()
    first = engine.stub.Generate(request(max_tokens=3))
    assert engine.steps.reached.wait(30)
    stream = batch(engine, *(request([1, at], 3) for at in range(30)))
    engine.until_live(31)
    engine.steps.release()
    responses, errors = sorted_out(stream)
    collect(first)
    assert len(responses) == 19 and len(errors) == 11  # three beside the one that runs, and sixteen wait
    assert {(error.code, error.reason) for error in errors.values()} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
    assert all(error.retry_after_s for error in errors.values())
    assert sorted([*responses, *errors]) == list(range(30))


def test_dropping_the_call_ends_every_item(engine: Engine) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests
    engine.steps.hold()
    stream = batch(engine, *(request([1, at], 300) for at in range(12)))
    assert engine.steps.reached.wait(30)
    engine.until_live(12)
    engine.steps.step()
    next(stream)
    stream.cancel()
    engine.until_told(12)
    engine.steps.release()
    engine.idle()
    assert engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests - before == 12


def test_dropping_the_call_while_its_prompts_are_read(engine: Engine) -> None:
    engine.steps.hold()
    stream = batch(engine, *(request("Who's there? " * 100, 300) for _ in range(MAX_ITEMS)))
    assert engine.steps.reached.wait(60)
    stream.cancel()
    engine.steps.release()
    engine.idle()


def test_a_deadline_ends_every_item(engine: Engine) -> None:
    try:
        responses, errors = sorted_out(batch(engine, *(request([1, at], 900) for at in range(8)), timeout=0.3))
    except grpc.RpcError as failure:
        assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:  # the engine's clock was first, and all it had to tell is here
        assert set(errors) == set(range(8)) and not any(one[-1].HasField("finish") for one in responses.values())
        assert {error.reason for error in errors.values()} == {"DEADLINE_EXCEEDED"}
    engine.idle()


def test_an_item_can_be_cancelled_by_its_id(engine: Engine) -> None:
    engine.steps.hold()
    stream = batch(engine, request([1, 2], 400, request_id="one"), request([3, 4], 30, request_id="other"))
    assert engine.steps.reached.wait(30)
    engine.steps.step()
    next(stream)
    engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="one"))
    engine.steps.release()
    finishes = {one.index: one.response.finish.reason for one in stream if one.response.HasField("finish")}
    assert finishes == {0: pb.FINISH_REASON_CANCELLED, 1: pb.FINISH_REASON_LENGTH}


def test_a_caller_that_does_not_read_stalls_nobody(engine: Engine) -> None:
    stream = batch(engine, *(request([1, at], 100) for at in range(6)))
    assert len(collect(engine.stub.Generate(request(max_tokens=5)))[1]) == 5
    engine.idle()
    responses, errors = sorted_out(stream)
    assert not errors and all(len(collect(one)[1]) == 100 for one in responses.values())


@pytest.mark.parametrize("count", [0, MAX_ITEMS + 1])
def test_no_item_and_too_many(engine: Engine, count: int) -> None:
    error = refused(lambda: batch(engine, *[request("x", 1)] * count))
    assert (error.code, error.reason, error.field) == ("INVALID_ARGUMENT", "FIELD_INVALID", "requests")
    assert f"{count} items" in error.message and f"1 to {MAX_ITEMS}" in error.message


def test_as_many_as_there_may_be(engine: Engine) -> None:
    responses, errors = sorted_out(batch(engine, *[request([1], 1)] * MAX_ITEMS))
    assert len(responses) + len(errors) == MAX_ITEMS and len(responses) >= 4
    assert {error.reason for error in errors.values()} <= {"QUEUE_FULL"}


def test_a_bug_while_an_item_is_read_is_that_item_s(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.engine.api import requests as intake

    tokenize = intake.tokenize

    async def broken(text: str, *rest: Any) -> list[int]:
        if text == "bug":
            raise RuntimeError("a bug")
        return await tokenize(text, *rest)

    monkeypatch.setattr(intake, "tokenize", broken)
    responses, errors = sorted_out(batch(engine, request("bug", 2), request("fine", 2)))
    assert errors[0].reason == "INTERNAL" and errors[0].metadata["error_id"] and "a bug" not in errors[0].message
    assert len(collect(responses[1])[1]) == 2
