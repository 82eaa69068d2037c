"""A rate limit on the messages of all streams: streams take turns, and none waits long."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.delivery.generation import Generation
from services.engine.delivery.streams import Bundle, Stream
from services.engine.delivery.throttle import BURST_S, MOST_S, TICK_S, Bell, Throttle
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import FinishReason, Outcome, Sequence
from tests.engine.delivery.test_streams import without_waiting
from tests.engine.fakes import make_request

END = Outcome(FinishReason.LENGTH)


class Loop:
    """A manual clock, and the callbacks scheduled on it."""

    def __init__(self) -> None:
        self.now = 100.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def clock(self) -> float:
        return self.now

    def later(self, delay_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now + delay_s, next(self._count), then))

    def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        while self._calls and self._calls[0][0] <= end:
            self.now, _, then = heapq.heappop(self._calls)
            then()
        self.now = end

    @property
    def calls(self) -> int:
        return len(self._calls)


class Reader:
    """Takes its output as soon as it is notified, and records when."""

    def __init__(self, loop: Loop, throttle: Throttle) -> None:
        self.told: list[float] = []
        self._loop = loop
        self.bell = Bell(self._look, throttle)

    def _look(self) -> None:
        self.told.append(self._loop.now)
        self.bell.hush()


def made(messages_per_s: float, readers: int) -> tuple[Loop, list[Reader]]:
    loop = Loop()
    throttle = Throttle(messages_per_s, loop.clock, loop.later)
    return loop, [Reader(loop, throttle) for _ in range(readers)]


def test_few_readers_are_told_at_once() -> None:
    loop, readers = made(1000, 8)
    for _ in range(100):
        loop.pass_by(0.01)  # 800 messages a second
        for reader in readers:
            reader.bell.ring()
            assert reader.told[-1] == loop.now
    assert loop.calls == 0, "no timer is kept where nobody waits"


def test_many_readers_share_what_there_is_and_wait_alike() -> None:
    loop, readers = made(1000, 50)
    steps = 400
    for _ in range(steps):
        loop.pass_by(0.01)  # 5000 messages a second, if each token had its own
        for reader in readers:
            reader.bell.ring()
    loop.pass_by(MOST_S + TICK_S)
    told = [len(reader.told) for reader in readers]
    seconds = steps * 0.01 + MOST_S + TICK_S
    assert sum(told) <= 1000 * (seconds + BURST_S) + 1
    assert sum(told) > 0.9 * 1000 * steps * 0.01 and max(told) - min(told) <= 2
    for reader in readers:
        gaps = [later - earlier for earlier, later in itertools.pairwise(reader.told)]
        assert max(gaps) < 50 / 1000 + 0.01 + 2 * TICK_S
    assert loop.calls == 0


def test_nobody_waits_longer_than_that_however_many_there_are() -> None:
    loop, readers = made(10, 300)
    for _ in range(30):
        loop.pass_by(0.01)
        for reader in readers:
            reader.bell.ring()
    loop.pass_by(MOST_S + TICK_S)
    for reader in readers:
        gaps = [later - earlier for earlier, later in itertools.pairwise([100.01, *reader.told])]
        assert gaps and max(gaps) <= MOST_S + 0.01 + 2 * TICK_S


def test_those_that_came_together_are_not_told_together() -> None:
    loop, readers = made(4000, 1000)
    told = 0
    for _ in range(20):
        for reader in readers:
            reader.bell.ring()
        for _ in range(25):
            loop.pass_by(0.001)
            before, told = told, sum(len(reader.told) for reader in readers)
            assert told - before <= 1000 * TICK_S / MOST_S + 4000 * BURST_S + 1


def test_one_timer_however_many_wait() -> None:
    loop, readers = made(10, 50)
    for _ in range(2):
        for reader in readers:
            reader.bell.ring()
        assert loop.calls == 1
        loop.pass_by(0.02)


def test_no_more_come_at_once_after_a_long_pause_than_after_a_short_one() -> None:
    loop, readers = made(1000, 100)
    loop.pass_by(3600)
    for reader in readers:
        reader.bell.ring()
    assert sum(len(reader.told) for reader in readers) == 1000 * BURST_S


def test_one_who_does_not_take_the_news_spends_one_turn() -> None:
    loop, sounds = Loop(), list[float]()
    slow = Bell(lambda: sounds.append(loop.now), Throttle(1000, loop.clock, loop.later))
    for _ in range(100):
        slow.ring()
    assert len(sounds) == 1 and loop.calls == 0


def test_what_ends_is_told_at_once_and_its_turn_is_nobodys() -> None:
    loop, readers = made(10, 4)
    first, *others = readers
    for reader in readers:
        reader.bell.ring()
    loop.pass_by(0.001)
    assert [len(reader.told) for reader in readers] == [1, 0, 0, 0], "one message is there at first"
    others[0].bell.ring(at_once=True)
    assert others[0].told == [loop.now]
    loop.pass_by(MOST_S + TICK_S)
    assert [len(reader.told) for reader in readers] == [1, 1, 1, 1]
    assert first.told < others[0].told < others[1].told <= others[2].told


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.floats(0, 0.05)), max_size=60), st.floats(1, 5000))
def test_whatever_is_rung_is_told_and_nothing_else(rings: list[tuple[int, bool, float]], messages_per_s: float) -> None:
    loop, readers = made(messages_per_s, 6)
    rung: list[list[float]] = [[] for _ in readers]
    for at, at_once, pause in rings:
        rung[at].append(loop.now)
        readers[at].bell.ring(at_once)
        loop.pass_by(pause)
    loop.pass_by(MOST_S + TICK_S)
    for reader, times in zip(readers, rung, strict=True):
        assert len(reader.told) <= len(times)
        for time in times:
            assert any(time <= told <= time + MOST_S + TICK_S + 1e-9 for told in reader.told)
        for told in reader.told:
            assert any(told - MOST_S - TICK_S - 1e-9 <= time <= told for time in times)


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("watched", [False, True])
def test_each_sample_is_a_message_and_counts(samples: int, watched: bool) -> None:
    async def body() -> None:
        loop, told = Loop(), 0
        throttle = Throttle(1000, loop.clock, loop.later)

        async def read(take: Callable[[], Any]) -> None:
            nonlocal told
            while True:
                await take()
                told += 1

        with ExitStack() as reading:
            readers, pushes = list[asyncio.Task[None]](), list[Callable[[Event], None]]()
            for _ in range(64 // samples):
                if watched:
                    generation = Generation("a", b"", 0, 60.0, lambda *_: None, samples)
                    readers.append(
                        asyncio.create_task(read(reading.enter_context(generation.watch(throttle=throttle)).next))
                    )
                    pushes.append(generation.push)
                else:
                    stream = Stream(samples=samples, throttle=throttle)
                    readers.append(asyncio.create_task(read(stream.next)))
                    pushes.append(stream.push)
            for token in range(100):
                for push in pushes:
                    for sample in range(samples):
                        push(Event("a", "x", (token,), sample=sample))
                for _ in range(5):
                    for _ in range(40):
                        await asyncio.sleep(0)
                    loop.pass_by(0.002)
            for reader in readers:
                reader.cancel()
        # In a second; the first 64 have their turns at once.
        assert 900 < told <= 1000 * (1 + BURST_S) + 64

    asyncio.run(body())


def spent(samples: int) -> tuple[Loop, Throttle, Generation]:
    """A pace whose one message was sent, and a generation."""
    loop = Loop()
    throttle = Throttle(1, loop.clock, loop.later)
    Bell(lambda: None, throttle).ring()
    return loop, throttle, Generation("a", b"", 0, 60.0, lambda *_: None, samples)


async def turns() -> None:
    """Yield to other tasks."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("without", [(), (1,)])
