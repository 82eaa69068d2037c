"""A world's cache behind a real server, and clients of it that talk at the same time.

The server is grpc.aio on a unix socket, in a thread of its own, with the world's clock, process table and arena; only
the sweeper is missing, since it keeps real time: `Sweep` is an operation like the others. Each client has a connection
of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf import duration_pb2
from google.rpc import status_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.call_stats import CallStats
from services.common.edge.listener import Listener
from services.common.serving import Serving
from services.kvcache.api.requests import read_retention
from services.kvcache.api.responses import retention_message
from services.kvcache.api.servicer import SERVICE, KvCacheServicer
from services.kvcache.cache.opening import Opening
from services.kvcache.cache.steps import Steps
from services.kvcache.scrub.scrubber import Scrubber
from tests.kvcache.cache.demands import grouped, in_columns
from tests.kvcache.cache.stateful.machine import UNANSWERED, Unanswered
from tests.kvcache.cache.stateful.transactions import (
    Allocate,
    Answer,
    Append,
    Close,
    Damage,
    Entry,
    Evict,
    Evicted,
    Expire,
    Get,
    Grant,
    Granted,
    Kill,
    Open,
    Operation,
    PassTime,
    Recorded,
    Refused,
    Release,
    Remove,
    Removed,
    Renew,
    Sweep,
    Table,
    handle_of,
    namespace_of,
    perform,
    start,
)
from tests.kvcache.conftest import LAYOUT_PB
from tests.kvcache.fakes import World

Result = TypeVar("Result")

TIMEOUT_S = 30.0


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, body: Callable[[], Result]) -> Result:
        """Run a function on the loop, between two of its transactions, and wait for it."""
        return self.begin(body).result(TIMEOUT_S)

    def begin(self, body: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Have it run when its turn comes."""

        async def task() -> Result:
            return body()

        return asyncio.run_coroutine_threadsafe(task(), self.loop)

    def wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()


class Door:
    """Keeps a call that has reached the server from its transaction until it is let in."""

    def __init__(self, loop: Loop) -> None:
        self.knocked = threading.Event()
        self._loop = loop
        self._open = loop.run(asyncio.Event)

    async def passed(self) -> None:
        self.knocked.set()
        await self._open.wait()

    def open(self) -> None:
        self._loop.run(self._open.set)


class Recording(KvCacheServicer):
    """Notes which calls it served, in the order in which their transactions ran, and how it answered them.

    A call is told by the bytes of its request: one that nobody asked for is a KeyError.
    """

    def __init__(self, world: World, entries: list[Entry]) -> None:
        super().__init__(world.cache, Scrubber(world.cache, asyncio.Event()))
        self.world = world
        self.entries = entries
        self.asked: dict[tuple[str, bytes], Operation] = {}
        self.doors: dict[str, Door] = {}

    def expect(self, operation: Operation, name: str, request: Any) -> None:
        self.asked[name, request.SerializeToString(deterministic=True)] = operation

    def note(self, name: str, request: Any, answer: Answer, now: float) -> None:
        self.entries.append(Entry(self.asked[name, request.SerializeToString(deterministic=True)], answer, now))


class Telling:
    """A call's context that hears what error it ends with."""

    def __init__(self, context: Any, hear: Callable[[Refused], None]) -> None:
        self._context = context
        self._hear = hear

    async def abort_with_status(self, status: Any) -> None:
        [details] = [value for key, value in status.trailing_metadata if key == "grpc-status-details-bin"]
        self._hear(Refused.of(rpc.error_from_status(status_pb2.Status.FromString(details))))
        await self._context.abort_with_status(status)


def _recorded(name: str) -> Any:
    served = getattr(KvCacheServicer, name)

    async def call(self: Recording, request: Any, context: Any) -> Any:
        if door := self.doors.pop(name, None):
            await door.passed()
        # There is no await in the transaction: until it is over nothing else is noted.
        now = self.world.now
        response = await served(self, request, Telling(context, lambda error: self.note(name, request, error, now)))
        self.note(name, request, answer_of(response), now)
        return response

    return call


for _name in (
    *("OpenSession", "RenewSession", "CloseSession", "AllocatePages", "AppendTokens"),
    *("RemoveSequences", "GetSequence", "EvictPages", "ExpireSequences", "ReleaseQuarantine"),
):
    setattr(Recording, _name, _recorded(_name))


