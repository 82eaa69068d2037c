"""Submitted requests of several samples over gRPC: the output of Generate, retained, replayed, and ended together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2 as kv
from services.common import rpc
from services.common.errors import ForwardFailed, ServiceError
from services.engine.api import requests
from services.engine.delivery import generation
from services.engine.sampling.result import Result
from services.engine.scheduling.scheduler import Advance
from services.engine.scheduling.sequence import MAX_SAMPLES
from services.engine.scheduling.step import Chunk
from tests.engine.running import RunningEngine, refused, served_by_a_daemon
from tests.engine.scheduling.remnants import places
from tests.generation import request
from tests.polling import until

Engine = RunningEngine
pytestmark = pytest.mark.usefixtures("no_generations")
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 2**64 - 2}  # the samples' seeds pass 2^64


@pytest.fixture(scope="module", params=["off", "on"], ids=["synchronous", "asynchronous"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    limits = ["--max-batch", "6", "--max-queue", "14", "--local-pages", "256", "--generation-count", "4"]
    limits += ["--async-steps", request.param]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits)
    yield one.start()
    one.close()


def asked(n: int = 3, max_tokens: int = 12, **fields: Any) -> pb.GenerateRequest:
    fields["sampling"] = DRAWN | fields.pop("sampling", {})
    return request(fields.pop("prompt", "ROMEO:\n"), max_tokens, n=n, **fields)


def submit(engine: Engine, message: pb.GenerateRequest, **fields: Any) -> pb.Generation:
    return engine.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=message, **fields)).generation


def get(engine: Engine, name: str) -> pb.Generation:
    return engine.stub.GetGeneration(pb.GetGenerationRequest(request_id=name)).generation


def watching(engine: Engine, name: str, from_tokens: Sequence[int] = (), **fields: Any) -> Any:
    return engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=name, from_tokens=from_tokens, **fields))


@dataclass
class Told:
    """What a reader received of each sample."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[str]] = field(default_factory=dict)
    prompt: list[str] = field(default_factory=list)
    finishes: dict[int, pb.Finish] = field(default_factory=dict)
    error: ServiceError | None = None

    def add(self, one: pb.GenerateResponse) -> None:
        at = one.sample
        self.tokens.setdefault(at, []).extend(one.token_ids)
        self.texts[at] = self.texts.get(at, "") + one.text
        self.logprobs.setdefault(at, []).extend(str(choice) for choice in one.logprobs)
        self.prompt += [str(choice) for choice in one.prompt_logprobs]
        if one.HasField("finish"):
            assert self.finishes.setdefault(at, one.finish) == one.finish

    def read(self, stream: Any, samples: int) -> Told:
        """A watch to its end. Nothing follows a sample's finish, nor an error."""
        ended = set[int]()
        for one in stream:
            assert self.error is None and one.samples == samples
            if one.WhichOneof("result") == "error":
                self.error = rpc.error_from_status(one.error)
                continue
            assert one.response.sample not in ended
            if one.response.HasField("finish"):
                ended.add(one.response.sample)
            self.add(one.response)
        assert self.error is not None or ended == set(range(samples))
        return self

    def places(self, samples: int) -> list[int]:
        return [len(self.tokens.get(at, [])) for at in range(samples)]

    def said(self) -> dict[int, Any]:
        """Everything except durations."""
        ends = {at: (finish.reason, finish.seed) for at, finish in self.finishes.items()}
        return {at: (self.tokens[at], self.texts[at], self.logprobs[at], ends.get(at)) for at in sorted(self.tokens)}


def generated(engine: Engine, message: pb.GenerateRequest) -> Told:
    told = Told()
    for one in engine.stub.Generate(message):
        told.add(one)
    return told


def watched(engine: Engine, name: str, samples: int = 3, from_tokens: Sequence[int] = ()) -> Told:
    return Told().read(watching(engine, name, from_tokens), samples)


