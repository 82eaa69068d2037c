"""Every rpc's comment lists its error reasons; each is provoked here, and no other occurs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.common.access.identity import Identity
from services.common.access.policy import Policy
from services.common.errors import KvCacheDown, ServiceError
from services.engine.api.roles import INCLUDES
from services.engine.delivery.generation import MAX_WATCHES
from services.engine.text.chat import Chat
from services.engine.text.chat_template import ChatTemplate
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request

PROTO = Path(__file__).parents[3] / "protos/rocmforge/engine/v1/engine.proto"
METHODS = list(pb.DESCRIPTOR.services_by_name["EngineService"].methods)
SMALL_POOL = 16

Engine = RunningEngine
LONG = "x" * 129
MINUTE = duration_pb2.Duration(seconds=60)

#: A request of each rpc that would be answered.
GOOD: dict[str, Any] = {
    "Generate": request(),
    "BatchGenerate": pb.BatchGenerateRequest(requests=[request()]),
    "SubmitGeneration": pb.SubmitGenerationRequest(request=request()),
    "WatchGeneration": pb.WatchGenerationRequest(request_id="done"),
    "GetGeneration": pb.GetGenerationRequest(request_id="done"),
    "CancelGeneration": pb.CancelGenerationRequest(request_id="done"),
    "DeleteGeneration": pb.DeleteGenerationRequest(request_id="done"),
    "PurgeGenerations": pb.PurgeGenerationsRequest(older_than=MINUTE),
    "Tokenize": pb.TokenizeRequest(text="x"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[1]),
    "GetModel": pb.GetModelRequest(),
    "GetStats": pb.GetStatsRequest(),
    "Drain": pb.DrainRequest(),
}
#: ... and one that its checks refuse.
BAD: dict[str, Any] = {
    "Generate": pb.GenerateRequest(),
    "BatchGenerate": pb.BatchGenerateRequest(),
    "SubmitGeneration": pb.SubmitGenerationRequest(request=request(), timeout=duration_pb2.Duration()),
    "WatchGeneration": pb.WatchGenerationRequest(request_id="done", from_token=10),
    "GetGeneration": pb.GetGenerationRequest(),
    "CancelGeneration": pb.CancelGenerationRequest(),
    "DeleteGeneration": pb.DeleteGenerationRequest(request_id=LONG),
    "PurgeGenerations": pb.PurgeGenerationsRequest(),
    "Tokenize": pb.TokenizeRequest(),
    "Detokenize": pb.DetokenizeRequest(token_ids=[10**6]),
}
UNKNOWN: dict[str, Any] = {
    "WatchGeneration": pb.WatchGenerationRequest(request_id="unknown"),
    "GetGeneration": pb.GetGenerationRequest(request_id="unknown"),
    "CancelGeneration": pb.CancelGenerationRequest(request_id="unknown"),
    "DeleteGeneration": pb.DeleteGenerationRequest(request_id="unknown"),
}
#: Those that hand one request to the engine.
STARTS = ("Generate", "SubmitGeneration")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    limits = ["--max-batch", "1", "--max-queue", "0", "--local-pages", str(SMALL_POOL)]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits).start()
    one.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=request(request_id="done")))
    yield one
    one.close()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Shared by this module's tests; it has a generation ``done``, and each test leaves it idle."""
    shared.idle()
    yield shared
    shared.settle()


def told(engine: Engine, method: str, message: Any | None = None) -> ServiceError:
    return refused(lambda: getattr(engine.stub, method)(GOOD[method] if message is None else message))


# --- conditions -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def starting(engine: Engine) -> Iterator[None]:
    servicer = engine.engine.servicer
    served, servicer._served = servicer._served, None
    try:
        yield
    finally:
        servicer._served = served


@contextlib.contextmanager
def draining(engine: Engine) -> Iterator[None]:
    engine.engine.servicer.draining = True
    try:
        yield
    finally:
        engine.engine.servicer.draining = False


