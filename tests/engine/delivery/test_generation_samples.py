"""A submitted request of several samples: every watcher, from any position, gets each sample's output exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import FieldInvalid, ForwardFailed, QueueFull, RequestLive, RequestUnknown, TooManyWatchers
from services.engine.delivery.generation import (
    MAX_WATCHES,
    OVERHEAD_BYTES,
    REPLAY_TOKENS,
    SAMPLE_BYTES,
    Generation,
    GenerationState,
    Watch,
)
from services.engine.delivery.output import CHOICE_BYTES, TOP_BYTES
from services.engine.delivery.registry import GenerationRegistry, RegistryLimits
from services.engine.delivery.streams import News
from services.engine.sampling.result import Choice
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import FinishReason, Outcome
from services.engine.scheduling.sequence import Sequence as Live
from tests.engine.fakes import Clock, make_request

LENGTH, EOS, CANCELLED = (Outcome(reason) for reason in (FinishReason.LENGTH, FinishReason.EOS, FinishReason.CANCELLED))
FAILED = Outcome(error=ForwardFailed("boom"))
PROMPT_TOLD = (Choice(1, -1.0, 1),)


class Story:
    """A generation in a registry, and the outputs of its samples, which a test delivers piece by piece."""

    def __init__(self, samples: int, retention: RegistryLimits | None = None) -> None:
        self.clock = Clock()
        self.generations = GenerationRegistry(retention or RegistryLimits(), self.clock)
        self.generation = self.generations.open("g", b"mark", 7, 100.0, samples)
        request = make_request("g", n=samples)
        self.family = [Live(one, at) for at, one in enumerate((request, *request.others))]
        for sequence in self.family if samples > 1 else ():
            sequence.family = self.family
        self.said: list[list[str]] = [[] for _ in range(samples)]
        self.ends: dict[int, Outcome] = {}

    def queue(self) -> None:
        self.generation.push(Event("g", sequence=self.family[0]))

    def say(self, sample: int, piece: str) -> None:
        """One token, whose id is its position, and its text."""
        place = len(self.said[sample])
        prompt = PROMPT_TOLD if sample == place == 0 else ()
        token = (sample << 16 | place,)
        self.generation.push(Event("g", piece, token, sample=sample, prompt_logprobs=prompt))
        self.said[sample].append(piece)

    def end(self, sample: int, outcome: Outcome = LENGTH) -> None:
        self.ends[sample] = outcome
        self.generation.push(Event("g", outcome=outcome, sequence=self.family[sample], sample=sample))

    def end_all(self, outcome: Outcome = LENGTH) -> None:
        for sample in range(len(self.said)):
            if sample not in self.ends:
                self.end(sample, outcome)

    def check(self) -> None:
        """The registry's invariants after every operation."""
        known = self.generations._known.values()
        assert self.generations.bytes == sum(one.size for one in known)
        over = {one.request_id for one in known if one.over}
        assert set(self.generations._over) == set(self.generations._expiries._at) == over


