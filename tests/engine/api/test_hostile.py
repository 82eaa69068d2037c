"""Hostile clients beside well-behaved ones: each gets its error, and no other client is affected."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, struct_pb2

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.common.errors import TooManyWatchers
from services.engine.delivery.generation import MAX_WATCHES
from services.engine.text.chat import Chat
from services.engine.text.chat_template import ChatTemplate
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request
from tests.polling import until

SERVICE = "/rocmforge.engine.v1.EngineService/"
INVALID, TOO_LONG = "FIELD_INVALID", "PROMPT_TOO_LONG"
LONG = "x" * 129
LINE = "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds that "
KEPT, SAMPLES = "kept", "samples"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunningEngine]:
    one = RunningEngine(tmp_path, "--max-batch", "8", "--max-queue", "64", "--local-pages", "512").start()
    servicer = one.engine.servicer
    served = servicer._served
    assert served is not None
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    servicer._served = replace(served, chat=Chat({"default": ChatTemplate(template, {})}, served.tokenizer))
    yield one
    one.close()


# --- those that mean no ill -------------------------------------------------------------------------------------------


def free(seed: int, **fields: Any) -> dict[str, Any]:
    return {"temperature": 0.9, "seed": seed, **fields}


VICTIMS = [
    request("ROMEO:", 60, sampling=free(1)),
    request("JULIET:\nO", 40, sampling=free(2, logprobs=3, prompt_logprobs=1, repetition_penalty=1.2), priority=-3),
    request(LINE * 2, 30, sampling=free(3, logprobs=0), n=3, priority=2),
    request("Good", 30, sampling=free(4), n=2, stopping={"min_tokens": 10, "stop": ["the"], "ignore_eos": False}),
]


def told(responses: Any) -> dict[int, tuple[Any, ...]]:
    """The output of each sample, however it was split into responses."""
    said: dict[int, list[Any]] = {}
    for one in responses:
        text, ids, likely, prompt, ends = said.setdefault(one.sample, ["", [], [], [], []])
        said[one.sample][0] = text + one.text
        ids.extend(one.token_ids)
        likely.extend(str(choice) for choice in one.logprobs)
        prompt.extend(str(choice) for choice in one.prompt_logprobs)
        ends.extend([(one.finish.reason, one.finish.seed)] * one.HasField("finish"))
    return {sample: tuple(fields) for sample, fields in said.items()}


# --- those that do ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A message, or bytes that are not one, and the expected error."""

    method: str
    message: Any
    reason: str
    field: str = ""


def bad(field: str, prompt: Any = "x", *, reason: str = INVALID, **fields: Any) -> list[Bad]:
    """A request that every call with a request rejects."""
    one = request(prompt, **fields)
    return [
        Bad("Generate", one, reason, field),
        Bad("SubmitGeneration", pb.SubmitGenerationRequest(request=one), reason, f"request.{field}"),
    ]


def told_to(field: str, reason: str = INVALID, **fields: Any) -> list[Bad]:
    """Messages that every call with messages rejects."""
    messages = pb.Messages(**fields)
    one = pb.GenerateRequest(prompt=pb.Prompt(messages=messages))
    return [
        Bad("Generate", one, reason, f"prompt.{field}"),
        Bad("Tokenize", pb.TokenizeRequest(messages=messages), reason, field),
    ]


def watch(field: str, **fields: Any) -> Iterator[Bad]:
    yield Bad("WatchGeneration", pb.WatchGenerationRequest(request_id=SAMPLES, **fields), INVALID, field)


def a_message(**fields: Any) -> pb.Message:
    return pb.Message(**{"role": "user", "content": "x", **fields})


def not_numbers() -> Iterator[Bad]:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        for value in (math.nan, math.inf, -math.inf):
            yield from bad(f"sampling.{name}", sampling={name: value})
    for value in (math.nan, math.inf, -math.inf):
        yield from bad("sampling.logit_bias[5]", sampling={"logit_bias": {5: value}})
        number = struct_pb2.Struct(fields={"a": struct_pb2.Value(number_value=value)})
        yield from told_to("messages.template_arguments", items=[a_message()], template_arguments=number)