@contextlib.contextmanager
def daemon_gone(engine: Engine) -> Iterator[None]:
    loop = engine.engine.loop
    assert loop is not None
    loop._refusal = KvCacheDown("gone")
    try:
        yield
    finally:
        loop._refusal = None


class Call:
    """A call's context without gRPC, which would end the call at its deadline."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s
        self.status: Any = None

    def time_remaining(self) -> float:
        return self.left_s

    async def abort_with_status(self, status: Any) -> None:
        self.status = status
        raise grpc.aio.AbortError


def out_of_time(engine: Engine) -> ServiceError:
    call = Call(0.0)

    async def body() -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            async for _ in engine.engine.servicer.Generate(request(max_tokens=250), call):
                pass

    engine.call(asyncio.wait_for(body(), 30))
    status = status_pb2.Status()
    status.ParseFromString(dict(call.status.trailing_metadata)[rpc_status.GRPC_DETAILS_METADATA_KEY])
    return rpc.error_from_status(status)


def while_(condition: Callable[[Engine], Any], method: str, message: Any | None = None) -> Any:
    def provoke(engine: Engine) -> ServiceError:
        with condition(engine):
            return told(engine, method, message)

    return provoke


def full(method: str) -> Any:
    def provoke(engine: Engine) -> ServiceError:
        engine.steps.hold()
        running = engine.stub.Generate(request(max_tokens=5))
        assert engine.steps.reached.wait(30)
        messages = [GOOD[method]] * 2
        if method == "SubmitGeneration":
            answers: list[Any] = [engine.stub.SubmitGeneration.future(message) for message in messages]
        else:
            answers = [engine.stub.Generate(message) for message in messages]
        engine.until_live(3)
        engine.steps.release()
        collect(running)
        for answer in answers:
            with contextlib.suppress(AssertionError):
                return refused(answer.result if method == "SubmitGeneration" else lambda answer=answer: answer)  # type: ignore[misc]
        raise AssertionError("neither was refused")

    return provoke


def forward_fails(engine: Engine) -> ServiceError:
    def fault(step: Any) -> None:
        step[0].sequence.tokens[0] = 10**9

    engine.steps.fault = fault
    return told(engine, "Generate", request([1, 2, 3]))


def crowded(engine: Engine) -> ServiceError:
    generation = engine.engine.generations.find("done")
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_WATCHES):
            stack.enter_context(generation.watch(0))
        return told(engine, "WatchGeneration")


def asked(method: str, prompt: Any = "x", **fields: Any) -> Any:
    one = request(prompt, **fields)
    return one if method == "Generate" else pb.SubmitGenerationRequest(request=one)


def live_deleted(engine: Engine) -> ServiceError:
    engine.steps.hold()
    engine.stub.SubmitGeneration(asked("SubmitGeneration", request_id="running", max_tokens=50))
    try:
        return told(engine, "DeleteGeneration", pb.DeleteGenerationRequest(request_id="running"))
    finally:
        engine.steps.release()


def too_much_said(engine: Engine) -> ServiceError:
    """As a model with a chat template answers."""
    servicer = engine.engine.servicer
    served = servicer._served
    assert served is not None
    servicer._served = replace(served, chat=Chat({"default": ChatTemplate("x", {})}, served.tokenizer))
    try:
        said = pb.Messages(items=[pb.Message(role="user", content="x" * (1 << 20))])
        return told(engine, "Tokenize", pb.TokenizeRequest(messages=said))
    finally:
        servicer._served = served


@contextlib.contextmanager
def another_owner(engine: Engine) -> Iterator[None]:
    servicer = engine.engine.servicer
    policy, servicer.policy = servicer.policy, Policy(Identity.of_uid(os.geteuid() + 1), (), INCLUDES)
    try:
        yield
    finally:
        servicer.policy = policy


#: (rpc, what provokes it, status code, reason)
REASONS: list[tuple[str, Callable[[Engine], ServiceError], str, str]] = [
    *((method.name, while_(starting, method.name), "UNAVAILABLE", "NOT_READY") for method in METHODS),
    *((name, lambda e, name=name: told(e, name, BAD[name]), "INVALID_ARGUMENT", "FIELD_INVALID") for name in BAD),
    *((n, while_(draining, n), "UNAVAILABLE", "DRAINING") for n in ("Generate", "BatchGenerate", "SubmitGeneration")),
    *((n, while_(daemon_gone, n), "UNAVAILABLE", "KVCACHE_DOWN") for n in STARTS),
    *((name, full(name), "RESOURCE_EXHAUSTED", "QUEUE_FULL") for name in STARTS),
    *((name, lambda e, name=name: told(e, name, UNKNOWN[name]), "NOT_FOUND", "REQUEST_UNKNOWN") for name in UNKNOWN),
    *((n, lambda e, n=n: told(e, n, asked(n, [1] * 4096)), "INVALID_ARGUMENT", "PROMPT_TOO_LONG") for n in STARTS),
    *((n, lambda e, n=n: told(e, n, asked(n, [1] * 400)), "FAILED_PRECONDITION", "EXCEEDS_POOL") for n in STARTS),
    *((n, lambda e, n=n: told(e, n, asked(n, request_id="done")), "ALREADY_EXISTS", "REQUEST_EXISTS") for n in STARTS),
    ("Generate", forward_fails, "INTERNAL", "FORWARD_FAILED"),
    ("Generate", out_of_time, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    ("WatchGeneration", crowded, "RESOURCE_EXHAUSTED", "TOO_MANY_WATCHERS"),
    ("Tokenize", too_much_said, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
    ("Drain", while_(another_owner, "Drain"), "PERMISSION_DENIED", "ROLE_MISSING"),
    ("DeleteGeneration", live_deleted, "FAILED_PRECONDITION", "REQUEST_LIVE"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("provoke", "code", "reason"), [row[1:] for row in REASONS], ids=[f"{row[0]}-{row[3]}" for row in REASONS]
)
def test_reasons(engine: Engine, provoke: Callable[[Engine], ServiceError], code: str, reason: str) -> None:
    error = provoke(engine)
    assert (error.code, error.reason) == (code, reason), error.message
    assert error.message
    assert (error.retry_after_s is not None) == (code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"))


def test_every_documented_reason_is_reached_and_every_reached_one_documented() -> None:
    documented: dict[str, set[str]] = {}
    for comment, name in re.findall(r"((?:  //[^\n]*\n)+)  rpc (\w+)\(", PROTO.read_text()):
        reasons = comment.partition("Reasons:")[2]
        assert reasons, f"{name} documents no reasons"
        documented[name] = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", reasons))
    reached: dict[str, set[str]] = {method.name: set() for method in METHODS}
    for name, _, _, reason in REASONS:
        reached[name].add(reason)
    assert reached == documented


def test_what_may_be_tried_again_says_so_in_the_proto() -> None:
    text = PROTO.read_text()
    for name, _, code, reason in REASONS:
        comment = re.search(rf"((?:  //[^\n]*\n)+)  rpc {name}\(", text)
        assert comment is not None
        passing = code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
        assert (f"{reason} (RetryInfo)" in comment[1]) == passing, (name, reason)


def starts_with_text(method: Any) -> bool:
    return any(field.number == 1 and field.type == field.TYPE_STRING for field in method.input_type.fields)


UNREADABLE = [
    *((method, b"\x0a\xff", "Wire format") for method in METHODS),
    *((method, b"\x0a\x02\xff\xfe", "bad UTF-8") for method in METHODS if starts_with_text(method)),
]


@pytest.mark.parametrize(
    ("method", "body", "says"), UNREADABLE, ids=[f"{method.name}-{says[:3]}" for method, _, says in UNREADABLE]
)
def test_a_message_that_cannot_be_read(engine: Engine, method: Any, body: bytes, says: str) -> None:
    kind = engine.channel.unary_stream if method.server_streaming else engine.channel.unary_unary
    call = kind(f"/{method.containing_service.full_name}/{method.name}")
    error = refused(lambda: list(call(body)) if method.server_streaming else call(body))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_INVALID") and says in error.message
    assert method.input_type.name in error.message