@dataclass
class Client:
    """Remembers what it received of each sample. Loses its connection whenever the test says so."""

    story: Story
    began: list[int]
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: dict[int, Outcome] = field(default_factory=dict)
    ended_here: set[int] = field(default_factory=set)  # in this connection
    watch: Watch | None = None
    unknown: bool = False  # it was told that there is no such generation any more
    _context: AbstractContextManager[Watch] | None = None

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.began]
        self.texts = ["" for _ in self.began]

    @property
    def places(self) -> list[int]:
        return [began + len(tokens) for began, tokens in zip(self.began, self.tokens, strict=True)]

    @property
    def has_news(self) -> bool:
        return self.watch is not None and self.watch._ready() is not None

    @property
    def done(self) -> bool:
        return len(self.ends) == len(self.began)

    def join(self, trimmed: bool = False, told_again: bool = True) -> None:
        """Come, or come back, from where it is. Zeros at the end of what it asks for may be left out, and samples whose
        end it was told.
        """
        self.leave()
        places = self.places
        while trimmed and places and not places[-1]:
            places.pop()
        had = set() if told_again or self.done else set(self.ends)
        self._context = self.story.generation.watch(0, places, sorted(had))
        self.watch, self.ended_here = self._context.__enter__(), had

    def leave(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
        self.watch = self._context = None

    async def hear(self, lost: bool = False) -> None:
        """Take one piece of news, which the connection may lose on its way."""
        assert self.watch is not None
        try:
            news = await self.watch.next()
        except RequestUnknown:
            assert self.story.generation.forgotten
            self.unknown = True
            self.leave()
            return
        self.heard(news, lost)
        if news.over or lost:
            self.leave()

    def heard(self, news: News, lost: bool) -> None:
        at, story = news.sample, self.story
        assert at not in self.ended_here, "something came behind a sample's end"
        here = len(self.tokens[at]) + self.began[at]
        assert news.token_ids == tuple(at << 16 | here + step for step in range(len(news.token_ids)))
        assert news.text == "".join(story.said[at][here : here + len(news.token_ids)])
        assert news.token_ids or news.outcome is not None
        assert bool(news.prompt_logprobs) == (at == here == 0 and bool(news.token_ids))
        if news.outcome is not None:
            assert news.outcome == story.ends[at] and news.usage is not None
            assert here + len(news.token_ids) == len(story.said[at])
            self.ended_here.add(at)
        assert news.over == (len(self.ended_here) == len(self.began))
        if lost:
            return
        self.tokens[at] += news.token_ids
        self.texts[at] += news.text
        if news.outcome is not None:
            assert self.ends.setdefault(at, news.outcome) == news.outcome

    def check_whole(self) -> None:
        for at, (said, began) in enumerate(zip(self.story.said, self.began, strict=True)):
            assert self.tokens[at] == [at << 16 | place for place in range(began, len(said))]
            assert self.texts[at] == "".join(said[began:])
        assert self.ends == self.story.ends


def state_of(generation: Generation) -> GenerationState:
    return generation.state


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from(["say"] * 8 + ["end", "end", "others", "delete", "fail"]),
        st.integers(0, 11),
        st.text(max_size=3),
    ),
    max_size=30,
)


# --- the property -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.data())
@settings(deadline=None, max_examples=150)
def test_what_a_watcher_had_wherever_it_was_cut_off_is_the_whole_of_each_sample(
    samples: int, data: st.DataObject
) -> None:
    """Any interleaving of what samples say and how they end; watchers that join, read, lose what was on its way, leave
    and come back at any time; others that come and go in the registry; and at last it is deleted, expires, or stays.
    """

    async def body() -> None:
        story = Story(samples, RegistryLimits(count=2))
        story.queue()
        clients: list[Client] = []

        async def watchers_do() -> None:
            for client in clients:
                match data.draw(st.sampled_from(["nothing", "hear", "hear all", "lose", "leave", "join"])):
                    case "join" if not client.unknown and not story.generation.forgotten:
                        client.join(data.draw(st.booleans()), data.draw(st.booleans()))
                    case "leave":
                        client.leave()
                    case "hear" | "lose" as how if client.has_news:
                        await client.hear(how == "lose")
                    case "hear all":
                        while client.has_news:
                            await client.hear()
            joins = not story.generation.forgotten and len(clients) < 6 and data.draw(st.booleans())
            if joins:
                client = Client(story, [data.draw(st.integers(0, len(said))) for said in story.said])
                client.join()
                clients.append(client)

        for what, which, piece in data.draw(SCRIPTS):
            live = [sample for sample in range(samples) if sample not in story.ends]
            match what:
                case _ if not live:
                    break
                case "say":
                    story.say(live[which % len(live)], piece)
                case "end":
                    story.end(live[which % len(live)], [LENGTH, EOS, CANCELLED][which % 3])
                case "fail":
                    story.end_all(FAILED)
                case "others":  # more of them end than are kept, which are no live ones
                    name = f"other{story.clock.now}"
                    story.clock.now += 1000
                    other = story.generations.open(name, b"", 1)
                    other.push(Event(name, "x", (1,)))
                    other.push(Event(name, outcome=LENGTH, sequence=Live(make_request(name), 1)))
                case "delete":
                    with pytest.raises(RequestLive):
                        story.generations.delete("g")
            story.check()
            await watchers_do()
        story.end_all()
        failed = FAILED in story.ends.values()
        assert state_of(story.generation) is (GenerationState.FAILED if failed else GenerationState.DONE)
        match data.draw(st.sampled_from(["stays", "deleted", "expires"])):
            case "deleted":
                story.generations.delete("g")
            case "expires":
                story.clock.now += 100
                story.generations.expire()
        story.check()
        assert ("g" in story.generations) != story.generation.forgotten
        for _ in range(data.draw(st.integers(0, 3))):
            await watchers_do()
        for client in clients:
            if not story.generation.forgotten and not client.done:
                client.join()
            while client.watch is not None:
                await client.hear()
            if not story.generation.forgotten:
                assert not client.unknown
                client.check_whole()
            elif client.done:
                client.check_whole()  # it had all before it was forgotten
        assert not story.generation._watches

    run(body())


