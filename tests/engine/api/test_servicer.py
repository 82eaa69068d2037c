"""The engine over gRPC: what a client sees, every limit, every error reason."""

# The table of bad requests is one row a line.

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request
from tests.polling import until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    one = RunningEngine(tmp_path_factory.mktemp("e"), "--max-batch", "2", "--max-queue", "2", "--local-pages", "64")
    yield one.start()
    one.close()


def health(channel: grpc.Channel, service: str = "") -> int:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_text_and_tokens_stream_and_agree(engine: RunningEngine) -> None:
    engine.steps.hold()
    stream = engine.stub.Generate(request(max_tokens=20))
    assert engine.steps.reached.wait(30)
    responses = []
    for _ in range(3):  # what is not read at once is merged with what comes next
        engine.steps.step()
        responses.append(next(stream))
    engine.steps.release()
    responses += stream
    assert all(not r.HasField("finish") for r in responses[:-1])
    assert len({response.request_id for response in responses}) == 1 and responses[0].request_id
    tokens = [token for response in responses for token in response.token_ids]
    text = "".join(response.text for response in responses)
    assert len(tokens) == 20
    assert engine.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens)).text == text
    finish = responses[-1].finish
    assert finish.reason == pb.FINISH_REASON_LENGTH and finish.WhichOneof("matched") is None
    usage = finish.usage
    prompt = engine.stub.Tokenize(pb.TokenizeRequest(text="ROMEO:")).token_ids
    assert (usage.prompt_tokens, usage.completion_tokens, usage.preemptions) == (len(prompt), 20, 0)
    spans = [d.ToNanoseconds() for d in (usage.queue_time, usage.time_to_first_token, usage.total_time)]
    assert 0 < spans[0] < spans[1] < spans[2]


def test_text_and_its_tokens_are_the_same_prompt(engine: RunningEngine) -> None:
    ids = engine.stub.Tokenize(pb.TokenizeRequest(text="JULIET:\nO")).token_ids
    assert collect(engine.stub.Generate(request("JULIET:\nO")))[:2] == collect(engine.stub.Generate(request(ids)))[:2]


def test_the_seed_is_told_and_repeats_the_text(engine: RunningEngine) -> None:
    free = {"temperature": 1.0}
    first, _, finish = collect(engine.stub.Generate(request(max_tokens=30, sampling=free)))
    again = request(max_tokens=30, sampling={**free, "seed": finish.seed})
    assert collect(engine.stub.Generate(again))[0] == first
    zero = collect(engine.stub.Generate(request(sampling={**free, "seed": 0})))
    assert zero[2].seed == 0
    other = collect(engine.stub.Generate(request(max_tokens=30, sampling={**free, "seed": finish.seed ^ 1})))
    assert other[0] != first


def test_the_second_time_the_prompt_is_cached_and_nothing_else_changes(engine: RunningEngine) -> None:
    prompt = "MERCUTIO:\n" + "No, 'tis not so deep as a well, nor so wide as a church-door. " * 3
    first, second = (collect(engine.stub.Generate(request(prompt))) for _ in range(2))
    assert first[:2] == second[:2]
    assert first[2].usage.cached_tokens == 0
    assert second[2].usage.cached_tokens == (second[2].usage.prompt_tokens - 1) // 16 * 16 > 0
    salted = collect(engine.stub.Generate(request(prompt, cache_salt="mine")))
    assert salted[:2] == first[:2] and salted[2].usage.cached_tokens == 0


def test_stop_strings_tokens_and_eos(engine: RunningEngine) -> None:
    text, tokens, _ = collect(engine.stub.Generate(request(max_tokens=24)))
    stop = text[6:9]
    shown, _, finish = collect(engine.stub.Generate(request(max_tokens=24, stopping={"stop": [stop, "never"]})))
    assert shown == text[: text.index(stop)]
    assert finish.reason == pb.FINISH_REASON_STOP and finish.stop_text == stop
    kept = collect(engine.stub.Generate(request(max_tokens=24, stopping={"stop": [stop], "include_stop": True})))
    assert kept[0] == shown + stop
    _, got, finish = collect(engine.stub.Generate(request(max_tokens=24, stopping={"stop_token_ids": [tokens[5]]})))
    assert got == tokens[: tokens.index(tokens[5]) + 1]
    assert finish.reason == pb.FINISH_REASON_STOP and finish.stop_token_id == tokens[5]


