"""What one sample of a submitted request has said so far, and what came with each token."""

from __future__ import annotations

from array import array

from services.engine.sampling.result import Choice
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import Outcome, Sequence, Usage

#: What a token's log probability counts for, in bytes, and each of the likeliest tokens told with it.
CHOICE_BYTES, TOP_BYTES = 160, 120


class Output:
    """Owned by the asyncio loop.

    Text comes with the token that released it: the text of the tokens from the k-th on begins where the text that came
    with those before it ends, so that what a reader saw and a replay from there on are the whole, wherever it stopped.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.outcome: Outcome | None = None
        self._token_ids = array("I")
        self._text = bytearray()  # UTF-8
        self._ends = array("I")  # where the text that came with each token ends, in bytes
        self._logprobs: list[Choice] = []  # of each token, if they were asked for
        self._prompt_logprobs: tuple[Choice, ...] = ()
        self._choice_bytes = 0
        self._sequence: Sequence | None = None  # while it is live: its prompt is not kept
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        """What it took so far; None before it is queued."""
        return self._sequence.usage if self._sequence is not None else self._usage

    @property
    def size(self) -> int:
        """Bytes that what it said counts for."""
        return len(self._text) + 8 * len(self._token_ids) + self._choice_bytes

    @property
    def prompt_logprobs(self) -> tuple[Choice, ...]:
        """Of the prompt's tokens but the first, once there is a token, if they were asked for and it tells them."""
        return self._prompt_logprobs

    def queued(self, sequence: Sequence) -> None:
        """Its usage is its sequence's from here on, until it ends."""
        self._sequence = sequence

    def push(self, event: Event) -> None:
        """Take the next event with text and tokens, or with its end."""
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
            self.outcome, self._sequence = event.outcome, None
            self._usage = event.sequence.usage if event.sequence is not None else None

    def read(self, start: int, end: int) -> tuple[str, tuple[int, ...]]:
        """Tokens ``start`` to ``end``, and the text that came with them."""
        first = self._ends[start - 1] if start else 0
        last = self._ends[end - 1] if end else 0
        return self._text[first:last].decode(), tuple(self._token_ids[start:end])

    def logprobs(self, start: int, end: int) -> tuple[Choice, ...]:
        """The log probabilities of tokens ``start`` to ``end``; none if they were not asked for."""
        return tuple(self._logprobs[start:end])

    def forget(self) -> None:
        """Let what it said go; how much that was, how it ended and what it took stay."""
        self._token_ids, self._text, self._ends = array("I"), bytearray(), array("I")
        self._logprobs, self._prompt_logprobs, self._choice_bytes = [], (), 0