# --- turns, ends, places ----------------------------------------------------------------------------------------------


def test_samples_have_their_turns_and_none_waits_for_a_long_one() -> None:
    async def body() -> None:
        story = Story(3)
        story.queue()
        for _ in range(3 * REPLAY_TOKENS):
            story.say(0, "a")
        story.say(1, "b")
        story.say(2, "c")
        story.end_all()
        with story.generation.watch() as watch:
            told = [await watch.next() for _ in range(5)]
        assert [(news.sample, len(news.token_ids)) for news in told] == [
            (0, REPLAY_TOKENS),
            (1, 1),
            (2, 1),
            (0, REPLAY_TOKENS),
            (0, REPLAY_TOKENS),
        ]
        assert [news.outcome is not None for news in told] == [False, True, True, False, True]
        assert [news.over for news in told] == [False] * 4 + [True]

    run(body())


def test_a_watcher_waits_for_any_sample_and_until_the_last_has_ended() -> None:
    async def body() -> None:
        story = Story(2)
        with story.generation.watch() as watch:
            waiting = asyncio.ensure_future(watch.next())
            story.queue()
            await asyncio.sleep(0)
            assert not waiting.done()
            story.say(1, "x")
            assert await waiting == News("x", (1 << 16,), sample=1)
            story.end(1, EOS)
            news = await watch.next()
            assert (news.sample, news.outcome, news.over) == (1, EOS, False)
            waiting = asyncio.ensure_future(watch.next())
            await asyncio.sleep(0)
            assert not waiting.done() and not story.generation.over
            story.end(0, CANCELLED)
            news = await waiting
            assert (news.sample, news.outcome, news.over) == (0, CANCELLED, True)

    run(body())


def test_a_failure_is_told_once_all_have_ended_and_what_ended_before_keeps_its_end() -> None:
    story = Story(3)
    story.queue()
    story.say(1, "x")
    story.end(1, EOS)
    story.end(2, FAILED)
    generation = story.generation
    assert generation.error is None and state_of(generation) is not GenerationState.FAILED
    with pytest.raises(RequestLive):
        story.generations.delete("g")
    story.end(0, FAILED)
    assert generation.error is FAILED.error and generation.state is GenerationState.FAILED
    assert generation.outputs[1].outcome == EOS