def test_min_tokens_defers_stop_strings(engine: RunningEngine) -> None:
    text, tokens, _ = collect(engine.stub.Generate(request(max_tokens=24)))
    early = text[0]
    late = request(max_tokens=24, stopping={"stop": [early], "min_tokens": 12})
    _, got, finish = collect(engine.stub.Generate(late))
    assert len(got) > 12 and got == tokens[: len(got)]
    before = engine.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens[:12])).text
    if early in text[len(before) :]:
        assert finish.stop_text == early
    else:
        assert finish.reason == pb.FINISH_REASON_LENGTH


def test_max_tokens_is_cut_to_what_the_context_leaves(engine: RunningEngine) -> None:
    context = engine.stub.GetModel(pb.GetModelRequest()).max_context
    _, tokens, finish = collect(engine.stub.Generate(request([1] * (context - 3), max_tokens=50)))
    assert len(tokens) == 3 and finish.reason == pb.FINISH_REASON_LENGTH


def test_unset_fields_take_defaults(engine: RunningEngine) -> None:
    finish = collect(engine.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="A"))))[2]
    assert 1 <= finish.usage.completion_tokens <= 128


def test_tokenize_and_detokenize(engine: RunningEngine) -> None:
    ids = engine.stub.Tokenize(pb.TokenizeRequest(text="Once more unto the breach")).token_ids
    assert engine.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "Once more unto the breach"
    assert engine.stub.Detokenize(pb.DetokenizeRequest()).text == ""
    long = "To be, or not to be. " * 2000  # tokenised off the event loop
    ids = engine.stub.Tokenize(pb.TokenizeRequest(text=long)).token_ids
    assert engine.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == long


def test_what_is_served(engine: RunningEngine) -> None:
    model = engine.stub.GetModel(pb.GetModelRequest())
    assert (model.model_id, model.backend, model.page_size) == ("shakespeare", "numpy", 16)
    assert model.architecture == "LlamaForCausalLM" and model.parameters > 10**6
    assert model.page_bytes % (16 * 4) == 0 and model.vocab_size > 256 and model.eos_token_ids
    assert health(engine.channel) == health_pb2.HealthCheckResponse.SERVING
    assert health(engine.channel, "rocmforge.engine.v1.EngineService") == health_pb2.HealthCheckResponse.SERVING


def test_stats_count(engine: RunningEngine) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest())
    collect(engine.stub.Generate(request([1, 2, 3], max_tokens=5)))
    after = engine.stub.GetStats(pb.GetStatsRequest())
    assert after.finished_requests - before.finished_requests == 1
    assert after.prompt_tokens - before.prompt_tokens == 3
    assert after.generated_tokens - before.generated_tokens == 5
    assert after.steps - before.steps == 5
    assert 1 <= after.page_calls - before.page_calls <= 3
    assert after.queue_limit == 2 and not after.draining and after.kvcache_epoch == 0


# --- refusals ---------------------------------------------------------------------------------------------------------