def kept(found: pb.Generation) -> Told:
    """The response of GetGeneration."""
    assert not (found.text or found.token_ids or found.logprobs)
    assert not (found.HasField("finish") or found.HasField("usage"))
    told = Told(prompt=[str(choice) for choice in found.prompt_logprobs])
    for at, sample in enumerate(found.samples):
        finish = sample.finish if sample.HasField("finish") else None
        told.add(
            pb.GenerateResponse(
                sample=at, text=sample.text, token_ids=sample.token_ids, logprobs=sample.logprobs, finish=finish
            )
        )
        assert finish is None or finish.usage == sample.usage
    return told


def held(engine: Engine, name: str, **fields: Any) -> str:
    """Submitted while the model is paused after the first step that this request causes."""
    engine.steps.hold()
    assert submit(engine, asked(request_id=name, **fields)).request_id == name
    assert engine.steps.reached.wait(30)
    return name


# --- what one does ----------------------------------------------------------------------------------------------------


def test_it_is_what_generate_would_say(engine: Engine) -> None:
    message = asked(4, 20, sampling={"logprobs": 2, "prompt_logprobs": 1}, stopping={"stop": ["the"]})
    whole = generated(engine, message)
    assert len({tuple(tokens) for tokens in whole.tokens.values()}) == 4
    assert [whole.finishes[at].seed for at in range(4)] == [2**64 - 2, 2**64 - 1, 0, 1]
    engine.steps.hold()
    begun = submit(engine, message)
    assert begun.state in (pb.GENERATION_STATE_QUEUED, pb.GENERATION_STATE_RUNNING) and len(begun.samples) == 4
    assert all(sample.usage.prompt_tokens for sample in begun.samples)
    engine.steps.release()
    told = watched(engine, begun.request_id, 4)
    assert told.said() == whole.said() and told.prompt == whole.prompt
    over = get(engine, begun.request_id)
    assert over.state == pb.GENERATION_STATE_DONE and over.HasField("expire_time") and not over.HasField("error")
    assert kept(over).said() == whole.said() and kept(over).prompt == whole.prompt
    usages = [sample.usage for sample in over.samples]
    assert [usage.completion_tokens for usage in usages] == whole.places(4)
    assert [usage.cached_tokens for usage in usages[1:]] == [usages[0].prompt_tokens] * 3


def test_of_one_sample_nothing_is_different(engine: Engine) -> None:
    for n in (0, 1):
        name = submit(engine, asked(n, 5)).request_id
        assert len([token for one in watching(engine, name) for token in one.response.token_ids]) == 5
        responses = list(watching(engine, name, from_token=2))
        assert {one.samples for one in responses} == {0}
        over = get(engine, name)
        assert not over.samples and over.HasField("finish") and over.HasField("usage")
        assert [token for one in responses for token in one.response.token_ids] == over.token_ids[2:]
        rest = [token for one in watching(engine, name, [2]) for token in one.response.token_ids]
        assert rest == over.token_ids[2:]


def test_every_replay_is_exactly_the_rest_of_each(engine: Engine) -> None:
    name = submit(engine, asked(3, 10, sampling={"logprobs": 0})).request_id
    whole = watched(engine, name)
    for at in range(11):
        places = [at, 10 - at, at * 7 % 11]
        late = watched(engine, name, from_tokens=places)
        assert late.finishes == whole.finishes
        for sample, place in enumerate(places):
            assert late.tokens[sample] == whole.tokens[sample][place:]
            assert late.logprobs[sample] == whole.logprobs[sample][place:]
            assert whole.texts[sample].endswith(late.texts[sample])
    assert watched(engine, name, from_tokens=[4]).places(3) == [6, 10, 10]
    assert watched(engine, name, from_tokens=[10] * 3).places(3) == [0, 0, 0]


def test_a_reader_that_loses_its_connection_all_the_time_repeats_nothing_and_misses_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "REPLAY_TOKENS", 7)  # many messages, however late it reads
    message = asked(5, 40, sampling={"logprobs": 0, "prompt_logprobs": 0})
    whole = generated(engine, message)
    name, told = submit(engine, message).request_id, Told()
    connections = 0
    while len(told.finishes) < 5:
        stream = watching(engine, name, told.places(5), without_samples=list(told.finishes))
        for _ in range(1 + connections % 4):
            told.add(next(stream).response)
            if len(told.finishes) == 5:
                break
        stream.cancel()  # and whatever was on its way
        connections += 1
    assert told.said() == whole.said() and told.prompt == whole.prompt
    assert connections > 3
    until(lambda: not engine.engine.generations.find(name)._watches)