def test_a_first_token_and_an_end_are_told_at_once_whatever_other_samples_do(without: tuple[int, ...]) -> None:
    async def body() -> None:
        _, throttle, generation = spent(2)
        with generation.watch(without_samples=without, throttle=throttle) as watch:
            for event in (
                Event("a", "x", (1,)),
                Event("a", "x", (2,), END, Sequence(make_request("a"), 1)),
            ):
                news = asyncio.create_task(watch.next())
                await turns()
                generation.push(event)
                await turns()
                assert news.done() and news.result().token_ids == event.token_ids

    asyncio.run(body())


@pytest.mark.parametrize(
    "event",
    [Event("a", "x", (1,), sample=1), Event("a", sequence=Sequence(make_request("a"), 1))],
    ids=["not watched", "queued"],
)
def test_what_is_not_told_takes_no_turn(event: Event) -> None:
    async def body() -> None:
        loop, throttle, generation = spent(2)
        with generation.watch(without_samples=(1,), throttle=throttle) as watch:
            news = asyncio.create_task(watch.next())
            for _ in range(2):  # the first token of a sample has no turn to wait for
                await turns()
                generation.push(event)
            news.cancel()
            assert loop.calls == 0

    asyncio.run(body())


def test_tokens_that_come_while_a_stream_waits_are_one_message() -> None:
    async def body() -> None:
        loop = Loop()
        throttle = Throttle(10, loop.clock, loop.later)
        stream = Stream(throttle=throttle)
        stream.push(Event("a", "w", (9,)))
        assert (await stream.next()).token_ids == (9,), "a first token is told at once"
        for token in range(5):
            stream.push(Event("a", "x", (token,)))
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        assert not waiting.done(), "it is not its turn"
        loop.pass_by(MOST_S + TICK_S)
        assert (await asyncio.wait_for(waiting, 30)).token_ids == (0, 1, 2, 3, 4)
        stream.push(Event("a", "x", (5,)))
        stream.push(Event("a", "x", (6,), outcome=END))
        news = await asyncio.wait_for(stream.next(), 30)
        assert news.token_ids == (5, 6) and news.outcome == END and news.over

    asyncio.run(body())