LONG = "x" * 129
BAD: list[tuple[str, pb.GenerateRequest, str]] = [
    ("prompt", pb.GenerateRequest(), "FIELD_INVALID"),
    ("prompt", pb.GenerateRequest(prompt=pb.Prompt()), "FIELD_INVALID"),
    ("prompt.text", request(""), "FIELD_INVALID"),
    ("prompt.tokens.ids", request([]), "FIELD_INVALID"),
    ("prompt.tokens.ids[3]", request([1, 2, 3, 10**6, 10**7]), "FIELD_INVALID"),
    ("prompt", request([1] * 4096), "PROMPT_TOO_LONG"),
    ("prompt", request("a b " * 4000), "PROMPT_TOO_LONG"),
    ("prompt.text", request("x" * (1 << 20)), "PROMPT_TOO_LONG"),
    ("request_id", request(request_id=LONG), "FIELD_INVALID"),
    ("cache_salt", request(cache_salt=LONG), "FIELD_INVALID"),
    ("priority", request(priority=101), "FIELD_INVALID"),
    ("priority", request(priority=-101), "FIELD_INVALID"),
    ("stopping.max_tokens", request(stopping={"max_tokens": 0}), "FIELD_INVALID"),
    ("stopping.min_tokens", request(stopping={"max_tokens": 3, "min_tokens": 4}), "FIELD_INVALID"),
    ("stopping.stop", request(stopping={"stop": ["x"] * 17}), "FIELD_INVALID"),
    ("stopping.stop[1]", request(stopping={"stop": ["x", ""]}), "FIELD_INVALID"),
    ("stopping.stop[0]", request(stopping={"stop": ["x" * 257]}), "FIELD_INVALID"),
    ("stopping.stop_token_ids", request(stopping={"stop_token_ids": [1] * 65}), "FIELD_INVALID"),
    ("stopping.stop_token_ids[1]", request(stopping={"stop_token_ids": [1, 10**6]}), "FIELD_INVALID"),
    ("sampling.temperature", request(sampling={"temperature": -0.1}), "FIELD_INVALID"),
    ("sampling.temperature", request(sampling={"temperature": float("nan")}), "FIELD_INVALID"),
    ("sampling.top_p", request(sampling={"top_p": 0.0}), "FIELD_INVALID"),
    ("sampling.min_p", request(sampling={"min_p": 1.0}), "FIELD_INVALID"),
]


@pytest.mark.parametrize(("field", "bad", "reason"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_requests_name_their_field(engine: RunningEngine, field: str, bad: Any, reason: str) -> None:
    error = refused(lambda: engine.stub.Generate(bad))
    assert (error.code, error.reason, error.field) == ("INVALID_ARGUMENT", reason, field)
    assert error.message


def test_limits_are_in_the_sentence(engine: RunningEngine) -> None:
    error = refused(lambda: engine.stub.Generate(request([1] * 4096)))
    assert "4096" in error.message and error.metadata["prompt_tokens"] == "4096" and error.metadata["limit"]
    assert "129" in refused(lambda: engine.stub.Generate(request(request_id=LONG))).message
    assert "128" in refused(lambda: engine.stub.Generate(request(request_id=LONG))).message


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "text"),
        ("Tokenize", pb.TokenizeRequest(text="x" * ((1 << 20) + 1)), "text"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 10**6]), "token_ids[1]"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * ((1 << 17) + 1)), "token_ids"),
        ("CancelGeneration", pb.CancelGenerationRequest(), "request_id"),
    ],
)
def test_other_bad_requests(engine: RunningEngine, method: str, message: Any, field: str) -> None:
    error = refused(lambda: getattr(engine.stub, method)(message))
    assert (error.reason, error.field) == ("FIELD_INVALID", field)


def test_what_does_not_fit_the_pool_at_all(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path, "--local-pages", "2").start()
    try:
        assert len(collect(engine.stub.Generate(request([1], max_tokens=32)))[1]) == 32
        error = refused(lambda: engine.stub.Generate(request([1], max_tokens=33)))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "EXCEEDS_POOL")
        assert error.metadata == {"needed_pages": "3", "total_pages": "2"}
    finally:
        engine.close()


# --- requests in flight -----------------------------------------------------------------------------------------------


def test_an_id_is_live_once_and_free_again_afterwards(engine: RunningEngine) -> None:
    engine.steps.hold()
    stream = engine.stub.Generate(request(request_id="mine"))
    assert engine.steps.reached.wait(30)
    error = refused(lambda: engine.stub.Generate(request(request_id="mine")))
    assert (error.code, error.reason, error.field) == ("ALREADY_EXISTS", "REQUEST_EXISTS", "request_id")
    engine.steps.release()
    collect(stream)
    assert collect(engine.stub.Generate(request(request_id="mine")))[2].usage.completion_tokens == 8


def fill(engine: RunningEngine, count: int) -> list[Any]:
    """Begin requests while the model is paused: two run, the others wait."""
    engine.steps.hold()
    streams = [engine.stub.Generate(request(max_tokens=100, request_id="f0"))]
    assert engine.steps.reached.wait(30)
    streams += [engine.stub.Generate(request(max_tokens=100, request_id=f"f{at}")) for at in range(1, count)]
    return streams