def test_a_crowd_of_readers_each_has_the_whole(engine: Engine) -> None:
    message = asked(6, 60, request_id="crowd")
    whole = generated(engine, asked(6, 60)).said()
    engine.steps.hold()
    submit(engine, message)
    answers: dict[int, Any] = {}

    def follow(at: int) -> None:
        answers[at] = watched(engine, "crowd", 6).said()

    threads = [threading.Thread(target=follow, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    engine.steps.release()
    for thread in threads:
        thread.join(60)
    assert list(answers.values()) == [whole] * 8


def test_one_that_never_reads_stalls_nobody_and_loses_nothing(engine: Engine) -> None:
    name = held(engine, "unread", n=6, max_tokens=200)
    unread = watching(engine, name)
    engine.steps.release()
    whole = watched(engine, name, 6)
    assert whole.places(6) == [200] * 6
    assert generated(engine, asked(2, 4)).places(2) == [4, 4]
    assert Told().read(unread, 6).said() == whole.said()


def test_as_many_samples_as_there_may_be_and_more_than_run_at_a_time(engine: Engine) -> None:
    message = asked(MAX_SAMPLES, 9)
    name = submit(engine, message).request_id
    told = watched(engine, name, MAX_SAMPLES)
    assert told.places(MAX_SAMPLES) == [9] * MAX_SAMPLES
    message.n = 1
    for at in (0, 5, MAX_SAMPLES - 1):
        message.sampling.seed = (DRAWN["seed"] + at) % 2**64
        assert generated(engine, message).tokens[0] == told.tokens[at]


def test_it_goes_on_when_nobody_is_there(engine: Engine) -> None:
    name = held(engine, "alone", n=4, max_tokens=30)
    stream = watching(engine, name)
    engine.steps.release()
    next(stream)
    stream.cancel()
    engine.idle()
    assert [sample.usage.completion_tokens for sample in get(engine, name).samples] == [30] * 4


def test_what_it_has_said_so_far(engine: Engine) -> None:
    name = held(engine, "so-far", n=3, max_tokens=6)
    early = get(engine, name)
    assert early.state == pb.GENERATION_STATE_RUNNING and kept(early).places(3) == [0, 0, 0]
    engine.steps.release()
    whole = watched(engine, name)
    assert kept(get(engine, name)).said() == whole.said()


def test_the_same_again_and_another_number_of_samples(engine: Engine) -> None:
    message = asked(3, 6, request_id="mine")
    first, again = submit(engine, message), submit(engine, message)
    assert first.request_id == again.request_id == "mine"
    error = refused(lambda: submit(engine, asked(2, 6, request_id="mine")))
    assert (error.reason, error.field) == ("REQUEST_EXISTS", "request.request_id")
    assert watched(engine, "mine").places(3) == [6] * 3
    assert kept(submit(engine, message)).places(3) == [6] * 3


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_cancelling_ends_every_sample(engine: Engine, tokens: int) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests
    cancelled = threading.Event()

    def cancel(step: Sequence[Chunk]) -> None:
        if not cancelled.is_set() and step[0].sequence.num_generated_tokens >= tokens:
            cancelled.set()
            engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="ends"))

    engine.steps.fault = cancel
    submit(engine, asked(8, 400, request_id="ends"))  # two of them wait
    told = watched(engine, "ends", 8)
    assert {finish.reason for finish in told.finishes.values()} == {pb.FINISH_REASON_CANCELLED}
    assert len(told.finishes) == 8 and max(told.places(8)) < 400
    over = get(engine, "ends")
    assert over.state == pb.GENERATION_STATE_DONE and kept(over).said() == told.said()
    engine.idle()
    assert engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests == before + 8
    engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="ends"))
    assert list(get(engine, "ends").samples) == list(over.samples)