def spans() -> Iterator[Bad]:
    for name, seconds, nanos in [
        *(("timeout", 0, 0), ("timeout", -1, 0), ("timeout", 2**62, 0), ("timeout", 1, -1), ("timeout", 1, 10**9)),
        *(("retention", 0, 0), ("retention", -(2**62), 0), ("retention", 2**62, 0)),
    ]:
        span = {name: duration_pb2.Duration(seconds=seconds, nanos=nanos)}
        yield Bad("SubmitGeneration", pb.SubmitGenerationRequest(request=request(), **span), INVALID, name)
    span_ago = duration_pb2.Duration(seconds=-1)
    yield Bad("PurgeGenerations", pb.PurgeGenerationsRequest(older_than=span_ago), INVALID, "older_than")


def unknown() -> Iterator[Bad]:
    kinds = {
        "WatchGeneration": pb.WatchGenerationRequest,
        "GetGeneration": pb.GetGenerationRequest,
        "CancelGeneration": pb.CancelGenerationRequest,
        "DeleteGeneration": pb.DeleteGenerationRequest,
    }
    for method, kind in kinds.items():
        for name, reason in (("nobody", "REQUEST_UNKNOWN"), ("", INVALID), (LONG, INVALID), ("ü" * 10**4, INVALID)):
            yield Bad(method, kind(request_id=name), reason, "request_id")


def unreadable() -> Iterator[Bad]:
    whole = request(LINE * 9, n=3, sampling={"logit_bias": {7: 1.0}, "seed": 3}, stopping={"stop": ["a", "b"]})
    wire = whole.SerializeToString()
    for length in range(1, len(wire), 97):
        yield Bad("Generate", wire[:length], INVALID)
    deep = b""
    for _ in range(200):  # a value of a Struct that is a list of one, which is a list of one, ...
        deep = field(6, field(1, deep))
    entry = field(1, b"a") + field(2, deep)
    yield Bad("Tokenize", field(2, field(4, field(1, entry))), INVALID)
    yield Bad("Generate", field(2, field(1, b"\xc3\x28")), INVALID)
    for junk in (b"\xff" * 100, b"\x0a\x02\xff\xfe", b"\x0b", b"\x0a" + b"\xff" * 9):
        for method in ("Generate", "BatchGenerate", "SubmitGeneration", "WatchGeneration"):
            yield Bad(method, junk, INVALID)