def test_a_full_queue(engine: RunningEngine) -> None:
    # One runs. While the model stands still the others collect in the inbox: one more may run, two may wait.
    streams = fill(engine, 7)
    outcomes: list[Any] = []
    lock = threading.Lock()

    def read(stream: Any) -> None:
        try:
            outcome: Any = collect(stream)[2]
        except grpc.RpcError as failure:
            outcome = rpc.error_from(failure)
        with lock:
            outcomes.append(outcome)

    threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    engine.until_live(7)
    engine.steps.release()
    for thread in threads:
        thread.join(60)
    errors = [outcome for outcome in outcomes if isinstance(outcome, ServiceError)]
    assert len(errors) == 3 and len(outcomes) == 7
    assert {(error.code, error.reason) for error in errors} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
    assert all(error.retry_after_s for error in errors)


def test_cancelled_by_another_call_while_running_and_while_queued(engine: RunningEngine) -> None:
    streams = fill(engine, 4)
    engine.until_live(4)
    for name in ("f0", "f3"):
        engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=name))
    engine.steps.release()
    finishes = [collect(stream)[2] for stream in streams]
    cancelled, length = pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_LENGTH
    assert [finish.reason for finish in finishes] == [cancelled, length, length, cancelled]
    engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="f0"))  # over: fine
    error = refused(lambda: engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="never")))
    assert (error.code, error.reason) == ("NOT_FOUND", "REQUEST_UNKNOWN")


def test_dropping_the_call_ends_the_request(engine: RunningEngine) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests
    streams = fill(engine, 4)
    engine.until_live(4)
    for stream in streams:
        stream.cancel()
    engine.until_told(3 + 4)  # of three that wait to be looked at, and of four ends
    engine.steps.release()
    engine.idle()
    assert engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests - before == 4


def test_a_deadline_ends_the_request(engine: RunningEngine) -> None:
    engine.steps.hold()
    with pytest.raises(grpc.RpcError) as caught:
        list(engine.stub.Generate(request(max_tokens=400), timeout=0.05))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    engine.steps.release()
    engine.idle()


def test_a_failing_forward_pass_is_one_request_s_error(engine: RunningEngine) -> None:
    def fault(step: Any) -> None:
        for chunk in step:
            if chunk.sequence.id == "bad":
                chunk.sequence.tokens[0] = 10**9  # out of the vocabulary: the model itself raises

    engine.steps.fault = fault
    good = engine.stub.Generate(request([7, 8, 9], max_tokens=12))
    error = refused(lambda: engine.stub.Generate(request([4, 5, 6], request_id="bad")))
    assert (error.code, error.reason) == ("INTERNAL", "FORWARD_FAILED")
    assert len(collect(good)[1]) == 12


def test_answers_do_not_depend_on_company(engine: RunningEngine) -> None:
    asked = [request(f"Act {at}", 16, sampling={"temperature": 0.9, "seed": at}) for at in range(2)]
    alone = [collect(engine.stub.Generate(one))[:2] for one in asked]
    streams = [engine.stub.Generate(one) for one in asked]
    assert [collect(stream)[:2] for stream in streams] == alone


def test_many_requests_leave_nothing(engine: RunningEngine) -> None:
    for _ in range(150):
        collect(
            engine.stub.Generate(
                request([1, 2, 3], max_tokens=2, sampling={"temperature": 0.8, "top_k": 50, "top_p": 0.9})
            )
        )
    engine.idle()
    loop = engine.engine.loop
    assert loop is not None and not loop.scheduler.live and not loop.scheduler._holds
    assert loop.scheduler._sent == ([], []) and not loop.scheduler._released and not loop._events
    assert len(engine.engine.streams._over) <= 1024 and not engine.engine.streams._live


# --- start and stop ---------------------------------------------------------------------------------------------------