class Wire:
    """The driver: a server for one world, and its clients."""

    _numbers = itertools.count()

    def __init__(self, world: World, loop: Loop, directory: Path, clients: int = 4) -> None:
        self.world = world
        self.entries: list[Entry] = []
        self.loop = loop
        self.servicer = Recording(world, self.entries)
        path = directory / f"{next(self._numbers)}.sock"
        loop.wait(self._serve(path))
        # Without a pool of their own the channels of one process share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.insecure_channel(f"unix:{path}", options=options) for _ in range(clients)]
        self.stubs = [kvcache_pb2_grpc.KvCacheServiceStub(channel) for channel in self._channels]

    async def _serve(self, path: Path) -> None:
        self._serving = Serving(SERVICE, [Listener(path=path)])
        register = functools.partial(kvcache_pb2_grpc.add_KvCacheServiceServicer_to_server, self.servicer)
        self._serving.add(register, CallStats())
        await self._serving.start()

    def run(self, operations: Sequence[Operation], *, give_up: bool = False) -> list[Answer | Unanswered]:
        """All are in flight together, each on the next client's connection."""
        calls = [self.begin(operation, client) for client, operation in enumerate(operations)]
        if give_up:
            for call in calls:
                call.cancel()
        return [self._reply(operation, call) for operation, call in zip(operations, calls, strict=True)]

    def ask(self, operation: Operation, client: int = 0) -> Answer | Unanswered:
        """One call, and its answer."""
        return self._reply(operation, self.begin(operation, client))

    def overtaken(self, operation: Operation, *by: Operation) -> tuple[Answer | Unanswered, ...]:
        """A call that reached the server first runs last; the answers, in the order in which the calls ran."""
        name, _ = request_of(operation)
        door = self.servicer.doors[name] = Door(self.loop)
        late = self.begin(operation, 0)
        assert door.knocked.wait(TIMEOUT_S), f"{operation} never arrived"
        answers = [self.ask(other, 1) for other in by]
        door.open()
        return (*answers, self._reply(operation, late))

    def begin(self, operation: Operation, client: int = 0) -> Any:
        """A future of the call's response, or of nothing."""
        stub = self.stubs[client % len(self.stubs)]
        match operation:
            case Open():
                done: concurrent.futures.Future[str] = concurrent.futures.Future()
                done.set_result(self.open_session(operation, stub))
                return done
            case PassTime() | Kill() | Sweep() | Damage():
                return self.loop.begin(lambda: self._perform(operation))
            case _:
                name, request = request_of(operation)
                self.servicer.expect(operation, name, request)
                return getattr(stub, name).future(request, timeout=TIMEOUT_S)

    def _perform(self, operation: Operation) -> Answer:
        entry = perform(self.world, operation)
        self.entries.append(entry)
        return entry.answer

    def open_session(self, operation: Open, stub: Any) -> str:
        """Open and attach as an engine does; the session id."""
        request = pb.OpenSessionRequest(pool_id="pool", layout=LAYOUT_PB, max_pages=operation.max_pages)
        request.layout.page_size = self.world.layout.page_size
        if operation.pid is not None:
            start(self.world, operation.pid)
            namespace = namespace_of(operation.pid)
            request.process.CopyFrom(pb.ProcessIdentity(pid=operation.pid, start_time=1, pid_namespace=namespace))
        self.servicer.expect(operation, "OpenSession", request)
        opened = stub.OpenSession(request, timeout=TIMEOUT_S)
        arena, slot = self.world.arenas[-1], opened.arena.canary_offset
        canary = arena.canaries[slot]
        arena.answers[slot] = bytes(byte ^ 0xFF for byte in canary)
        stub.AttachSession(pb.AttachSessionRequest(session_id=opened.session_id, seen=canary), timeout=TIMEOUT_S)
        return str(opened.session_id)

    @staticmethod
    def _reply(operation: Operation, call: Any) -> Answer | Unanswered:
        try:
            response = call.result()
        except grpc.FutureCancelledError:
            return UNANSWERED
        except grpc.RpcError as failure:
            return Refused.of(rpc.error_from(failure))
        return response if isinstance(operation, Open | PassTime | Kill | Sweep | Damage) else answer_of(response)

    def violations(self) -> list[str]:
        return list(self.stubs[0].Fsck(pb.FsckRequest(), timeout=TIMEOUT_S).violations)

    def stats(self) -> dict[str, int]:
        answer = self.stubs[0].GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
        [pool] = answer.pools
        numbers = {field.name: getattr(pool, field.name) for field in pool.DESCRIPTOR.fields}
        for name in ("pool_id", "layout", "page_bytes", "device_ordinal", "zeroed_pages"):
            numbers.pop(name, None)
        assert not numbers.pop("filled_pages") + numbers.pop("filling_pages"), "there are no lower tiers"
        return {
            **numbers,
            "expired_sessions": answer.expired_sessions,
            "expired_sequences": answer.expired_sequences,
        }

    def cached(self) -> list[int]:
        """Not visible to clients: read from the state object."""
        return self.loop.run(lambda: [page for pool in self.world.cache.pools for page in pool.table.cached])

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.loop.wait(self._serving.drain(0))


