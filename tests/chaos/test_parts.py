"""The parts of the chaos program by themselves: each does what it is for, and each oracle can fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from tests.chaos.load.calls import Calls
from tests.chaos.load.clients import Told
from tests.chaos.load.wire import Wire
from tests.chaos.load.workload import requests
from tests.chaos.observer import GROWTH_BYTES, Series, leak, unbalanced
from tests.chaos.report import plot
from tests.chaos.schedule import KINDS, faults
from tests.chaos.verdict import HISTORY, Verdict, difference

# --- the schedule -----------------------------------------------------------------------------------------------------


def test_a_seed_is_a_schedule() -> None:
    assert faults(7, 600) == faults(7, 600) != faults(8, 600)
    assert faults(7, 60) == [fault for fault in faults(7, 600) if fault.at_s < 60]
    assert {fault.kind for fault in faults(7, 3600)} == set(KINDS)
    assert requests(7, 5) == requests(7, 5) != requests(8, 5)


def test_a_soak_lets_processes_live() -> None:
    soak = faults(7, 3600, processes_until_s=900)
    assert max(fault.at_s for fault in soak if KINDS[fault.kind].ends_process) < 900
    assert max(fault.at_s for fault in soak) > 3500


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no such fault: meteor"):
        faults(1, 10, ["cut", "meteor"])


# --- the oracles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "whole", "words"),
    [
        ([1, 2, 3], True, ""),
        ([1, 2], False, ""),
        ([], False, ""),
        ([1, 2], True, "ended after 2 of 3"),
        ([1, 4, 3], True, "token 1 is 4, not 2"),
        ([1, 4], False, "token 1 is 4, not 2"),
        ([2, 3], False, "token 0 is 2, not 1"),
        ([1, 2, 3, 4], False, "4 tokens, not 3"),
    ],
)
def test_each_difference_is_told(told: list[int], whole: bool, words: str) -> None:
    assert difference([1, 2, 3], told, whole=whole).startswith(words) and bool(words) == bool(
        difference([1, 2, 3], told, whole=whole)
    )


def response(tokens: list[int], text: str, *, over: bool) -> engine_pb2.GenerateResponse:
    finish = engine_pb2.Finish(reason=engine_pb2.FINISH_REASON_LENGTH) if over else None
    return engine_pb2.GenerateResponse(token_ids=tokens, text=text, finish=finish)


@pytest.mark.parametrize(
    ("last", "finding"),
    [
        (response([3], "c", over=True), ""),
        (response([4], "c", over=True), "token 2 is 4, not 3"),
        (response([], "", over=True), "ended after 2 of 3 tokens"),
        (response([3], "x", over=True), "the text is 'abx', not 'abc'"),
    ],
)
def test_a_stream_is_held_to_the_undisturbed_one(last: engine_pb2.GenerateResponse, finding: str) -> None:
    verdict = Verdict(seed=5)
    told = Told(verdict, {(0, 0): ([1, 2, 3], "abc")}, 0, "here")
    told.take(response([1, 2], "ab", over=False))
    assert not verdict.findings and not told.is_over
    told.take(last)
    assert told.is_over and told.is_wrong == bool(finding)
    assert [one.detail.partition("here: ")[2].split(" (")[0] for one in verdict.findings] == [finding] * bool(finding)


def test_a_finding_names_the_seed_the_time_and_the_faults_before_it() -> None:
    verdict = Verdict(seed=99)
    [*many, last] = faults(99, 60)
    for fault in many:
        verdict.did(fault, "done")
    verdict.find("fsck", "page 3 has two owners")
    verdict.did(last, "done")
    told = verdict.told()
    assert told.startswith("seed 99, 0.") and "fsck: page 3 has two owners" in told
    assert told.count("\n    ") == HISTORY and f"#{many[-1].number} {many[-1].kind}" in told
    assert f"#{last.number} " not in told


def test_memory_that_grows_is_found_and_memory_that_settles_is_not() -> None:
    def series(bytes_at: Callable[[int], float]) -> Series:
        return Series([(float(at), int(bytes_at(at)), 20) for at in range(600)])

    draw = random.Random(1)
    assert leak("daemon.1", series(lambda at: 50e6 + at * 2e5)).startswith("daemon.1 grew by ")
    assert leak("daemon.1", series(lambda at: 50e6 + draw.uniform(0, GROWTH_BYTES))) == ""
    assert leak("daemon.1", series(lambda at: 50e6 + min(at, 60) * 1e6)) == ""  # warming up
    assert leak("daemon.1", Series()) == ""


def test_pages_that_do_not_add_up_are_found() -> None:
    good = kvcache_pb2.PoolStats(total_pages=9, free_pages=3, held_pages=6, recycled_pages=3)
    assert unbalanced(good) == ""
    good.cached_pages = 1
    assert unbalanced(good)
    good.cached_pages, good.never_used_pages = 0, 1
    assert unbalanced(good)


def test_a_plot_has_a_line_for_each_series() -> None:
    drawn = plot("T", "MiB", [("a", "#111111", [(0, 1), (9, 2)]), ("b", "#222222", [(3, 4)]), ("c", "#333333", [])])
    assert drawn.count("<polyline") == 3 and ">a</text>" in drawn and drawn.endswith("</svg>\n")


# --- the wire ---------------------------------------------------------------------------------------------------------


def in_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(bounded())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


def test_a_wire_holds_swallows_and_cuts(short_path: Path) -> None:
    async def body() -> None:
        server = await asyncio.start_unix_server(echo, str(short_path / "e"))
        wire = Wire(short_path / "w", short_path / "e")
        await wire.start()

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_unix_connection(str(short_path / "w"))

        reader, writer = await connect()
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        wire.hold()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.2)
        wire.heal()
        assert await reader.readexactly(3) == b"two"
        wire.swallow()
        writer.write(b"gone")
        other_reader, other = await connect()
        other.write(b"new")
        assert await other_reader.readexactly(3) == b"new"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.2)
        wire.cut()
        assert await other_reader.read() == b""
        wire.refuses = True
        refused, _ = await connect()
        assert await refused.read() == b""
        await wire.close()
        server.close()

    in_loop(body)


class Echo(grpc.GenericRpcHandler):
    """Answers with the request, and remembers it."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.changed = asyncio.Event()

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: Any) -> bytes:
            self.seen.append(request)
            self.changed.set()
            if request == b"refuse":
                await context.abort(grpc.StatusCode.NOT_FOUND, "no", (("why-bin", b"\0\1"),))
            return request

        return grpc.unary_unary_rpc_method_handler(answer)

    async def until(self, count: int) -> None:
        while len(self.seen) < count:
            self.changed.clear()
            await self.changed.wait()