def test_states_and_usage_are_the_samples() -> None:
    story = Story(2)
    generation = story.generation
    assert state_of(generation) is GenerationState.QUEUED and generation.outputs[1].usage is None
    story.queue()
    assert state_of(generation) is GenerationState.QUEUED
    assert [output.usage is not None for output in generation.outputs] == [True, True]
    story.family[1].admitted_at = 3.0
    story.family[1].tokens.append(5)
    assert state_of(generation) is GenerationState.RUNNING
    usages = [output.usage for output in generation.outputs]
    assert [usage and usage.completion_tokens for usage in usages] == [0, 1]
    story.end(1)
    assert state_of(generation) is GenerationState.RUNNING
    story.end(0)
    assert state_of(generation) is GenerationState.DONE
    assert [output._sequence for output in generation.outputs] == [None, None]  # the prompt is not kept


def test_a_refusal_is_of_all_samples_and_leaves_nothing() -> None:
    async def body() -> None:
        story = Story(4)
        with story.generation.watch() as watch:
            waiting = asyncio.ensure_future(story.generation.accepted())
            await asyncio.sleep(0)
            story.generation.push(Event("g", outcome=Outcome(error=QueueFull("full"))))
            with pytest.raises(QueueFull):
                await waiting
            told = [await watch.next() for _ in range(4)]
            assert [news.over for news in told] == [False, False, False, True]
        assert len(story.generations) == story.generations.bytes == 0
        story.check()

    run(body())


@pytest.mark.parametrize(
    ("samples", "from_token", "from_tokens", "without", "name", "says", "limit"),
    [
        (1, 3, [], [], "from_token", "from_token is 3; there are 2 tokens so far", "2"),
        (1, 0, [3], [], "from_tokens[0]", "from_tokens[0] is 3; there are 2 tokens so far", "2"),
        (1, 0, [1, 0], [], "from_tokens", "from_tokens has 2 entries; at most one for each sample, 1", "1"),
        (3, 0, [2, 1, 0], [], "from_tokens[1]", "from_tokens[1] is 1; there are 0 tokens so far", "0"),
        (
            3,
            0,
            [0, 0, 2**32 - 1],
            [],
            "from_tokens[2]",
            "from_tokens[2] is 4294967295; there are 1 tokens so far",
            "1",
        ),
        (3, 0, [0, 0, 0, 0], [], "from_tokens", "from_tokens has 4 entries; at most one for each sample, 3", "3"),
        (3, 2, [], [], "from_token", "from_token is 2; with 3 samples, use from_tokens", "0"),
        (3, 2, [2], [], "from_tokens", "from_token is 2; from_tokens cannot be set as well", None),
        (3, 0, [], [0, 3], "without_samples[1]", "without_samples[1] is 3; it must be at most 2", "2"),
        (3, 0, [], [2, 1, 0], "without_samples", "without_samples leaves no sample to watch", None),
        (1, 0, [], [0], "without_samples", "without_samples leaves no sample to watch", None),
        (
            3,
            0,
            [],
            [1] * 4,
            "without_samples",
            "without_samples has 4 entries; at most one for each sample, 3",
            "3",
        ),
    ],
)
def test_where_a_watch_may_not_begin(
    samples: int,
    from_token: int,
    from_tokens: Sequence[int],
    without: Sequence[int],
    name: str,
    says: str,
    limit: str | None,
) -> None:
    story = Story(samples)
    story.queue()
    for sample in [0, 0, 2][: 2 if samples == 1 else 3]:
        story.say(sample, "x")
    with pytest.raises(FieldInvalid) as caught:
        story.generation.watch(from_token, from_tokens, without).__enter__()
    assert (caught.value.message, caught.value.field, caught.value.metadata.get("limit")) == (says, name, limit)
    assert not story.generation._watches


def test_watchers_are_counted_by_generation_and_not_by_sample() -> None:
    story = Story(16)
    contexts = [story.generation.watch(0, [0] * 16) for _ in range(MAX_WATCHES)]
    for context in contexts:
        context.__enter__()
    with pytest.raises(TooManyWatchers):
        story.generation.watch().__enter__()
    for context in contexts:
        context.__exit__(None, None, None)
    with story.generation.watch():
        pass