def test_a_bundles_streams_have_turns_of_their_own() -> None:
    async def body() -> None:
        loop = Loop()
        bundle = Bundle(3, Throttle(10, loop.clock, loop.later))
        streams = [bundle.stream(at) for at in range(3)]
        for stream in streams:
            stream.push(Event("a", "w", (9,)))
        assert [without_waiting(bundle.next())[0] for _ in streams] == [0, 1, 2], "first tokens are told at once"
        for token in range(2):
            for stream in streams:
                stream.push(Event("a", "x", (token,)))
        waiting = asyncio.ensure_future(bundle.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        loop.pass_by(MOST_S + TICK_S)
        told = [await waiting, without_waiting(bundle.next()), without_waiting(bundle.next())]
        assert [(index, news.token_ids) for index, news in told] == [(at, (0, 1)) for at in range(3)]

    asyncio.run(body())


@pytest.mark.parametrize("samples", [1, 3])
def test_a_watch_is_told_at_once_what_there_is_and_in_its_turn_what_comes(samples: int) -> None:
    async def body() -> None:
        loop = Loop()
        throttle = Throttle(10, loop.clock, loop.later)
        generation = Generation("a", b"", 0, 60.0, lambda *_: None, samples)

        def push(token: int, outcome: Outcome | None = None) -> None:
            for sample in range(samples):
                sequence = Sequence(make_request("a"), 1) if outcome else None
                generation.push(Event("a", "x", (token,), outcome, sequence, sample))

        for token in range(4):
            push(token)
        with generation.watch(throttle=throttle) as watch, generation.watch(throttle=throttle) as other:
            for reader in (watch, other):
                for _ in range(samples):
                    assert (await asyncio.wait_for(reader.next(), 30)).token_ids == (0, 1, 2, 3)
            Bell(lambda: None, throttle).ring()  # has the turn that there is
            push(4)
            push(5)
            waiting = [asyncio.ensure_future(reader.next()) for reader in (watch, other)]
            await turns()
            assert not any(one.done() for one in waiting)
            loop.pass_by(MOST_S + TICK_S)
            for reader, one in zip((watch, other), waiting, strict=True):
                news = [await asyncio.wait_for(one, 30)]
                news += [await asyncio.wait_for(reader.next(), 30) for _ in range(samples - 1)]
                assert {told.token_ids for told in news} == {(4, 5)}
                assert {told.sample for told in news} == set(range(samples))
            push(6)
            push(7, END)
            for reader in (watch, other):
                ended = [await asyncio.wait_for(reader.next(), 30) for _ in range(samples)]
                assert all(news.outcome == END for news in ended) and ended[-1].over

    asyncio.run(body())
