"""News of live requests, and the memory of those that are over."""

from __future__ import annotations

import asyncio

import pytest

from services.engine.loop import Event
from services.engine.sequence import FinishReason, Outcome
from services.engine.streams import REMEMBERED, REMEMBERED_S, News, Streams
from services.errors import RequestExists, RequestUnknown
from tests.engine.fakes import Clock

END = Outcome(FinishReason.LENGTH)


def test_news_are_merged_for_a_slow_caller() -> None:
    async def body() -> None:
        streams = Streams()
        stream = streams.open("a")
        streams.deliver([Event("a", "x", (1,)), Event("b", "lost", (9,)), Event("a", "y", (2,))])
        assert await stream.next() == News("xy", [1, 2], None)
        last = Event("a", outcome=END)
        streams.deliver([Event("a", "z", (3,)), last])
        assert await stream.next() == News("z", [3], last)

    asyncio.run(body())


def test_waiting_for_news() -> None:
    async def body() -> None:
        streams = Streams()
        stream = streams.open("a")
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        streams.deliver([Event("a", "x", (1,))])
        assert (await waiting).text == "x"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.01)

    asyncio.run(body())


def test_an_id_is_live_until_its_last_event_and_over_from_then_on() -> None:
    async def body() -> None:
        streams = Streams()
        with pytest.raises(RequestUnknown):
            streams.is_live("a")
        streams.open("a")
        with pytest.raises(RequestExists):
            streams.open("a")
        assert streams.is_live("a") and len(streams) == 1
        streams.deliver([Event("a", outcome=END)])
        assert not streams.is_live("a") and len(streams) == 0
        streams.open("a")
        assert streams.is_live("a")

    asyncio.run(body())


def test_what_is_over_is_forgotten_by_count_and_by_time() -> None:
    async def body() -> None:
        clock = Clock()
        streams = Streams(clock)
        for at in range(REMEMBERED + 10):
            streams.open(str(at))
            streams.deliver([Event(str(at), outcome=END)])
        assert len(streams._over) == REMEMBERED
        with pytest.raises(RequestUnknown):
            streams.is_live("9")
        assert not streams.is_live("10")
        clock.now += REMEMBERED_S
        with pytest.raises(RequestUnknown):
            streams.is_live("10")
        assert not streams._over

    asyncio.run(body())


def test_waiting_until_none_is_live() -> None:
    async def body() -> None:
        streams = Streams()
        await streams.until_none()
        streams.open("a")
        streams.open("b")
        waiting = asyncio.ensure_future(streams.until_none())
        streams.deliver([Event("a", outcome=END)])
        await asyncio.sleep(0)
        assert not waiting.done()
        streams.deliver([Event("b", outcome=END)])
        await waiting

    asyncio.run(body())
