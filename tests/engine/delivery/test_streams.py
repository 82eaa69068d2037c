"""Output of live requests, and the memory of those that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import pytest

from services.common.errors import FieldInvalid, RequestExists, RequestUnknown
from services.engine.delivery.streams import REMEMBERED, REMEMBERED_S, Bundle, News, Stream, Streams
from services.engine.sampling.result import Choice
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import FinishReason, Outcome, Sequence
from tests.engine.fakes import Clock, make_request

END = Outcome(FinishReason.LENGTH)

Told = TypeVar("Told")


def without_waiting(telling: Coroutine[Any, Any, Told]) -> Told:
    """The result of a coroutine that never waits; one that does fails the test instead of hanging it."""
    try:
        telling.send(None)
    except StopIteration as done:
        return cast("Told", done.value)
    telling.close()
    raise AssertionError("there are news, and nobody is told")


def opened(streams: Streams, request_id: str) -> Stream:
    stream = Stream()
    streams.open(request_id, stream)
    return stream


def test_news_are_merged_for_a_slow_caller() -> None:
    async def body() -> None:
        streams = Streams()
        stream = opened(streams, "a")
        streams.deliver([Event("a", "x", (1,)), Event("b", "lost", (9,)), Event("a", "y", (2,))])
        assert await stream.next() == News("xy", (1, 2))
        streams.deliver([Event("a", "z", (3,)), Event("a", outcome=END)])
        assert await stream.next() == News("z", (3,), END, over=True)

    asyncio.run(body())


def test_waiting_for_news() -> None:
    async def body() -> None:
        streams = Streams()
        stream = opened(streams, "a")
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        streams.deliver([Event("a", sequence=Sequence(make_request("a"), 1))])  # it is queued: no news
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
        opened(streams, "a")
        with pytest.raises(RequestExists):
            opened(streams, "a")
        assert streams.is_live("a") and len(streams) == 1
        streams.deliver([Event("a", outcome=END)])
        assert not streams.is_live("a") and len(streams) == 0
        opened(streams, "a")
        assert streams.is_live("a")

    asyncio.run(body())


def test_what_is_over_is_forgotten_by_count_and_by_time() -> None:
    async def body() -> None:
        clock = Clock()
        streams = Streams(clock)
        for at in range(REMEMBERED + 10):
            opened(streams, str(at))
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
        opened(streams, "a")
        opened(streams, "b")
        waiting = asyncio.ensure_future(streams.until_none())
        streams.deliver([Event("a", outcome=END)])
        await asyncio.sleep(0)
        assert not waiting.done()
        streams.deliver([Event("b", outcome=END)])
        await waiting

    asyncio.run(body())


def test_of_a_bundle_whoever_has_waited_longest_comes_first() -> None:
    async def body() -> None:
        bundle = Bundle(3)
        one, other = bundle.stream(0), bundle.stream(1)
        other.push(Event("b", "x", (1,)))
        one.push(Event("a", "y", (2,)))
        other.push(Event("b", "z", (3,)))
        error = FieldInvalid("no")
        bundle.fail(2, error)
        assert without_waiting(bundle.next()) == (1, News("xz", (1, 3)))
        other.push(Event("b", outcome=END))
        assert without_waiting(bundle.next()) == (0, News("y", (2,)))
        assert without_waiting(bundle.next()) == (2, News(outcome=Outcome(error=error), over=True))
        assert bundle.remaining == 2
        assert without_waiting(bundle.next()) == (1, News(outcome=END, over=True))
        waiting = asyncio.ensure_future(bundle.next())
        await asyncio.sleep(0)
        assert not waiting.done() and bundle.remaining == 1
        one.push(Event("a", "", (4,)))
        one.push(Event("a", outcome=END))
        assert await waiting == (0, News("", (4,), END, over=True))
        assert bundle.remaining == 0

    asyncio.run(body())


def sequence_of(request_id: str) -> Sequence:
    return Sequence(make_request(request_id), 1)


def test_news_of_several_samples_are_told_apart_and_over_with_the_last() -> None:
    async def body() -> None:
        streams = Streams()
        stream = Stream(samples=2)
        streams.open("a", stream, 2)
        sequence = sequence_of("a")
        one, other = Choice(1, -0.5, 1), Choice(2, -1.0, 2)
        streams.deliver(
            [
                Event("a", "x", (1,), sample=1, logprobs=(one,)),
                Event("a", "y", (2,), prompt_logprobs=(other,)),
                Event("a", "z", (1,), sample=1, logprobs=(one,)),
            ]
        )
        assert await stream.next() == News("xz", (1, 1), sample=1, logprobs=(one, one))
        assert stream.has_news
        assert await stream.next() == News("y", (2,), prompt_logprobs=(other,))
        assert not stream.has_news
        streams.deliver([Event("a", outcome=END, sequence=sequence)])
        assert streams.is_live("a")
        assert await stream.next() == News(outcome=END, usage=sequence.usage)
        streams.deliver([Event("a", outcome=END, sequence=sequence, sample=1)])
        assert not streams.is_live("a")
        assert await stream.next() == News(outcome=END, usage=sequence.usage, sample=1, over=True)

    asyncio.run(body())


def test_a_request_of_several_samples_that_is_refused_is_over_at_once() -> None:
    async def body() -> None:
        streams = Streams()
        stream = Stream(samples=3)
        streams.open("a", stream, 3)
        error = Outcome(error=FieldInvalid("no"))
        streams.deliver([Event("a", outcome=error)])
        assert not streams.is_live("a") and len(streams) == 0
        assert await stream.next() == News(outcome=error, over=True)

    asyncio.run(body())


def test_of_a_bundle_an_item_is_over_when_all_its_samples_are() -> None:
    async def body() -> None:
        bundle = Bundle(2)
        several, single = bundle.stream(0, 2), bundle.stream(1)
        sequence = sequence_of("a")
        several.push(Event("a", "x", (1,), sample=1))
        several.push(Event("a", outcome=END, sequence=sequence))
        single.push(Event("b", outcome=END, sequence=sequence))
        assert without_waiting(bundle.next()) == (0, News("x", (1,), sample=1))
        assert (without_waiting(bundle.next()))[0] == 1 and bundle.remaining == 1
        assert without_waiting(bundle.next()) == (0, News(outcome=END, usage=sequence.usage))
        assert bundle.remaining == 1
        several.push(Event("a", outcome=END, sequence=sequence, sample=1))
        assert (without_waiting(bundle.next()))[1].over and bundle.remaining == 0

    asyncio.run(body())


def test_a_bundle_tells_all_news_whatever_comes_while_it_is_read() -> None:
    async def body() -> None:
        bundle = Bundle(3)
        streams = [bundle.stream(at, samples=2) for at in range(3)]
        pushed, told = dict[tuple[int, int], list[int]](), dict[tuple[int, int], list[int]]()

        def push(at: int, sample: int, token: int) -> None:
            streams[at].push(Event("a", "", (token,), sample=sample))
            pushed.setdefault((at, sample), []).append(token)

        def read() -> None:
            index, news = without_waiting(bundle.next())
            told.setdefault((index, news.sample), []).extend(news.token_ids)

        for token in range(12):
            for at in range(3):
                for sample in range(2):
                    push(at, sample, token)
            for _ in range(token % 7):  # of six there are, so that some are merged
                read()
                push(token % 3, 0, 100 + token)
        while streams[0].has_news or streams[1].has_news or streams[2].has_news:
            read()
        assert told == pushed

    asyncio.run(body())