def field(number: int, body: bytes) -> bytes:
    """A field of bytes on the wire."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def varint(number: int) -> bytes:
    groups = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def endless() -> Iterator[Bad]:
    """Things too long, too many, too large."""
    megabytes = (LINE * 100_000)[: 10 << 20]
    yield from bad("prompt.text", megabytes, reason=TOO_LONG)
    yield from bad("prompt", [999] * 5_000_000, reason=TOO_LONG)
    yield from bad("prompt", LINE * 200, reason=TOO_LONG)
    yield from bad("stopping.stop", stopping={"stop": ["never"] * 10_000})
    yield from bad("stopping.stop[1]", stopping={"stop": ["never", "x" * 10**6]})
    yield from bad("stopping.stop_token_ids", stopping={"stop_token_ids": range(10**6)})
    yield from bad("stopping.stop_token_ids[1]", stopping={"stop_token_ids": [1, 2**32 - 1]})
    yield from bad("stopping.min_tokens", stopping={"min_tokens": 2**32 - 1})
    yield from bad("stopping.max_tokens", stopping={"max_tokens": 0})
    yield from bad("sampling.logit_bias", sampling={"logit_bias": dict.fromkeys(range(10**4), 1.0)})
    yield from bad("sampling.logit_bias[1024]", sampling={"logit_bias": {1024: 1.0}})
    for name in ("top_k", "logprobs", "prompt_logprobs"):
        yield from bad(f"sampling.{name}", sampling={name: 2**32 - 1})
    yield from bad("n", n=2**32 - 1)
    yield from bad("n", n=17)
    yield from bad("priority", priority=-(2**31))
    yield from bad("priority", priority=101)
    yield from bad("request_id", request_id="x" * 10**6)
    yield from bad("cache_salt", cache_salt=LONG)
    yield from bad("cache_retention", cache_retention={"priority": 2**32 - 1})
    yield from bad("prompt.tokens.ids", [])
    yield from bad("prompt.tokens.ids[2]", [1, 2, 1024, 2**32 - 1])
    yield from bad("prompt.text", "")
    yield from bad("request_id", request_id=KEPT, reason="REQUEST_EXISTS")
    yield from told_to("messages", TOO_LONG, items=[a_message(content=megabytes)])
    yield from told_to("messages", TOO_LONG, items=[a_message()], tools=['{"a": "' + megabytes + '"}'])
    yield from told_to("messages.tools[1]", items=[a_message()], tools=["{}", "[" * 60_000])
    yield from told_to("messages.tools[0]", items=[a_message()], tools=['{"a":' * 9000 + "1" + "}" * 9000])
    yield from told_to("messages.items[0].other", items=[a_message(other="[" * 60_000)])
    yield from told_to("messages.items[0].other", items=[a_message(other='{"a": NaN}')])
    yield from told_to("messages.items[0].other", items=[a_message(other='{"a": "\\ud800"}')])
    yield from told_to("messages.items[1].role", items=[a_message(), a_message(role="")])
    yield from told_to("messages.items", items=[])
    yield from told_to("messages", TOO_LONG, items=[a_message()] * 10_000)
    yield Bad("Generate", pb.GenerateRequest(), INVALID, "prompt")
    yield Bad("Tokenize", pb.TokenizeRequest(text=megabytes), INVALID, "text")
    yield Bad("Detokenize", pb.DetokenizeRequest(token_ids=[1] * 1_000_000), INVALID, "token_ids")
    yield Bad("Detokenize", pb.DetokenizeRequest(token_ids=[1, 1024]), INVALID, "token_ids[1]")
    yield Bad("BatchGenerate", pb.BatchGenerateRequest(), INVALID, "requests")
    yield Bad("BatchGenerate", pb.BatchGenerateRequest(requests=[request()] * 10_000), INVALID, "requests")
    yield Bad("WatchGeneration", pb.WatchGenerationRequest(request_id=KEPT, from_token=9), INVALID, "from_token")
    yield from watch("from_tokens", from_tokens=[0] * 50_000)
    yield from watch("from_tokens[1]", from_tokens=[0, 2**32 - 1])
    yield from watch("without_samples", without_samples=[0] * 50_000)
    yield from watch("without_samples[1]", without_samples=[0, 2**32 - 1])
    yield Bad("SubmitGeneration", pb.SubmitGenerationRequest(request=request(n=64)), INVALID, "request.n")


def provoke(engine: RunningEngine, one: Bad) -> None:
    stream = one.method in ("Generate", "BatchGenerate", "WatchGeneration")
    kind = engine.channel.unary_stream if stream else engine.channel.unary_unary
    call = kind(SERVICE + one.method)
    body = one.message if isinstance(one.message, bytes) else one.message.SerializeToString()
    error = refused(lambda: list(call(body, timeout=300)) if stream else call(body, timeout=300))
    assert (error.reason, error.field) == (one.reason, one.field), f"{one.method} {body[:99]!r}: {error.message}"


GARBAGE: list[tuple[pb.GenerateRequest, str, str]] = [
    (pb.GenerateRequest(), INVALID, "prompt"),
    (request(""), INVALID, "prompt.text"),
    (request([2**32 - 1]), INVALID, "prompt.tokens.ids[0]"),
    (request(n=2**32 - 1), INVALID, "n"),
    (request(sampling={"top_p": math.nan}), INVALID, "sampling.top_p"),
    (request(request_id=KEPT, n=4), "REQUEST_EXISTS", "request_id"),
    (request(priority=2**31 - 1), INVALID, "priority"),
    (request((LINE * 200)[: 16 << 10]), TOO_LONG, "prompt"),
]


def batches(engine: RunningEngine) -> None:
    """Only errors, each the expected one: every item in turn, long texts in some turns only."""
    rows = [GARBAGE[at % (len(GARBAGE) - (at % 64 > 8))] for at in range(1024)]
    errors = {}
    for answer in engine.stub.BatchGenerate(pb.BatchGenerateRequest(requests=[row[0] for row in rows])):
        assert answer.HasField("error") and answer.index not in errors
        error = rpc.error_from_status(answer.error)
        errors[answer.index] = error.reason, error.field
    assert errors == {at: (reason, f"requests[{at}].{field}") for at, (_, reason, field) in enumerate(rows)}


def watchers(engine: RunningEngine) -> None:
    """The maximum number of watchers, which read nothing, and one more."""
    until(lambda: crowded(engine))


def crowded(engine: RunningEngine) -> bool:
    """Whether all of them began before the generation ended."""
    asked = pb.SubmitGenerationRequest(request=request("On", 900, n=4))
    name = engine.stub.SubmitGeneration(asked).generation.request_id
    wanted = pb.WatchGenerationRequest(request_id=name)
    calls = [engine.stub.WatchGeneration(wanted) for _ in range(MAX_WATCHES)]
    try:
        for call in calls:
            next(iter(call))
        one_more = list(engine.stub.WatchGeneration(wanted))
    except grpc.RpcError as failure:
        assert isinstance(rpc.error_from(failure), TooManyWatchers)
        return True
    finally:
        for call in calls:
            call.cancel()
        engine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=name))
    ends = [one.response.finish.reason for one in one_more if one.response.HasField("finish")]
    assert ends == [pb.FINISH_REASON_LENGTH] * 4, "one more watched it while it ran"
    return False


def too_large(engine: RunningEngine) -> None:
    """Larger than a message may be: gRPC's own refusal."""
    with pytest.raises(grpc.RpcError) as failure:
        engine.channel.unary_unary(SERVICE + "GetStats")(bytes(33 << 20))
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def dropped(engine: RunningEngine) -> None:
    """Calls that are cancelled at once, or after their first response."""
    for at in range(12):
        call = engine.stub.Generate(request(LINE, 300, n=1 + at % 4, priority=50))
        if at % 3:
            next(iter(call))
        call.cancel()


