"""Submitted generations: replays, watchers, and the retention of those that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import (
    FieldInvalid,
    ForwardFailed,
    QueueFull,
    RequestExists,
    RequestLive,
    RequestUnknown,
    TooManyWatchers,
)
from services.engine.delivery.generation import (
    MAX_WATCHES,
    OVERHEAD_BYTES,
    REPLAY_TOKENS,
    Generation,
    GenerationState,
    Watch,
)
from services.engine.delivery.registry import GenerationRegistry, RegistryLimits
from services.engine.delivery.streams import News
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import FinishReason, Outcome, Sequence
from tests.engine.fakes import Clock, make_request

END = Outcome(FinishReason.LENGTH)
#: What tokens say, one by one: nothing while text is held back, several bytes a character, much at once.
PIECES = ["Thou ", "", "", "art\u00e9 ", "\u706b", "a", "\U0001f525 and more", ""]


def registry(**retention: Any) -> tuple[GenerationRegistry, Clock]:
    clock = Clock()
    return GenerationRegistry(RegistryLimits(**retention), clock), clock


def queued(generation: Generation) -> Sequence:
    sequence = Sequence(make_request(generation.request_id), 1)
    generation.push(Event(generation.request_id, sequence=sequence))
    return sequence


def begun(generations: GenerationRegistry, name: str = "g", pieces: list[str] | None = None) -> Generation:
    """A generation that is queued and has some output."""
    generation = generations.open(name, b"mark", seed=7)
    queued(generation)
    for token, piece in enumerate(PIECES if pieces is None else pieces):
        generation.push(Event(name, piece, (token,)))
    return generation


def end(generation: Generation, outcome: Outcome = END) -> None:
    sequence = Sequence(make_request(generation.request_id), 1)
    generation.push(Event(generation.request_id, outcome=outcome, sequence=sequence))


def state_of(generation: Generation) -> GenerationState:
    return generation.state


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


async def rest(watch: Watch) -> tuple[str, tuple[int, ...], News]:
    """All output of a watch up to its end."""
    text, tokens = "", tuple[int, ...]()
    while True:
        news = await watch.next()
        text, tokens = text + news.text, tokens + news.token_ids
        if news.outcome is not None:
            return text, tokens, news


def check(generations: GenerationRegistry) -> None:
    """The invariants after every operation."""
    known = generations._known
    assert generations.bytes == sum(generation.size for generation in known.values())
    over = {name for name, generation in known.items() if generation.over}
    assert set(generations._over) == set(generations._expiries._at) == over
    assert list(generations._over.values()) == sorted(generations._over.values())
    assert len(over) <= generations.retention.count
    assert generations.bytes <= generations.retention.memory or len(over) <= 1


# --- replay and watchers ----------------------------------------------------------------------------------------------


def test_a_replay_from_every_token_is_exactly_the_rest() -> None:
    async def body() -> None:
        generations, _ = registry()
        generation = begun(generations)
        end(generation)
        whole = "".join(PIECES)
        for at in range(len(PIECES) + 1):
            with generation.watch(at) as watch:
                text, tokens, last = await rest(watch)
            assert tokens == tuple(range(at, len(PIECES)))
            assert whole == "".join(PIECES[:at]) + text
            assert last.outcome == END and last.usage is not None

    run(body())


@given(st.lists(st.text(max_size=3), max_size=12), st.data())
@settings(deadline=None, max_examples=60)
def test_wherever_watchers_begin_and_stop_they_see_the_same(pieces: list[str], data: st.DataObject) -> None:
    async def body() -> None:
        generation = begun(registry()[0], pieces=[])
        seen: dict[Watch, tuple[list[str], list[int], int]] = {}
        watching = []
        for token, piece in enumerate(pieces):
            if data.draw(st.booleans()):
                context = generation.watch(data.draw(st.integers(0, token)))
                watch = context.__enter__()
                watching.append(context)
                seen[watch] = [], [], watch._at[0]
            generation.push(Event("g", piece, (token,)))
            for watch, (texts, tokens, _) in seen.items():
                if data.draw(st.booleans()) and watch._at[0] <= token:
                    news = await watch.next()
                    texts.append(news.text)
                    tokens.extend(news.token_ids)
        end(generation)
        for watch, (texts, tokens, began) in seen.items():
            text, late, _ = await rest(watch)
            assert tokens + list(late) == list(range(began, len(pieces)))
            assert "".join(texts) + text == "".join(pieces[began:])
        for context in watching:
            context.__exit__(None, None, None)
        assert not generation._watches

    run(body())


def test_watchers_wait_for_what_comes_and_end_with_it() -> None:
    async def body() -> None:
        generation = registry()[0].open("g", b"", seed=1)
        with generation.watch(0) as one, generation.watch(0) as other:
            first, second = asyncio.ensure_future(one.next()), asyncio.ensure_future(other.next())
            queued(generation)
            await asyncio.sleep(0)
            assert not first.done() and not second.done()
            generation.push(Event("g", "x", (1,)))
            assert await first == await second == News("x", (1,))
            first = asyncio.ensure_future(one.next())
            await asyncio.sleep(0)
            end(generation, Outcome(error=ForwardFailed("boom")))
            assert isinstance((await first).outcome.error, ForwardFailed)  # type: ignore[union-attr]
            assert (await other.next()).outcome == generation.outputs[0].outcome

    run(body())


def test_a_long_replay_comes_in_pieces() -> None:
    async def body() -> None:
        generation = begun(registry()[0], pieces=["ab"] * (2 * REPLAY_TOKENS + 5))
        end(generation)
        with generation.watch(1) as watch:
            sizes = []
            while True:
                news = await watch.next()
                sizes.append((len(news.token_ids), len(news.text), news.outcome is not None))
                if news.outcome is not None:
                    break
        assert sizes == [
            (REPLAY_TOKENS, 2 * REPLAY_TOKENS, False),
            (REPLAY_TOKENS, 2 * REPLAY_TOKENS, False),
            (4, 8, True),
        ]

    run(body())


def test_a_watcher_that_stops_reading_holds_nothing_and_stalls_nobody() -> None:
    async def body() -> None:
        generations, _ = registry()
        generation = begun(generations, pieces=["x"])
        with generation.watch(0) as stopped:
            await stopped.next()
            size = generations.bytes
            for token in range(10_000):
                generation.push(Event("g", "y", (token,)))
            assert generations.bytes - size == 9 * 10_000
            assert not [
                name for name in vars(stopped) if name not in ("_generation", "_at", "_turns", "_changed", "_bells")
            ]
            end(generation)
            assert len((await rest(stopped))[1]) == 10_000
        check(generations)

    run(body())


def test_where_a_watch_may_begin_and_how_many_there_may_be() -> None:
    generation = begun(registry()[0])
    with pytest.raises(FieldInvalid, match="from_token is 9; there are 8 tokens") as caught:
        generation.watch(9).__enter__()
    assert caught.value.field == "from_token"
    contexts = [generation.watch(0) for _ in range(MAX_WATCHES)]
    for context in contexts:
        context.__enter__()
    with pytest.raises(TooManyWatchers, match=str(MAX_WATCHES)):
        generation.watch(0).__enter__()
    for context in contexts:
        context.__exit__(None, None, None)
    with generation.watch(8):
        pass
    assert not generation._watches


def test_a_generation_forgotten_while_it_is_watched() -> None:
    async def body() -> None:
        generations, _ = registry()
        generation = begun(generations)
        with generation.watch(0) as behind, generation.watch(8) as abreast, generation.watch(8) as waiting:
            pending = asyncio.ensure_future(waiting.next())
            await asyncio.sleep(0)
            end(generation)
            generations.delete("g")  # before any of them had its turn
            assert (await pending).outcome == END
            assert (await abreast.next()).outcome == END  # it lacks no token
            with pytest.raises(RequestUnknown, match="deleted or expired at token 0 of 8"):
                await behind.next()
        assert generation.size == OVERHEAD_BYTES and generations.bytes == 0

    run(body())


# --- the registry -----------------------------------------------------------------------------------------------------


def test_states_and_what_it_took() -> None:
    generations, _ = registry()
    generation = generations.open("g", b"", seed=1)
    said = generation.outputs[0]
    assert state_of(generation) is GenerationState.QUEUED and said.usage is None
    sequence = queued(generation)
    assert state_of(generation) is GenerationState.QUEUED
    sequence.admitted_at = 3.0
    assert state_of(generation) is GenerationState.RUNNING
    sequence.tokens.append(5)
    assert said.usage is not None and said.usage.completion_tokens == 1
    generation.push(Event("g", outcome=END, sequence=sequence))
    assert state_of(generation) is GenerationState.DONE and said.usage.queue_s == 3.0
    assert said._sequence is None  # the prompt is not kept
    failed = begun(generations, "f")
    end(failed, Outcome(error=ForwardFailed("boom")))
    assert failed.state is GenerationState.FAILED and failed.refusal is None


def test_the_same_request_again_is_the_same_generation_and_another_is_an_error() -> None:
    generations, _ = registry()
    assert generations.again("g", b"mark") is None
    generation = begun(generations)
    assert generations.again("g", b"mark") is generation
    end(generation)
    assert generations.again("g", b"mark") is generation
    with pytest.raises(RequestExists, match="a different request"):
        generations.again("g", b"other")
    with pytest.raises(RequestExists):
        generations.open("g", b"mark", seed=1)


def test_a_refused_one_was_never_there() -> None:
    async def body() -> None:
        generations, _ = registry()
        generation = generations.open("g", b"mark", seed=1)
        waiting = [asyncio.ensure_future(generation.accepted()) for _ in range(2)]
        with generation.watch(0) as watch:
            await asyncio.sleep(0)
            generation.push(Event("g", outcome=Outcome(error=QueueFull("full"))))
            for one in waiting:
                with pytest.raises(QueueFull):
                    await one
            assert isinstance((await watch.next()).outcome.error, QueueFull)  # type: ignore[union-attr]
        assert generations.again("g", b"another one") is None and len(generations) == generations.bytes == 0
        check(generations)

    run(body())


def test_deleting() -> None:
    generations, _ = registry()
    with pytest.raises(RequestUnknown):
        generations.delete("g")
    generation = begun(generations)
    with pytest.raises(RequestLive, match="cancel it first"):
        generations.delete("g")
    end(generation)
    generations.delete("g")
    with pytest.raises(RequestUnknown):
        generations.find("g")
    assert generations.bytes == 0


def test_retention_by_time_and_a_shorter_one_by_request() -> None:
    generations, clock = registry(ttl_s=100.0)
    for name, retention_s in (("default", None), ("short", 10.0), ("long", 1000.0)):
        generation = generations.open(name, b"", 1, retention_s)
        queued(generation)
        assert generations.expires_in(generation) is None
        clock.now += 500  # being live takes no retention away
        end(generation)
        clock.now -= 500
    clock.now += 500
    assert generations.expires_in(generations.find("short")) == 10
    clock.now += 9.9
    assert len(generations) == 3
    clock.now += 0.1
    generations.expire()
    assert set(generations._known) == {"default", "long"}  # the engine's limit is the most
    clock.now += 90
    assert "default" not in generations and "long" not in generations
    assert generations.bytes == 0
    check(generations)


def test_purging_by_age() -> None:
    generations, clock = registry()
    for name in "abc":
        end(begun(generations, name))
        clock.now += 10
    begun(generations, "live")
    assert generations.purge(25) == 1
    assert generations.purge(15) == 1
    assert generations.purge(0) == 1
    assert generations.purge(0) == 0
    assert set(generations._known) == {"live"}
    check(generations)


def test_the_oldest_gives_way_to_the_newest_but_never_a_live_one() -> None:
    generations, _ = registry(count=3)
    begun(generations, "live")
    for at in range(10):
        end(begun(generations, f"g{at}"))
        check(generations)
    assert set(generations._known) == {"live", "g7", "g8", "g9"}


def test_memory_is_bounded_by_what_is_live_and_one_that_is_over() -> None:
    generations, _ = registry(memory=3 * (OVERHEAD_BYTES + 900) + 10)
    for at in range(10):
        end(begun(generations, f"g{at}", ["x"] * 100))
        check(generations)
    assert set(generations._known) == {"g7", "g8", "g9"}
    live = begun(generations, "live", ["x"] * 100)
    assert generations.retained == 2  # output of a live one counts, too
    for token in range(3000):
        live.push(Event("live", "x", (token,)))
    check(generations)
    assert set(generations._known) == {"live", "g9"}
    end(live)
    assert set(generations._known) == {"live"}


def test_a_thousand_leave_the_maps_as_they_were() -> None:
    generations, clock = registry(count=16, ttl_s=60.0)
    for at in range(1000):
        end(begun(generations, f"g{at}"))
        clock.now += 1
        check(generations)
        assert len(generations) <= 16
    clock.now += 60
    generations.expire()
    assert not generations._known and not generations._over and not len(generations._expiries)
    assert generations.bytes == 0


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "say", "end", "fail", "refuse", "delete", "purge", "wait"]),
        st.sampled_from("abcdefg"),
        st.integers(0, 40),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(deadline=None)
def test_any_order_of_operations_keeps_the_books(operations: list[tuple[str, str, int]]) -> None:
    generations, clock = registry(count=3, ttl_s=30.0, memory=4 * OVERHEAD_BYTES)
    live: dict[str, Generation] = {}
    for operation, name, amount in operations:
        if operation == "wait":
            clock.now += amount
        elif operation == "purge":
            generations.purge(amount)
        elif operation == "delete":
            if name in live:
                with pytest.raises(RequestLive):
                    generations.delete(name)
            elif name in generations:
                generations.delete(name)
        elif operation == "open":
            if name not in generations:
                live[name] = generations.open(name, b"", 1, float(amount) or None)
        elif name in live:
            if operation == "say":
                if live[name].outputs[0].usage is None:
                    queued(live[name])
                live[name].push(Event(name, "x" * amount, tuple(range(amount))))
            elif operation == "refuse" and live[name].outputs[0].usage is None:
                live.pop(name).push(Event(name, outcome=Outcome(error=QueueFull("full"))))
            elif operation in ("end", "fail"):
                outcome = END if operation == "end" else Outcome(error=ForwardFailed("boom"))
                end(live.pop(name), outcome)
        check(generations)
        assert live.keys() <= generations._known.keys()