def test_samples_that_are_left_out_are_not_told_and_not_waited_for() -> None:
    async def body() -> None:
        story = Story(3)
        story.queue()
        for sample in range(3):
            story.say(sample, "x")
        story.end(1, EOS)
        with story.generation.watch(0, [1], [0, 2, 0]) as watch:
            news = await watch.next()
        assert (news.sample, news.token_ids, news.outcome, news.over) == (1, (1 << 16,), EOS, True)

    run(body())


# --- what it counts for -----------------------------------------------------------------------------------------------


def test_every_sample_counts_towards_what_is_kept() -> None:
    story = Story(4)
    assert story.generations.bytes == OVERHEAD_BYTES + 3 * SAMPLE_BYTES
    story.queue()
    before = story.generations.bytes
    for sample in range(4):
        for _ in range(50):
            story.say(sample, "\u706b")
    assert story.generations.bytes - before == 4 * 50 * (8 + 3) + CHOICE_BYTES
    choice = Choice(1, -1.0, 1, ((1, -1.0), (2, -2.0)))
    before = story.generations.bytes
    story.generation.push(Event("g", "", (1,), sample=3, logprobs=(choice,)))
    assert story.generations.bytes - before == 8 + CHOICE_BYTES + 2 * TOP_BYTES
    story.end_all()
    story.check()
    story.generations.delete("g")
    assert story.generations.bytes == 0


def test_samples_that_say_much_push_out_those_that_are_over() -> None:
    story = Story(4, RegistryLimits(memory=16 * OVERHEAD_BYTES))
    for at in range(4):
        other = story.generations.open(f"o{at}", b"", 1)
        other.push(Event(f"o{at}", outcome=LENGTH, sequence=Live(make_request(f"o{at}"), 1)))
    assert story.generations.retained == 4
    story.queue()
    for sample in range(4):
        for _ in range(1000):
            story.say(sample, "x")
        story.check()
    assert set(story.generations._known) == {"g", "o3"}  # it is live, and of the others the newest stays


def test_a_stopped_watcher_of_many_samples_holds_its_places_and_nothing_else() -> None:
    async def body() -> None:
        story = Story(16)
        story.queue()
        with story.generation.watch() as stopped:
            for sample in range(16):
                for _ in range(500):
                    story.say(sample, "y")
            assert len(stopped._at) == len(stopped._turns) == 16
            held = {
                name for name in vars(stopped) if name not in ("_generation", "_changed", "_bells", "_at", "_turns")
            }
            assert not held
            story.end_all()
            had = [0] * 16
            over = False
            while not over:
                news = await stopped.next()
                had[news.sample] += len(news.token_ids)
                over = news.over
            assert had == [500] * 16

    run(body())


def test_forgotten_while_one_sample_is_still_to_be_read() -> None:
    async def body() -> None:
        story = Story(2)
        story.queue()
        story.say(0, "x")
        story.say(1, "y")
        with story.generation.watch(0, [1, 0]) as behind, story.generation.watch(0, [1, 1]) as abreast:
            story.end_all()
            story.generations.delete("g")
            assert [(await abreast.next()).over for _ in range(2)] == [False, True]
            assert (await behind.next()).outcome == LENGTH
            with pytest.raises(RequestUnknown, match="deleted or expired at token 0 of 1 of sample 1"):
                await behind.next()

    run(body())


def test_what_it_says_of_itself() -> None:
    story = Story(3)
    story.queue()
    story.say(2, "x")
    assert repr(story.generation) == "<Generation g QUEUED: 1 tokens of 3 samples>"
    one: Generation = Story(1).generation
    assert repr(one) == "<Generation g QUEUED: 0 tokens>"