def test_cancelling_leaves_the_samples_that_are_done_as_they_are(engine: Engine) -> None:
    """The third of four stops at a token that only it draws early."""
    whole = generated(engine, asked(4, 60))
    stop = next(
        token for token in whole.tokens[2] if all(token not in whole.tokens[at][:40] for at in range(4) if at != 2)
    )
    place = whole.tokens[2].index(stop)
    cancelled = threading.Event()

    def cancel(step: Sequence[Chunk]) -> None:
        if not cancelled.is_set() and step[0].sequence.num_generated_tokens > place + 2:
            cancelled.set()
            engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="part"))

    engine.steps.fault = cancel
    submit(engine, asked(4, 500, request_id="part", stopping={"stop_token_ids": [stop]}))
    told = watched(engine, "part", 4)
    reasons = [told.finishes[at].reason for at in range(4)]
    assert reasons[2] == pb.FINISH_REASON_STOP and told.finishes[2].stop_token_id == stop
    assert [reasons[at] for at in (0, 1, 3)] == [pb.FINISH_REASON_CANCELLED] * 3
    assert told.tokens[2] == whole.tokens[2][: place + 1]


def test_a_live_one_is_not_deleted_until_its_last_sample_has_ended(engine: Engine) -> None:
    name = held(engine, "live", n=3, max_tokens=4)
    delete = engine.stub.DeleteGeneration
    error = refused(lambda: delete(pb.DeleteGenerationRequest(request_id=name)))
    assert (error.reason, error.field) == ("REQUEST_LIVE", "request_id")
    engine.steps.release()
    watched(engine, name)
    delete(pb.DeleteGenerationRequest(request_id=name))
    assert refused(lambda: watching(engine, name, [1, 1, 1])).reason == "REQUEST_UNKNOWN"
    assert engine.stub.GetStats(pb.GetStatsRequest()).generation_bytes == 0