def test_each_is_told_what_it_did_and_nobody_else_notices(engine: RunningEngine) -> None:
    expected = [told(engine.stub.Generate(one)) for one in VICTIMS]
    assert [len(samples) for samples in expected] == [1, 1, 3, 2]
    kept = engine.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=request("x", 2, request_id=KEPT)))
    assert kept.generation.request_id == KEPT
    collect(one.response for one in engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=KEPT)))
    several = pb.SubmitGenerationRequest(request=request("x", 2, request_id=SAMPLES, n=3))
    assert engine.stub.SubmitGeneration(several).generation.request_id == SAMPLES
    list(engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=SAMPLES)))
    over = threading.Event()

    def suffer(at: int) -> int:
        times = 0
        while not times or not over.is_set():
            assert told(engine.stub.Generate(VICTIMS[at])) == expected[at]
            times += 1
        return times

    def attack(bads: list[Bad]) -> None:
        for one in bads:
            provoke(engine, one)

    lots = [[*not_numbers(), *spans(), *unknown()], list(unreadable()), list(endless())]
    attacks: list[Callable[[], Any]] = [
        *(lambda lot=lot: attack(lot) for lot in lots),
        *(lambda one=one: one(engine) for one in (batches, watchers, too_large, dropped)),
    ]
    with ThreadPoolExecutor(len(VICTIMS) + len(attacks)) as threads:
        victims = [threads.submit(suffer, at) for at in range(len(VICTIMS))]
        try:
            for attempt in [threads.submit(one) for one in attacks]:
                attempt.result()
        finally:
            over.set()
        assert all(victim.result() for victim in victims)
    engine.idle()
    engine.stub.PurgeGenerations(pb.PurgeGenerationsRequest(older_than=duration_pb2.Duration()))
    stats = engine.stub.GetStats(pb.GetStatsRequest())
    assert (stats.retained_generations, stats.generation_bytes, stats.queued_tokens) == (0, 0, 0)