def test_calls_are_lost_on_either_way_or_arrive_twice(short_path: Path) -> None:
    async def body() -> None:
        behind = Echo()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((behind,))
        server.add_insecure_port(f"unix:{short_path}/e")
        await server.start()
        calls = Calls(f"unix:{short_path}/c", f"unix:{short_path}/e", random.Random(1))
        await calls.start()
        async with grpc.aio.insecure_channel(f"unix:{short_path}/c") as channel:

            async def call(request: bytes, timeout: float = 30.0) -> Any:
                return await channel.unary_unary("/rocmforge.Test/Echo")(request, timeout=timeout)

            assert await call(b"1") == b"1"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"refuse")
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            assert ("why-bin", b"\0\1") in tuple(refused.value.trailing_metadata())
            for doing, arrives in (("lose-requests", False), ("lose-replies", True)):
                calls.doing, seen = doing, len(behind.seen)
                for deadline_s in (0.5, 2.0, 8.0, 20.0):  # before which a busy machine may deliver nothing
                    with pytest.raises(grpc.aio.AioRpcError) as lost:
                        await call(b"2", deadline_s)
                    assert lost.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                    if (len(behind.seen) > seen) is arrives:
                        break
                assert (len(behind.seen) > seen) is arrives
            for doing in ("repeat-calls", "replay-calls-late"):
                calls.doing, seen = doing, len(behind.seen)
                assert await call(b"3") == b"3"
                await behind.until(seen + 2)
                assert behind.seen[-2:] == [b"3", b"3"]
        await calls.close()
        await server.stop(0)

    in_loop(body)