def test_drain(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path).start()
    try:
        engine.steps.hold()
        running = engine.stub.Generate(request(max_tokens=6))
        assert engine.steps.reached.wait(30)
        stopping = engine.begin(engine.engine.stop(30))
        until(lambda: health(engine.channel) != health_pb2.HealthCheckResponse.SERVING)
        error = refused(lambda: engine.stub.Generate(request()))
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING") and error.retry_after_s
        assert engine.stub.GetStats(pb.GetStatsRequest()).draining
        engine.steps.release()
        assert len(collect(running)[1]) == 6
        stopping.result(30)
        engine.stopped = True
    finally:
        engine.close()


def test_a_drain_tells_those_that_wait_and_lets_those_go_on_that_run(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path, "--max-batch", "2").start()
    try:
        engine.steps.hold()
        asked = [submitted("runs", 400), submitted("waits", 6)]
        engine.stub.SubmitGeneration(asked[0])
        running = engine.stub.Generate(request(max_tokens=400))
        assert engine.steps.reached.wait(30)
        engine.until_live(2)
        waiting = engine.stub.Generate(request(max_tokens=6))
        late = engine.stub.SubmitGeneration.future(asked[1])
        engine.until_live(4)
        engine.steps.step()
        late.result(30)  # it is queued
        watches = [engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=n)) for n in ("runs", "waits")]
        next(watches[0])
        stopping = engine.begin(engine.engine.stop(100))
        until(lambda: health(engine.channel) != health_pb2.HealthCheckResponse.SERVING)
        # What was said before may be asked for as long as somebody is served, and the same submission again.
        assert engine.stub.SubmitGeneration(asked[0]).generation.state == pb.GENERATION_STATE_RUNNING
        error = refused(lambda: engine.stub.SubmitGeneration(submitted("new", 6)))
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING") and error.retry_after_s
        engine.steps.release()
        assert len(collect(running)[1]) == 400
        error = refused(lambda: waiting)
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING") and error.retry_after_s
        *_, last = watches[0]
        assert last.response.finish.reason == pb.FINISH_REASON_LENGTH
        *_, last = watches[1]
        error = rpc.error_from_status(last.error)
        assert error.reason == "DRAINING" and error.retry_after_s
        stopping.result(30)
        engine.stopped = True
    finally:
        engine.close()


def submitted(name: str, max_tokens: int) -> pb.SubmitGenerationRequest:
    return pb.SubmitGenerationRequest(request=request(max_tokens=max_tokens, request_id=name))


def test_what_outlasts_the_grace_is_told_so(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path).start()
    try:
        engine.steps.hold()
        running = engine.stub.Generate(request(max_tokens=900))
        assert engine.steps.reached.wait(30)
        alone = engine.stub.SubmitGeneration.future(submitted("alone", 900))
        engine.until_live(2)
        engine.steps.step()
        alone.result(30)
        watch = engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id="alone"))
        for _ in range(2):  # one to find its pages, one of its own
            engine.steps.step()
        next(running)
        next(watch)
        stopping = engine.begin(engine.engine.stop(0.01))
        loop = engine.engine.loop
        assert loop is not None
        engine.until_told(2)  # the grace is over
        engine.steps.release()
        error = refused(lambda: running)
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING") and "grace of 0.01 s is over" in error.message
        *_, last = watch
        assert rpc.error_from_status(last.error).message == error.message
        stopping.result(30)
        engine.stopped = True
        assert not loop.scheduler.live
    finally:
        engine.close()


def test_an_engine_that_cannot_find_its_daemon_says_so(tmp_path: Path) -> None:
    engine = RunningEngine(tmp_path, "--kvcache-patience", "0.3", kvcache=f"unix:{tmp_path}/none.sock")
    try:
        starting = engine.begin(engine.engine.start())
        until(lambda: engine.engine.bound)
        error = refused(lambda: engine.stub.Generate(request(), wait_for_ready=True))
        assert (error.code, error.reason) == ("UNAVAILABLE", "NOT_READY") and "starting" in error.message
        error = refused(lambda: engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="one")))
        assert error.reason == "NOT_READY"
        assert health(engine.channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(ServiceError) as caught:
            starting.result(60)
        assert caught.value.reason == "KVCACHE_DOWN"
    finally:
        engine.close()
