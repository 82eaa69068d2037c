"""Submitted generations over gRPC: they outlive calls, can be watched from any token, and are kept within limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.common.errors import KvCacheDown, ServiceError
from tests.engine.running import RunningEngine, refused
from tests.engine.scheduling.remnants import places
from tests.generation import collect, request
from tests.polling import until

Engine = RunningEngine
pytestmark = pytest.mark.usefixtures("no_generations")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    limits = ["--max-batch", "2", "--max-queue", "2", "--local-pages", "64", "--generation-count", "8"]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits)
    yield one.start()
    one.close()


def span(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def submission(name: str = "", max_tokens: int = 8, **fields: Any) -> pb.SubmitGenerationRequest:
    spans = {key: span(fields.pop(key)) for key in ("timeout", "retention") if key in fields}
    asked = request(fields.pop("prompt", "ROMEO:"), max_tokens, request_id=name, **fields)
    return pb.SubmitGenerationRequest(request=asked, **spans)


def submit(engine: Engine, *arguments: Any, **fields: Any) -> pb.Generation:
    return engine.stub.SubmitGeneration(submission(*arguments, **fields)).generation


def get(engine: Engine, name: str) -> pb.Generation:
    return engine.stub.GetGeneration(pb.GetGenerationRequest(request_id=name)).generation


def watching(engine: Engine, name: str, from_token: int = 0) -> Any:
    return engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=name, from_token=from_token))


def cancel(engine: Engine, name: str) -> None:
    engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=name))


def delete(engine: Engine, name: str) -> None:
    engine.stub.DeleteGeneration(pb.DeleteGenerationRequest(request_id=name))


def watched(stream: Any) -> tuple[str, list[int], pb.Finish]:
    """Text, tokens and finish of a watch."""

    def responses() -> Iterator[pb.GenerateResponse]:
        for one in stream:
            assert one.WhichOneof("result") == "response", one
            yield one.response

    return collect(responses())


def failure(stream: Any) -> tuple[list[int], ServiceError]:
    """The tokens of a watch, and its final error."""
    *before, last = stream
    assert all(one.WhichOneof("result") == "response" for one in before)
    assert last.WhichOneof("result") == "error"
    return [token for one in before for token in one.response.token_ids], rpc.error_from_status(last.error)


# --- what one does ----------------------------------------------------------------------------------------------------


def test_it_is_what_generate_would_say(engine: Engine) -> None:
    text, tokens, _ = collect(engine.stub.Generate(request(max_tokens=20)))
    engine.steps.hold()
    begun = submit(engine, max_tokens=20)
    assert begun.request_id and begun.state in (pb.GENERATION_STATE_QUEUED, pb.GENERATION_STATE_RUNNING)
    assert not begun.HasField("finish") and not begun.HasField("expire_time")
    engine.steps.release()
    assert watched(watching(engine, begun.request_id))[:2] == (text, tokens)
    before = time.time()
    over = get(engine, begun.request_id)
    assert (over.state, over.text, list(over.token_ids)) == (pb.GENERATION_STATE_DONE, text, tokens)
    assert over.finish.reason == pb.FINISH_REASON_LENGTH and not over.HasField("error")
    assert over.finish.usage == over.usage and over.usage.completion_tokens == 20
    spans = [d.ToNanoseconds() for d in (over.usage.queue_time, over.usage.time_to_first_token, over.usage.total_time)]
    assert 0 < spans[0] < spans[1] < spans[2]
    assert 3500 < over.expire_time.ToNanoseconds() / 1e9 - before <= 3601


def test_the_seed_is_told(engine: Engine) -> None:
    name = submit(engine, max_tokens=12, sampling={"temperature": 0.9}).request_id
    text, _, finish = watched(watching(engine, name))
    again = request(max_tokens=12, sampling={"temperature": 0.9, "seed": finish.seed})
    assert collect(engine.stub.Generate(again))[0] == text


def test_every_replay_is_exactly_the_rest(engine: Engine) -> None:
    name = submit(engine, "replayed", 24, prompt="JULIET:\nO").request_id
    text, tokens, finish = watched(watching(engine, name))
    for at in range(25):
        late, rest, again = watched(watching(engine, name, at))
        assert rest == tokens[at:] and again == finish
        assert text.endswith(late)
    assert watched(watching(engine, name, 24))[0] == ""


def test_watchers_that_join_leave_and_come_back(engine: Engine) -> None:
    expected = collect(engine.stub.Generate(request(max_tokens=60)))[1]
    engine.steps.hold()
    name = "crowd"
    first = watching(engine, submit_held(engine, name, 60))
    engine.steps.release()
    first_tokens = list(next(first).response.token_ids)
    answers: dict[int, list[int]] = {}

    def follow(at: int) -> None:
        answers[at] = watched(watching(engine, name))[1]

    threads = [threading.Thread(target=follow, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    first.cancel()  # and comes back where it was
    back = watched(watching(engine, name, len(first_tokens)))[1]
    for thread in threads:
        thread.join(60)
    assert first_tokens + back == expected
    assert list(answers.values()) == [expected] * 6
    until(lambda: not engine.engine.generations.find(name)._watches)


def submit_held(engine: Engine, name: str, max_tokens: int = 8, **fields: Any) -> str:
    """Submit while the model is paused after the first step that this request causes."""
    assert submit(engine, name, max_tokens, **fields).request_id == name
    assert engine.steps.reached.wait(30)
    return name


def test_one_that_never_reads_stalls_nobody(engine: Engine) -> None:
    engine.steps.hold()
    name = submit_held(engine, "unread", 200)
    unread = watching(engine, name)
    engine.steps.release()
    assert len(watched(watching(engine, name))[1]) == 200
    assert len(collect(engine.stub.Generate(request(max_tokens=4)))[1]) == 4
    assert len(watched(unread)[1]) == 200  # and loses nothing by it


def test_it_goes_on_when_the_call_and_the_watch_are_dropped(engine: Engine) -> None:
    engine.steps.hold()
    name = submit_held(engine, "alone", 30)
    stream = watching(engine, name)
    engine.steps.release()
    next(stream)
    stream.cancel()
    engine.idle()
    assert get(engine, name).usage.completion_tokens == 30


# --- the same again ---------------------------------------------------------------------------------------------------


def test_a_lost_reply_and_the_same_again(engine: Engine) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest())
    engine.steps.hold()
    blocker = engine.stub.Generate(request(max_tokens=4))
    assert engine.steps.reached.wait(30)
    asked = submission("mine", 6)
    lost = engine.stub.SubmitGeneration.future(asked)
    until(lambda: "mine" in engine.engine.generations._known)
    lost.cancel()  # the engine has it; the caller never heard
    twice = [engine.stub.SubmitGeneration.future(asked) for _ in range(2)]  # while it is not even queued
    engine.steps.release()
    assert {future.result(30).generation.request_id for future in twice} == {"mine"}
    tokens = watched(watching(engine, "mine"))[1]
    collect(blocker)
    again = engine.stub.SubmitGeneration(asked).generation
    assert again.state == pb.GENERATION_STATE_DONE and list(again.token_ids) == tokens
    after = engine.stub.GetStats(pb.GetStatsRequest())
    assert after.finished_requests - before.finished_requests == 2


def test_another_request_under_the_same_id(engine: Engine) -> None:
    name = submit(engine, "mine", 6).request_id
    others = [submission("mine", 7), submission("mine", 6, timeout=5.0), submission("mine", 6, cache_salt="x")]
    others += [submission("mine", 6, priority=1), submission("mine", 6, sampling={"logprobs": 0})]
    others += [submission("mine", 6, sampling={"logit_bias": {1: bias}}) for bias in (0.0, 1.0)]
    for other in others:
        error = refused(lambda asked=other: engine.stub.SubmitGeneration(asked))  # type: ignore[misc]
        assert (error.code, error.reason, error.field) == ("ALREADY_EXISTS", "REQUEST_EXISTS", "request.request_id")
        assert "a different request" in error.message
    assert len(watched(watching(engine, name))[1]) == 6


def test_biases_in_another_order_are_the_same_request(engine: Engine) -> None:
    # What is written behind a message is merged into it, so the biases come as they stand here.
    each = [pb.Sampling(logit_bias={token: token / 100}) for token in range(0, 1024, 64)]
    written = [pb.SubmitGenerationRequest(request=pb.GenerateRequest(sampling=one)).SerializeToString() for one in each]
    call = engine.channel.unary_unary("/rocmforge.engine.v1.EngineService/SubmitGeneration")
    first = submission("mine", 3).SerializeToString()
    for order in (written, written[::-1]):
        assert pb.SubmitGenerationResponse.FromString(call(first + b"".join(order))).generation.request_id == "mine"
    assert len(watched(watching(engine, "mine"))[1]) == 3
    assert engine.stub.GetStats(pb.GetStatsRequest()).retained_generations == 1


def test_ids_are_one_space_with_attached_requests(engine: Engine) -> None:
    engine.steps.hold()
    stream = engine.stub.Generate(request(request_id="attached"))
    assert engine.steps.reached.wait(30)
    error = refused(lambda: engine.stub.SubmitGeneration(submission("attached")))
    assert (error.reason, error.field) == ("REQUEST_EXISTS", "request.request_id")
    assert "attached" not in engine.engine.generations
    error = refused(lambda: watching(engine, "attached"))
    assert error.reason == "REQUEST_UNKNOWN" and "no submitted generation" in error.message
    engine.steps.release()
    collect(stream)
    submit(engine, "attached")
    watched(watching(engine, "attached"))
    error = refused(lambda: engine.stub.Generate(request(request_id="attached")))
    assert (error.reason, error.field) == ("REQUEST_EXISTS", "request_id")
    delete(engine, "attached")
    collect(engine.stub.Generate(request(request_id="attached")))


def test_a_refused_submission_is_forgotten_and_may_be_repeated(engine: Engine) -> None:
    loop = engine.engine.loop
    assert loop is not None
    loop._refusal = KvCacheDown("gone")
    try:
        error = refused(lambda: engine.stub.SubmitGeneration(submission("again")))
        assert (error.code, error.reason) == ("UNAVAILABLE", "KVCACHE_DOWN") and error.retry_after_s
        assert refused(lambda: get(engine, "again") and None).reason == "REQUEST_UNKNOWN"
    finally:
        loop._refusal = None
    assert len(watched(watching(engine, submit(engine, "again", 3).request_id))[1]) == 3


def test_a_full_queue_refuses_with_a_time(engine: Engine) -> None:
    engine.steps.hold()
    streams = [engine.stub.Generate(request(max_tokens=100, request_id="f0"))]
    assert engine.steps.reached.wait(30)
    asked = [engine.stub.SubmitGeneration.future(submission(f"s{at}", 5)) for at in range(5)]
    engine.until_live(6)
    engine.steps.release()
    errors = []
    for future in asked:
        try:
            future.result(30)
        except grpc.RpcError as failed:
            errors.append(rpc.error_from(failed))
    assert [(error.code, error.reason) for error in errors] == [("RESOURCE_EXHAUSTED", "QUEUE_FULL")] * 2
    assert all(error.retry_after_s for error in errors)
    streams[0].cancel()
    engine.idle()
    assert len(engine.engine.generations) == 3


# --- ends -------------------------------------------------------------------------------------------------------------


def test_cancelling_while_it_runs_and_while_it_waits_and_when_it_is_over(engine: Engine) -> None:
    engine.steps.hold()
    submit_held(engine, "runs", 100)
    waiting = [engine.stub.SubmitGeneration.future(submission(name, 50)) for name in ("next", "waits")]
    engine.until_live(3)
    for name in ("runs", "waits", "waits"):
        cancel(engine, name)
    engine.steps.release()
    for future in waiting:
        future.result(30)
    for name in ("runs", "waits"):
        _, tokens, finish = watched(watching(engine, name))
        assert finish.reason == pb.FINISH_REASON_CANCELLED and len(tokens) < 50
        assert get(engine, name).state == pb.GENERATION_STATE_DONE
    finish = watched(watching(engine, "next"))[2]
    cancel(engine, "next")
    assert get(engine, "next").finish == finish and finish.reason == pb.FINISH_REASON_LENGTH
    delete(engine, "next")
    cancel(engine, "next")  # it was there not long ago
    assert refused(lambda: cancel(engine, "never")).reason == "REQUEST_UNKNOWN"


def test_cancelling_races_finishing(engine: Engine) -> None:
    reasons = set()
    for at in range(40):
        name = f"race{at}"
        submit(engine, name, 1 + at % 4)
        cancel(engine, name)
        _, tokens, finish = watched(watching(engine, name))
        over = get(engine, name)
        assert over.finish == finish and list(over.token_ids) == tokens
        assert (finish.reason == pb.FINISH_REASON_LENGTH) == (len(tokens) == 1 + at % 4)
        reasons.add(finish.reason)
    assert reasons <= {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_CANCELLED}


def test_deleting_races_watching(engine: Engine) -> None:
    for at in range(25):
        name = f"gone{at}"
        submit(engine, name, 12)
        answers: list[Any] = []

        def follow(name: str = name, answers: list[Any] = answers) -> None:
            try:
                answers.append(len(watched(watching(engine, name))[1]))
            except grpc.RpcError as failed:
                answers.append(rpc.error_from(failed).reason)

        threads = [threading.Thread(target=follow) for _ in range(3)]
        for thread in threads:
            thread.start()
        while True:
            try:
                delete(engine, name)
                break
            except grpc.RpcError as failed:
                assert rpc.error_from(failed).reason == "REQUEST_LIVE"
        for thread in threads:
            thread.join(30)
        assert len(answers) == 3 and set(answers) <= {12, "REQUEST_UNKNOWN"}


def test_a_live_one_is_not_deleted(engine: Engine) -> None:
    engine.steps.hold()
    submit_held(engine, "live", 50)
    error = refused(lambda: delete(engine, "live"))
    assert (error.code, error.reason, error.field) == ("FAILED_PRECONDITION", "REQUEST_LIVE", "request_id")
    assert "cancel it first" in error.message
    cancel(engine, "live")
    engine.steps.release()
    watched(watching(engine, "live"))
    delete(engine, "live")
    for call in (get, delete, lambda *names: list(watching(*names))):
        assert refused(lambda call=call: call(engine, "live")).reason == "REQUEST_UNKNOWN"  # type: ignore[misc]


def test_a_timeout_keeps_what_there_is(engine: Engine) -> None:
    expected = collect(engine.stub.Generate(request(max_tokens=400)))[1]
    clock = engine.engine.loop._clock

    def wait(step: Any) -> None:  # however fast the model is, it is not done by then
        [chunk] = step
        if chunk.sequence.num_generated_tokens == 200:
            until(lambda: clock() > chunk.sequence.request.deadline)

    engine.steps.fault = wait
    submit(engine, "late", 900, timeout=0.3)
    tokens, error = failure(watching(engine, "late"))
    assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    over = get(engine, "late")
    assert over.state == pb.GENERATION_STATE_FAILED and not over.HasField("finish")
    assert list(over.token_ids) == tokens == expected[: len(tokens)]
    assert rpc.error_from_status(over.error).message == error.message
    assert over.usage.completion_tokens == len(tokens)
    assert 0.3e9 <= over.usage.total_time.ToNanoseconds() < 30e9
    assert failure(watching(engine, "late", len(tokens)))[0] == []


def test_a_timeout_while_it_waits(engine: Engine) -> None:
    engine.steps.hold()
    blocker = engine.stub.Generate(request(max_tokens=4))
    assert engine.steps.reached.wait(30)
    asked = engine.stub.SubmitGeneration.future(submission("late", 5, timeout=0.01))
    until(lambda: "late" in engine.engine.generations._known)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 0.02)
    engine.steps.release()
    asked.result(30)
    collect(blocker)
    tokens, error = failure(watching(engine, "late"))
    assert not tokens and error.reason == "DEADLINE_EXCEEDED"
    assert not get(engine, "late").usage.HasField("queue_time")


def test_a_failing_forward_pass_is_told_to_every_watcher(engine: Engine) -> None:
    def fault(step: Any) -> None:
        for chunk in step:
            if chunk.sequence.id == "bad" and chunk.sequence.num_generated_tokens == 3:
                chunk.sequence.tokens[-1] = 10**9  # out of the vocabulary: the model itself raises

    engine.steps.fault = fault
    submit(engine, "bad", 9)
    for _ in range(2):
        tokens, error = failure(watching(engine, "bad"))
        assert len(tokens) == 3 and (error.code, error.reason) == ("INTERNAL", "FORWARD_FAILED")
    assert get(engine, "bad").state == pb.GENERATION_STATE_FAILED


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_purging(engine: Engine) -> None:
    for at in range(3):
        watched(watching(engine, submit(engine, f"p{at}", 2).request_id))
    purge = engine.stub.PurgeGenerations
    assert purge(pb.PurgeGenerationsRequest(older_than=span(3600))).purged == 0
    assert purge(pb.PurgeGenerationsRequest(older_than=span(0))).purged == 3
    assert engine.stub.GetStats(pb.GetStatsRequest()).retained_generations == 0


def test_retention_by_time(engine: Engine) -> None:
    generations = engine.engine.generations
    clock, ahead = generations._clock, 0.0
    generations._clock = lambda: clock() + ahead
    try:
        for name, retention in (("brief", 300.0), ("full", 3600.0)):
            watched(watching(engine, submit(engine, name, 2, retention=retention).request_id))
        now = time.time()
        assert 0 < get(engine, "brief").expire_time.ToNanoseconds() / 1e9 - now <= 300.1
        ahead = 300.1
        assert refused(lambda: get(engine, "brief")).reason == "REQUEST_UNKNOWN"
        assert engine.stub.GetStats(pb.GetStatsRequest()).retained_generations == 1
        submit(engine, "brief", 2)  # the id is free
        ahead = 3601.0
        assert refused(lambda: watching(engine, "full")).reason == "REQUEST_UNKNOWN"
    finally:
        generations._clock = clock
        engine.idle()


def test_what_has_expired_goes_without_anybody_s_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.server.SWEEP_S", 0.01)
    engine = RunningEngine(tmp_path).start()
    try:
        generations = engine.engine.generations
        watched(watching(engine, submit(engine, "brief", 2, retention=5.0).request_id))
        assert len(generations) == 1
        clock = generations._clock
        generations._clock = lambda: clock() + 6.0
        until(lambda: not len(generations))
        assert generations.bytes == 0
    finally:
        engine.close()


def test_a_thousand_leave_what_is_kept_within_bounds(engine: Engine) -> None:
    generations = engine.engine.generations
    for at in range(1000):
        submit(engine, f"many{at}", 1, prompt=[1, 2, 3])
        if at % 2:  # two run at a time, and two may wait
            watched(watching(engine, f"many{at}"))
        assert generations.retained <= 8 and len(generations) <= 8 + 4
    engine.idle()
    stats = engine.stub.GetStats(pb.GetStatsRequest())
    assert stats.retained_generations == 8 == len(generations._known) == len(generations._expiries)
    assert 0 < stats.generation_bytes < 8 * 4096 and stats.generation_byte_limit == 64 << 20
    assert len(engine.engine.streams._over) <= 1024
    assert engine.stub.PurgeGenerations(pb.PurgeGenerationsRequest(older_than=span(0))).purged == 8
    assert generations.bytes == 0


def test_when_it_is_over_only_the_registry_knows_it(engine: Engine) -> None:
    name = "remembered-by-nobody"
    engine.steps.hold()
    submit_held(engine, name, 20)
    assert ".loop.scheduler.live{}" in places(engine.engine, name)
    engine.steps.release()
    watched(watching(engine, name))
    collect(engine.stub.Generate(request(request_id=f"{name}-attached")))
    engine.idle()
    # The pages' side remembers a bounded number of sequences that were removed, as the daemon does.
    kept = [path for path in places(engine.engine, name) if ".generations" not in path and "source._" not in path]
    assert kept == [".streams._over{}"] * 2  # that there was such an id, for the sake of a late cancel
    assert places(engine.engine.generations, name)
    delete(engine, name)
    assert not places(engine.engine.generations, name)


# --- refusals ---------------------------------------------------------------------------------------------------------

LONG = "x" * 129
DURATION = duration_pb2.Duration


@pytest.mark.parametrize(
    ("method", "message", "field", "says"),
    [
        ("SubmitGeneration", pb.SubmitGenerationRequest(), "request.prompt", "missing"),
        ("SubmitGeneration", submission(LONG), "request.request_id", "129 characters; it must have 0 to 128"),
        ("SubmitGeneration", submission(cache_salt=LONG), "request.cache_salt", "128"),
        ("SubmitGeneration", submission(prompt=[]), "request.prompt.tokens.ids", "needs at least 1"),
        ("SubmitGeneration", submission(stopping={"stop": ["x", ""]}), "request.stopping.stop[1]", "1 to 256"),
        ("SubmitGeneration", submission(sampling={"top_p": 2.0}), "request.sampling.top_p", "at most 1"),
        ("SubmitGeneration", submission(timeout=0), "timeout", "more than 0 and at most 86400 s"),
        ("SubmitGeneration", submission(timeout=-1), "timeout", "more than 0 and at most 86400 s"),
        ("SubmitGeneration", submission(timeout=86401), "timeout", "more than 0 and at most 86400 s"),
        ("SubmitGeneration", submission(retention=0), "retention", "more than 0 and at most 3600 s"),
        ("SubmitGeneration", submission(retention=3601), "retention", "more than 0 and at most 3600 s"),
        (
            "SubmitGeneration",
            pb.SubmitGenerationRequest(request=request(), timeout=DURATION(seconds=1, nanos=2 * 10**9)),
            "timeout",
            "2000000000 nanos",
        ),
        (
            "SubmitGeneration",
            pb.SubmitGenerationRequest(request=request(), retention=DURATION(seconds=1, nanos=-1)),
            "retention",
            "the same sign",
        ),
        ("WatchGeneration", pb.WatchGenerationRequest(), "request_id", "1 to 128"),
        ("WatchGeneration", pb.WatchGenerationRequest(request_id=LONG), "request_id", "1 to 128"),
        ("GetGeneration", pb.GetGenerationRequest(), "request_id", "1 to 128"),
        ("GetGeneration", pb.GetGenerationRequest(request_id=LONG), "request_id", "1 to 128"),
        ("DeleteGeneration", pb.DeleteGenerationRequest(), "request_id", "1 to 128"),
        ("DeleteGeneration", pb.DeleteGenerationRequest(request_id=LONG), "request_id", "1 to 128"),
        ("CancelGeneration", pb.CancelGenerationRequest(request_id=LONG), "request_id", "1 to 128"),
        ("PurgeGenerations", pb.PurgeGenerationsRequest(), "older_than", "missing; 0 purges every"),
        ("PurgeGenerations", pb.PurgeGenerationsRequest(older_than=DURATION(seconds=-1)), "older_than", "0 or more"),
        ("PurgeGenerations", pb.PurgeGenerationsRequest(older_than=DURATION(nanos=10**9)), "older_than", "nanos"),
    ],
)
def test_bad_fields_are_named_with_their_limit(
    engine: Engine, method: str, message: Any, field: str, says: str
) -> None:
    error = refused(lambda: getattr(engine.stub, method)(message))
    assert (error.code, error.reason, error.field) == ("INVALID_ARGUMENT", "FIELD_INVALID", field)
    assert says in error.message
    assert not len(engine.engine.generations)


def test_from_a_token_that_is_not_there(engine: Engine) -> None:
    watched(watching(engine, submit(engine, "short", 3).request_id))
    error = refused(lambda: watching(engine, "short", 4))
    assert (error.reason, error.field) == ("FIELD_INVALID", "from_token")
    assert "from_token is 4; there are 3 tokens" in error.message


@pytest.mark.parametrize("edge", [{"timeout": 86400.0}, {"retention": 3600.0}, {"retention": 1e-9}])
def test_the_edges_of_spans_are_inside(engine: Engine, edge: dict[str, float]) -> None:
    assert submit(engine, "", 2, **edge).request_id
    engine.idle()
