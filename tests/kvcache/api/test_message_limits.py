"""Messages that cost more than they say: refused by their bytes, and gone with their reply."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import weakref
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import Message
from structlog.testing import capture_logs

from rocmforge.client.demands import STEP_TOKENS
from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.access.in_flight import InFlight
from services.common.call_stats import CallStats
from services.common.edge.message_limit import SMALL, STEP_BYTES, MessageLimit, count_fields
from services.common.errors import FieldInvalid
from services.kvcache.api.limits import LIMITS
from services.kvcache.api.requests import MAX_ITEMS
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.retention import Retention
from tests.kvcache.clients.messages import opening, step
from tests.kvcache.conftest import Running
from tests.kvcache.fakes import World
from tests.processes import Service, kvcache

SERVICE = "/rocmforge.kvcache.v1.KvCacheService"
MIB = 1 << 20
UNLIMITED = [("grpc.max_send_message_length", -1)]


def raw(channel: grpc.Channel, method: str, message: bytes) -> grpc.RpcError:
    """Send bytes as they are; how they are refused."""
    send = channel.unary_unary(f"{SERVICE}/{method}", request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as failure:
        send(message)
    return failure.value


def delimited(tag: int, content: bytes) -> bytes:
    size, out = len(content), bytearray([tag])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + content


EMPTY_DEMAND, EMPTY_NAME = b"\x1a\x00", b"\x0a\x00"
#: A demand that is a step or an opening by turns has its own object for each turn.
TURNS = b"\x0a\x00\x12\x00"
#: So has an opening that is of a prompt or a fork by turns.
ORIGINS = b"\x12\x00\x1a\x00"


def swollen(size: int) -> dict[str, tuple[str, bytes]]:
    """Messages of about so many bytes that are far larger once they are parsed."""
    return {
        "demands": ("AllocatePages", EMPTY_DEMAND * (size // 2)),
        "names": ("AllocatePages", delimited(0x1A, delimited(0x0A, EMPTY_NAME * (size // 2)))),
        "turns": ("AllocatePages", delimited(0x1A, TURNS * (size // 4))),
        "origins": ("AllocatePages", delimited(0x1A, delimited(0x12, ORIGINS * (size // 4)))),
        "unknown": ("AllocatePages", b"\x7a\x00" * (size // 2)),
        "reported": ("AppendTokens", delimited(0x12, EMPTY_NAME * (size // 2))),
        "removed": ("RemoveSequences", b"\x12\x00" * (size // 2)),
    }


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", swollen(4))
def test_a_message_of_too_many_fields_is_refused_before_it_is_parsed(running: Running, name: str) -> None:
    method, message = swollen(STEP_BYTES - 64)[name]
    error = rpc.error_from(raw(running.channel, method, message))
    assert isinstance(error, FieldInvalid)
    assert error.message == (
        f"the message has more than {LIMITS.of(method).fields} fields, which is the limit of {method}"
    )


@pytest.mark.parametrize("method", ["AllocatePages", "OpenSession", "Fsck", "ExplainPrefix"])
def test_a_message_of_too_many_bytes_is_told_its_methods_limit(running: Running, method: str) -> None:
    limit = LIMITS.of(method).size
    error = rpc.error_from(raw(running.channel, method, bytes(limit + 1)))
    assert isinstance(error, FieldInvalid)
    assert error.message == f"the message has {limit + 1} bytes; {method} takes at most {limit}"


def test_grpc_itself_refuses_what_no_method_takes(running: Running) -> None:
    with grpc.insecure_channel(f"unix:{running.config.listeners[0].path}", options=UNLIMITED) as channel:
        assert raw(channel, "AllocatePages", bytes(2 * STEP_BYTES + 64)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_largest_messages_that_mean_well_are_read(running: Running) -> None:
    session = running.session(pool_pages=8)
    kept = pb.Retention(priority=1)
    kept.ttl.FromNanoseconds(1_500_000_001)
    demands = [opening(f"{at:0>128}", [at, 1], 1, salt="s" * 32, retention=kept) for at in range(MAX_ITEMS)]
    request = pb.AllocatePagesRequest(session_id=session, demands=demands)
    assert request.ByteSize() > SMALL
    assert len(running.stub.AllocatePages(request).grants) == MAX_ITEMS
    names = ["\U0001f600" * 96 + f"{at:032}" for at in range(MAX_ITEMS)]
    removal = pb.RemoveSequencesRequest(session_id=session, sequence_ids=names)
    assert len(running.stub.RemoveSequences(removal).absent_sequence_ids) == MAX_ITEMS
    prompt = [1 << 20] * STEP_TOKENS
    long = pb.AllocatePagesRequest(session_id=session, demands=[opening("long", prompt[:-1]), opening("b", [1])])
    [_, grant] = running.stub.AllocatePages(long).grants
    assert not grant.HasField("error")


def test_tokens_of_a_call_are_limited_together(running: Running) -> None:
    session = running.session()
    for demand, field in ((opening("b", [1]), "demands[1].opening.prompt.tokens"), (step("b", 0, [1]), "steps.tokens")):
        demands = [opening("a", [1] * STEP_TOKENS), demand]
        with pytest.raises(grpc.RpcError) as failure:
            running.stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=demands))
        error = rpc.error_from(failure.value)
        assert error.field.endswith(field) and error.metadata["limit"] == str(STEP_TOKENS)


# --- how it is counted ---------------------------------------------------------------------------------------------


def test_fields_are_counted_as_the_parser_finds_them() -> None:
    message = pb.AllocatePagesRequest(
        session_id="s",
        remove_sequence_ids=["a", "", "b"],
        demands=[opening("n", [1, 300, 70000], 3, salt="x"), step("m", 1, [5, 6], 2, 1)],
    )
    # Of the opening: demand, opening, id, prompt, tokens, salt, total_pages; of the step: demand, steps, six columns.
    assert count_fields(message.SerializeToString(), type(message), 1 << 16) == 1 + 3 + 7 + 8
    nested = struct_pb2.Struct()
    nested.update({"a": {"b": [1, "c", None]}})
    # entry, key, value, struct, entry, key, value, list, and for each of three values itself and what it is
    assert count_fields(nested.SerializeToString(), type(nested), 1 << 16) == 8 + 6
    biased = engine_pb2.Sampling(logit_bias={1: 2.0, 70000: 0.5}, temperature=1.0, seed=1 << 60)
    assert count_fields(biased.SerializeToString(), type(biased), 1 << 16) == 2 + 2 * 3


def test_it_counts_no_further_than_it_has_to() -> None:
    # What follows is no message at all, and is not looked at.
    message = EMPTY_DEMAND * 11 + b"\xff" * 100
    assert count_fields(message, pb.AllocatePagesRequest, 10) == 11


def nested(depth: int) -> bytes:
    """A value of lists in lists."""
    content = b""
    for _ in range(depth):
        content = delimited(0x32, delimited(0x0A, content))
    return content


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (pb.AllocatePagesRequest, b"\x1a\x05\x0a"),  # longer than the message
        (pb.AllocatePagesRequest, b"\x1a\x02\x0a\x05" + bytes(9)),  # longer than the message that it is in
        (pb.AllocatePagesRequest, b"\x7b" + EMPTY_DEMAND + b"\x7c"),  # a group
        (pb.AllocatePagesRequest, b"\x7f"),  # a wire type that there is not
        (pb.AllocatePagesRequest, b"\x08" + b"\xff" * 30),  # a number without end
        (pb.AllocatePagesRequest, b"\x79" + bytes(7)),
        (pb.AllocatePagesRequest, b"\x7d" + bytes(3)),
        (pb.AllocatePagesRequest, b"\x78"),
        (struct_pb2.Value, nested(60)),
    ],
)
def test_what_is_no_message_is_not_passed_on(kind: type[Message], message: bytes) -> None:
    with pytest.raises(ValueError, match=r"behind its message|wire type|within a field|10 bytes|nested"):
        count_fields(message, kind, 1 << 16)
    limit = MessageLimit(1 << 20, 1 << 16)
    why = limit.why_refused("M", b"\x0a\x00" * SMALL + message, kind) if kind is not struct_pb2.Value else ""
    assert why is not None


# --- what is left of it --------------------------------------------------------------------------------------------


class Body:
    """Stands in for a request's message."""