def request_of(operation: Operation) -> tuple[str, Any]:
    """The rpc's name and its request."""
    match operation:
        case Allocate(session, demands, removed):
            request = pb.AllocatePagesRequest(session_id=session, remove_sequence_ids=removed)
            for demand in grouped(demands):
                if isinstance(demand, Steps):
                    request.demands.add(steps=steps_message(demand))
                else:
                    request.demands.add(opening=opening_message(demand))
            return "AllocatePages", request
        case Append(session, steps):
            columns = steps_message(in_columns(steps, growing=False))
            return "AppendTokens", pb.AppendTokensRequest(session_id=session, steps=columns)
        case Remove(session, names):
            return "RemoveSequences", pb.RemoveSequencesRequest(session_id=session, sequence_ids=names)
        case Get(session, name):
            return "GetSequence", pb.GetSequenceRequest(session_id=session, sequence_id=name, include_tokens=True)
        case Renew(session):
            return "RenewSession", pb.RenewSessionRequest(session_id=session)
        case Close(session):
            return "CloseSession", pb.CloseSessionRequest(session_id=session)
        case Release(session):
            return "ReleaseQuarantine", pb.ReleaseQuarantineRequest(session_handle=handle_of(session))
        case Evict(most, retained):
            return "EvictPages", pb.EvictPagesRequest(pool_id="pool", max_pages=most, include_retained=retained)
        case Expire(age):
            older = duration_pb2.Duration()
            older.FromNanoseconds(int(age * 1e9))
            return "ExpireSequences", pb.ExpireSequencesRequest(older_than=older)
        case _:
            raise TypeError(f"{operation} is no call")


def steps_message(steps: Steps) -> pb.SequenceSteps:
    return pb.SequenceSteps(**steps._asdict())


def opening_message(opening: Opening) -> pb.SequenceOpening:
    message = pb.SequenceOpening(sequence_id=opening.sequence_id, total_pages=opening.total_pages)
    if isinstance(opening.origin, str):
        message.parent_sequence_id = opening.origin
        return message
    tokens, salt, retention, hint = opening.origin
    message.prompt.CopyFrom(pb.Prompt(tokens=tokens, salt=salt, retention=retention_message(retention)))
    if hint is not None:
        said = pb.ReuseHint(category=hint.category, turn=hint.turn, tool_call_pending=hint.tool_call_pending)
        if hint.expected_s is not None:
            said.expected_return.FromNanoseconds(round(hint.expected_s * 1e9))
        message.prompt.reuse_hint.CopyFrom(said)
    return message


def answer_of(response: Any) -> Answer:
    """What a response says."""
    match response:
        case pb.OpenSessionResponse():
            return str(response.session_id)
        case pb.AllocatePagesResponse():
            told = tuple((item.sequence_id, _grant(item)) for item in response.grants)
            return Granted(told, response.available_pages)
        case pb.AppendTokensResponse():
            return Recorded(tuple((item.sequence_id, _error(item)) for item in response.errors))
        case pb.RemoveSequencesResponse():
            return Removed(response.removed_sequences, tuple(response.absent_sequence_ids), response.available_pages)
        case pb.GetSequenceResponse():
            one = response.sequence
            pages = tuple(zip(one.page_ids, one.generations, strict=True))
            retention = read_retention(one.retention) if one.HasField("retention") else None
            counts = (one.published_pages, one.cached_tokens, one.access_count)
            return Table(pages, tuple(one.tokens), *counts, retention)
        case pb.RenewSessionResponse():
            return float(response.ttl.ToNanoseconds() / 1e9)
        case pb.CloseSessionResponse():
            return response.removed_sequences if response.closed else None
        case pb.ReleaseQuarantineResponse():
            return int(response.released_pages)
        case pb.EvictPagesResponse():
            return Evicted(response.evicted_pages, response.retained_pages)
        case pb.ExpireSequencesResponse():
            return int(response.expired_sequences)
        case _:
            raise TypeError(f"{response} is no answer")


def _grant(item: pb.SequenceGrant) -> Grant | Refused:
    copies = tuple((copy.index, _reference(copy.source), _reference(copy.target)) for copy in item.copies)
    if item.HasField("error"):
        return _error(item)
    pages = tuple(zip(item.page_ids, item.generations, strict=True))
    return Grant(item.first_index, pages, item.cached_tokens, copies)


def _error(item: Any) -> Refused:
    return Refused.of(rpc.error_from_status(item.error))


def _reference(page: pb.PageRef) -> tuple[int, int]:
    return page.page_id, page.generation
