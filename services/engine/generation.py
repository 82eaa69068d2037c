"""One submitted request: everything it has said so far, for any number of watchers from any token on."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.engine.choice import Choice
from services.engine.loop import Event
from services.engine.sequence import Outcome, Sequence, Usage
from services.engine.streams import News
from services.errors import FieldInvalid, RequestUnknown, ServiceError, TooManyWatchers

#: What a generation without output counts for, in bytes: its objects, and its entries in the registry.
OVERHEAD_BYTES = 2048
#: What a token's log probability counts for, and each of the likeliest tokens told with it.
CHOICE_BYTES, TOP_BYTES = 160, 120
#: Watchers at a time, each of which is an open call.
MAX_WATCHES = 64
#: Tokens that a watcher is handed at a time at most, so that no replay makes a message too large.
REPLAY_TOKENS = 4096


class GenerationState(enum.Enum):
    """QUEUED -> RUNNING -> DONE or FAILED. A cancelled one is DONE: its outcome says so."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Generation:
    """Owned by the asyncio loop. ``fingerprint`` tells what was asked, so that asking again can be recognised.

    Text comes with the token that released it: the text of the tokens from the k-th on begins where the text that came
    with those before it ends, so that what a watcher saw and a replay from there on are the whole, wherever it stopped.
    """

    def __init__(
        self,
        request_id: str,
        fingerprint: bytes,
        seed: int,
        retention_s: float,
        on_change: Callable[[Generation, int], None],
    ) -> None:
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.seed = seed
        self.retention_s = retention_s
        self.num_tokens = 0
        self.outcome: Outcome | None = None
        self.forgotten = False
        self._on_change = on_change  # is told by how many bytes it grew
        self._token_ids = array("I")
        self._text = bytearray()  # UTF-8
        self._ends = array("I")  # where the text that came with each token ends, in bytes
        self._logprobs: list[Choice] = []  # of each token, if they were asked for
        self._prompt_logprobs: tuple[Choice, ...] = ()
        self._choice_bytes = 0
        self._sequence: Sequence | None = None  # while it is live: its prompt is not kept
        self._usage: Usage | None = None
        self._answered = asyncio.Event()
        self._watches: set[Watch] = set()

    def __repr__(self) -> str:
        return f"<Generation {self.request_id} {self.state.name}: {self.num_tokens} tokens>"

    @property
    def state(self) -> GenerationState:
        """How far it is."""
        if self.outcome is not None:
            return GenerationState.DONE if self.outcome.error is None else GenerationState.FAILED
        admitted = self._sequence is not None and self._sequence.admitted_at is not None
        return GenerationState.RUNNING if admitted else GenerationState.QUEUED

    @property
    def usage(self) -> Usage | None:
        """What it took so far; None before it is queued."""
        return self._sequence.usage if self._sequence is not None else self._usage

    @property
    def refusal(self) -> ServiceError | None:
        """Why it was never queued."""
        return self.outcome.error if self.outcome is not None and self._usage is None else None

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return OVERHEAD_BYTES + len(self._text) + 8 * len(self._token_ids) + self._choice_bytes

    @property
    def prompt_logprobs(self) -> tuple[Choice, ...]:
        """Of the prompt's tokens but the first, once there is a token, if they were asked for."""
        return self._prompt_logprobs

    def push(self, event: Event) -> None:
        """Take the next event."""
        before = self.size
        if event.sequence is not None:
            self._sequence = event.sequence
        if event.token_ids:
            self._token_ids.extend(event.token_ids)
            self._text += event.text.encode()
            self._ends.extend([len(self._text)] * len(event.token_ids))
            self.num_tokens = len(self._token_ids)
            self._logprobs.extend(event.logprobs)
            self._prompt_logprobs += event.prompt_logprobs
            told = (*event.logprobs, *event.prompt_logprobs)
            self._choice_bytes += sum(CHOICE_BYTES + TOP_BYTES * len(choice.top) for choice in told)
        if event.outcome is not None:
            self.outcome, self._usage, self._sequence = event.outcome, self.usage, None
        self._answered.set()
        self._on_change(self, self.size - before)
        self._wake()

    async def accepted(self) -> None:
        """Wait until it is queued. Raises what it was refused with."""
        await self._answered.wait()
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)

    def read(self, start: int, end: int) -> tuple[str, tuple[int, ...]]:
        """Tokens ``start`` to ``end``, and the text that came with them."""
        first = self._ends[start - 1] if start else 0
        last = self._ends[end - 1] if end else 0
        return self._text[first:last].decode(), tuple(self._token_ids[start:end])

    def logprobs(self, start: int, end: int) -> tuple[Choice, ...]:
        """The log probabilities of tokens ``start`` to ``end``; none if they were not asked for."""
        return tuple(self._logprobs[start:end])

    @contextmanager
    def watch(self, from_token: int) -> Iterator[Watch]:
        """Read it from a token on, while the context lasts.

        Raises FieldInvalid when it has fewer tokens, and TooManyWatchers.
        """
        if from_token > self.num_tokens:
            raise FieldInvalid(
                f"from_token is {from_token} and there are {self.num_tokens} tokens so far",
                field="from_token",
                limit=self.num_tokens,
            )
        if len(self._watches) >= MAX_WATCHES:
            raise TooManyWatchers(f"{self.request_id!r} has {MAX_WATCHES} watchers, the limit", limit=MAX_WATCHES)
        watch = Watch(self, from_token)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def forget(self) -> None:
        """Let its output go, whoever is reading it."""
        self.forgotten = True
        self._token_ids, self._text, self._ends = array("I"), bytearray(), array("I")
        self._logprobs, self._prompt_logprobs, self._choice_bytes = [], (), 0
        self._wake()

    def _wake(self) -> None:
        for watch in self._watches:
            watch.wake()


class Watch:
    """One reader's place in a generation. It holds no output, so one that stops reading costs nothing."""

    def __init__(self, generation: Generation, at: int) -> None:
        self._generation = generation
        self._at = at
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """There is something new."""
        self._changed.set()

    async def next(self) -> News:
        """Wait for news and take them: the next tokens, or how it ended, or both.

        Raises RequestUnknown when the generation was forgotten before all of it was read.
        """
        generation = self._generation
        while self._at == generation.num_tokens and generation.outcome is None:
            self._changed.clear()
            await self._changed.wait()
        end = min(generation.num_tokens, self._at + REPLAY_TOKENS)
        if generation.forgotten and self._at < end:
            raise RequestUnknown(
                f"{generation.request_id!r} was forgotten while token {self._at} of {generation.num_tokens} was read",
                field="request_id",
            )
        text, token_ids = ("", ()) if self._at == end else generation.read(self._at, end)
        logprobs = generation.logprobs(self._at, end)
        prompt = generation.prompt_logprobs if self._at == 0 < end else ()
        self._at = end
        if end < generation.num_tokens or generation.outcome is None:
            return News(text, token_ids, logprobs=logprobs, prompt_logprobs=prompt)
        outcome, usage = generation.outcome, generation.usage
        return News(text, token_ids, outcome, usage, logprobs=logprobs, prompt_logprobs=prompt, over=True)