class Context:
    """As gRPC's: it keeps the exception that aborts it, and with that its traceback."""

    def __init__(self) -> None:
        self.aborted: BaseException | None = None

    async def abort_with_status(self, status: Any) -> None:
        error = self.aborted = RuntimeError(status.details)
        del self  # gRPC is no Python, and leaves no frame that knows the call
        try:
            raise error
        finally:
            del error

    def code(self) -> int:
        return 3


class Servicer:
    """Refuses, in every way there is."""

    @rpc.maps_errors("d")
    async def refuses(self, request: Body, context: Context) -> None:
        self._look(request)

    @rpc.maps_errors("d")
    async def breaks(self, request: Body, context: Context) -> None:
        raise KeyError(request)

    @rpc.maps_errors("d")
    async def streams(self, request: Body, context: Context) -> AsyncIterator[None]:
        yield
        self._look(request)

    def _look(self, request: Body) -> None:
        try:
            raise KeyError(request)
        except KeyError:
            raise FieldInvalid("no") from None


async def unary(method: Callable[..., Any], request: Body, context: Context) -> None:
    answering = method(request, context)
    del request, context
    with contextlib.suppress(RuntimeError):
        await answering


async def stream(method: Callable[..., Any], request: Body, context: Context) -> None:
    responses = method(request, context)
    del request, context
    with contextlib.suppress(RuntimeError):
        async for _ in responses:
            pass


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """What is freed here is freed because nothing refers to it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["refuses", "breaks", "streams"])
def test_nothing_of_a_refused_request_outlives_its_call(name: str) -> None:
    handler = grpc.unary_unary_rpc_method_handler(getattr(Servicer(), name))
    if name == "streams":
        handler = grpc.unary_stream_rpc_method_handler(getattr(Servicer(), name))
    counted = rpc._counted("a.Service", name, handler, CallStats(), rpc.unproven, InFlight(), None)
    request, context = Body(), Context()
    gone, its_call = weakref.ref(request), weakref.ref(context)

    with no_collection():
        answering = (
            stream(counted.unary_stream, request, context)
            if name == "streams"
            else unary(counted.unary_unary, request, context)
        )
        del request
        with capture_logs():  # a renderer may keep frames of the traceback that it draws
            asyncio.run(answering)
        aborted = context.aborted
        assert aborted is not None, "the call kept what it was aborted with"
        del context, answering
        assert its_call() is None, "the call is in a cycle with the exception that aborted it"
        del aborted
        assert gone() is None, "the request is kept by what it was refused with"


def test_an_item_that_failed_keeps_nothing_of_its_call() -> None:
    world = World(8)
    session = world.attached()
    tokens, reported = array("I", range(100)), array("I", [1])
    gone = [weakref.ref(tokens), weakref.ref(reported)]
    with no_collection():
        demands: list[Steps | Opening] = [
            Opening("a", Prompt(tokens, "", Retention(-1.0, 1)), 1),
            Steps(["nobody"], [0], [1], reported, [1], [0]),
        ]
        told, _ = world.cache.calls.allocate(session.id, demands, [])
        assert [type(error).__name__ for _, error in told] == ["FieldInvalid", "SequenceUnknown"]
        del demands, tokens, reported
        assert [ref() for ref in gone] == [None, None], "the errors keep what they are about"


def resident(service: Service, what: str = "VmRSS") -> int:
    """Bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{service.pid}/status").read_text())
    assert found
    return int(found.group(1)) * 1024


def test_refused_messages_leave_a_daemon_as_small_as_it_was(tmp_path: Path) -> None:
    with kvcache(tmp_path) as daemon, grpc.insecure_channel(daemon.address, options=UNLIMITED) as channel:
        before = resident(daemon)
        for size in (30 * MIB, STEP_BYTES - 64, SMALL - 64):
            for method, message in swollen(size).values():
                for _ in range(3):
                    raw(channel, method, message)
        # A message in full is 4 MiB, and gRPC holds what it has read of several. Parsed, one of these is 400 MiB.
        assert resident(daemon, "VmHWM") - before < 100 * MIB
        assert daemon.process.poll() is None