def test_a_timeout_keeps_what_there_is_of_each(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes when each has three tokens."""
    deadlines = engine.engine.loop.scheduler._deadlines
    take, ahead = deadlines.take, [0.0]
    monkeypatch.setattr(deadlines, "take", lambda now: take(now + ahead[0]))

    def due(step: Sequence[Chunk]) -> None:
        ahead[0] = 600.0 * all(chunk.sequence.num_generated_tokens >= 3 for chunk in step)

    engine.steps.fault = due
    submit(engine, asked(4, 900, request_id="late"), timeout=duration_pb2.Duration(seconds=600))
    told = watched(engine, "late", 4)
    assert told.error is not None and told.error.reason == "DEADLINE_EXCEEDED" and not told.finishes
    assert min(told.places(4)) >= 3
    over = get(engine, "late")
    assert over.state == pb.GENERATION_STATE_FAILED and kept(over).said() == told.said()
    assert rpc.error_from_status(over.error).reason == "DEADLINE_EXCEEDED"
    assert [sample.usage.completion_tokens for sample in over.samples] == told.places(4)
    again = watched(engine, "late", 4, told.places(4))
    assert again.error is not None and not again.tokens


def test_one_sample_that_fails_fails_the_others_and_every_watcher_is_told(engine: Engine) -> None:
    assert engine.engine.loop is not None
    scheduler = engine.engine.loop.scheduler
    apply = scheduler.apply

    def failing(step: Sequence[Chunk], results: Sequence[Result]) -> Advance:
        bad = [chunk.sequence.request.sample == 2 and chunk.sequence.num_generated_tokens == 3 for chunk in step]
        return apply(step, [ForwardFailed("boom") if at else one for at, one in zip(bad, results, strict=True)])

    scheduler.apply = failing
    try:
        submit(engine, asked(4, 9, request_id="bad"))
        for _ in range(2):
            told = watched(engine, "bad", 4)
            assert told.error is not None and told.error.reason == "FORWARD_FAILED" and not told.finishes
            assert told.places(4)[2] == 3
    finally:
        scheduler.apply = apply
    assert get(engine, "bad").state == pb.GENERATION_STATE_FAILED
    engine.idle()


def test_a_drain_lets_all_samples_of_a_prompt_that_ran_end_and_tells_those_that_wait_once(tmp_path: Path) -> None:
    small = RunningEngine(tmp_path, "--max-batch", "2", "--local-pages", "64").start()
    try:
        held(small, "runs", n=3, max_tokens=300)
        late = small.stub.SubmitGeneration.future(pb.SubmitGenerationRequest(request=asked(2, 6, request_id="waits")))
        small.until_live(2)
        small.steps.step()
        late.result(30)
        runs, waits = watching(small, "runs"), watching(small, "waits")
        told = Told()
        told.add(next(runs).response)
        stopping = small.begin(small.engine.stop(100))
        until(lambda: small.stub.GetStats(pb.GetStatsRequest()).draining)
        small.steps.release()
        told.read(runs, 3)
        assert told.places(3) == [300] * 3
        nothing = Told().read(waits, 2)
        assert nothing.error is not None and nothing.error.reason == "DRAINING" and not nothing.tokens
        stopping.result(30)
        small.stopped = True
    finally:
        small.close()


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_kept_is_bounded_by_count_whatever_the_samples(engine: Engine) -> None:
    for at in range(12):
        name = submit(engine, asked(1 + at % 6, 2, request_id=f"many{at}")).request_id
        list(watching(engine, name))
        assert engine.engine.generations.retained <= 4
    purged = engine.stub.PurgeGenerations(pb.PurgeGenerationsRequest(older_than=duration_pb2.Duration())).purged
    assert purged == 4 and engine.engine.generations.bytes == 0


def test_when_it_is_over_only_the_registry_knows_it(engine: Engine) -> None:
    name = "remembered-by-nobody"
    submit(engine, asked(5, 20, request_id=name))
    watched(engine, name, 5)
    engine.idle()
    kept_at = [path for path in places(engine.engine, name) if ".generations" not in path and "source._" not in path]
    assert kept_at == [".streams._over{}"]  # that there was such an id, for the sake of a late cancel
    engine.stub.DeleteGeneration(pb.DeleteGenerationRequest(request_id=name))
    assert not places(engine.engine.generations, name)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [MAX_SAMPLES + 1, 64, 2**32 - 1])
def test_more_samples_than_there_may_be(engine: Engine, n: int) -> None:
    error = refused(lambda: submit(engine, asked(n)))
    assert (error.code, error.reason, error.field) == ("INVALID_ARGUMENT", "FIELD_INVALID", "request.n")
    assert error.message == f"n is {n}; it must be at most 16" and error.metadata["limit"] == "16"
    assert not len(engine.engine.generations)


def test_more_samples_than_the_engine_has_places_for(tmp_path: Path) -> None:
    small = RunningEngine(tmp_path, "--max-batch", "2", "--max-queue", "2", "--local-pages", "64").start()
    try:
        for _ in range(2):  # as though it had never been submitted
            error = refused(lambda: submit(small, asked(5, request_id="wide")))
            assert (error.reason, error.field, error.metadata["limit"]) == ("FIELD_INVALID", "request.n", "4")
        assert not len(small.engine.generations)
        [answer] = small.stub.BatchGenerate(pb.BatchGenerateRequest(requests=[asked(5)]))
        told = rpc.error_from_status(answer.error)
        assert (told.reason, told.field, told.metadata["limit"]) == ("FIELD_INVALID", "requests[0].n", "4")
        assert watched(small, submit(small, asked(4)).request_id, 4).places(4) == [12] * 4
    finally:
        small.close()


def test_a_full_queue_refuses_all_samples_or_none(engine: Engine) -> None:
    engine.steps.hold()
    blocker = engine.stub.Generate(request(max_tokens=4))
    assert engine.steps.reached.wait(30)
    futures = [
        engine.stub.SubmitGeneration.future(pb.SubmitGenerationRequest(request=asked(7, 3, request_id=f"f{at}")))
        for at in range(3)
    ]
    engine.until_live(4)
    engine.steps.release()
    names, errors = [], []
    for future in futures:
        try:
            names.append(future.result(30).generation.request_id)
        except grpc.RpcError as failed:
            errors.append(rpc.error_from(failed))
    assert [(error.reason, error.field) for error in errors] == [("QUEUE_FULL", "")] and errors[0].retry_after_s
    assert len(names) == 2 and len(engine.engine.generations) == 2
    for name in names:
        assert watched(engine, name, 7).places(7) == [3] * 7
    list(blocker)


def test_where_a_watch_may_not_begin(engine: Engine) -> None:
    name = submit(engine, asked(3, 4)).request_id
    watched(engine, name)
    for fields, where, says in (
        ({"from_tokens": [4, 5, 4]}, "from_tokens[1]", "from_tokens[1] is 5; there are 4 tokens so far"),
        ({"from_tokens": [0] * 4}, "from_tokens", "from_tokens has 4 entries; at most one for each sample, 3"),
        ({"from_tokens": [1] * 10_000}, "from_tokens", "10000 entries"),
        ({"from_token": 1}, "from_token", "from_token is 1; with 3 samples, use from_tokens"),
        ({"from_token": 1, "from_tokens": [1]}, "from_tokens", "from_token is 1; from_tokens cannot be set as well"),
        ({"without_samples": [2, 3]}, "without_samples[1]", "without_samples[1] is 3; it must be at most 2"),
        ({"without_samples": [2, 1, 0]}, "without_samples", "leaves no sample to watch"),
        ({"without_samples": [0] * 10_000}, "without_samples", "10000 entries"),
    ):
        error = refused(lambda given=fields: watching(engine, name, **given))  # type: ignore[misc]
        assert (error.code, error.reason, error.field) == ("INVALID_ARGUMENT", "FIELD_INVALID", where)
        assert says in error.message
    assert not engine.engine.generations.find(name)._watches


def test_log_probabilities_count_for_every_sample(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_OUTPUT_LOGPROBS", 72)
    name = submit(engine, asked(3, 8, sampling={"logprobs": 2})).request_id
    assert len(watched(engine, name).logprobs[2]) == 8
    for beyond in (asked(4, 8, sampling={"logprobs": 2}), asked(3, 9, sampling={"logprobs": 2})):
        error = refused(lambda one=beyond: submit(engine, one))  # type: ignore[misc]
        assert (error.field, error.metadata["limit"]) == ("request.sampling.logprobs", "72")
        assert f"the {beyond.n} completions may have {beyond.n * beyond.stopping.max_tokens} tokens" in error.message


# --- pages that are short, or lost ------------------------------------------------------------------------------------


def test_preempted_samples_say_the_same(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "REPLAY_TOKENS", 7)  # many messages, however late they are read
    small = RunningEngine(tmp_path, "--max-batch", "6", "--local-pages", "14").start()
    try:
        message = asked(5, 60, sampling={"logprobs": 1})
        name = submit(small, message).request_id
        reader, told = watching(small, name), Told()
        for _ in range(9):
            told.add(next(reader).response)
        reader.cancel()
        told.read(watching(small, name, told.places(5)), 5)
        assert small.stub.GetStats(pb.GetStatsRequest()).preemptions > 0
        assert told.said() == watched(small, name, 5).said() == generated(engine, message).said()
        assert sum(sample.usage.preemptions for sample in get(small, name).samples) > 0
        small.idle()
    finally:
        small.close()


@pytest.mark.parametrize("generated_tokens", [0, 1, 7])
def test_a_lost_session_changes_nothing_that_is_told(engine: Engine, tmp_path: Path, generated_tokens: int) -> None:
    one, daemon = served_by_a_daemon(tmp_path, "--max-batch", "6")
    try:
        lost = threading.Event()

        def lose(step: Sequence[Chunk]) -> None:
            if not lost.is_set() and step[0].sequence.num_generated_tokens == generated_tokens:
                lost.set()
                [session] = daemon.session_ids()
                daemon.stub.CloseSession(kv.CloseSessionRequest(session_id=session))

        one.steps.fault = lose
        message = asked(5, 30)
        name = submit(one, message).request_id
        told = watched(one, name, 5)
        assert lost.is_set() and one.stub.GetStats(pb.GetStatsRequest()).recoveries == 1
        assert told.said() == watched(one, name, 5).said() == generated(engine, message).said()
        one.idle()
    finally:
        one.close()
        daemon.close()
