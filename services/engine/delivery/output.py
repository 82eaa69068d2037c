"""The output of one sample of a submitted request so far, by token."""

from __future__ import annotations

from array import array

from services.engine.sampling.result import Choice
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import Outcome, Sequence, Usage

#: Bytes accounted for a token's log probability, and for each of the top tokens returned with it.
CHOICE_BYTES, TOP_BYTES = 160, 120


class Output:
    """Owned by the asyncio loop.

    Text belongs to the token that released it. The text of tokens k and later starts where the text of the tokens
    before k ends, so a reader can resume at any token without a gap or a repetition.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.outcome: Outcome | None = None
        self._token_ids = array("I")
        self._text = bytearray()  # UTF-8
        self._ends = array("I")  # the byte offset where each token's text ends
        self._logprobs: list[Choice] = []  # one per token, if requested
        self._prompt_logprobs: tuple[Choice, ...] = ()
        self._choice_bytes = 0
        self._sequence: Sequence | None = None  # only while it is live: its prompt is not kept
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        """Its usage so far; None before it is queued."""
        return self._sequence.usage if self._sequence is not None else self._usage

    @property
    def size(self) -> int:
        """Bytes accounted for its output."""
        return len(self._text) + 8 * len(self._token_ids) + self._choice_bytes

    @property
    def prompt_logprobs(self) -> tuple[Choice, ...]:
        """Log probabilities of the prompt's tokens except the first, if requested; the first sample's output has them,
        from its first token on.
        """
        return self._prompt_logprobs

    def queued(self, sequence: Sequence) -> None:
        """Take the usage from ``sequence`` until the sample ends."""
        self._sequence = sequence

    def push(self, event: Event) -> None:
        """Apply the next event with text and tokens, or with the outcome."""
        if event.token_ids:
            self._token_ids.extend(event.token_ids)
            self._text += event.text.encode()
            self._ends.extend([len(self._text)] * len(event.token_ids))
            self.num_tokens = len(self._token_ids)
            self._logprobs.extend(event.logprobs)
            self._prompt_logprobs += event.prompt_logprobs
            choices = (*event.logprobs, *event.prompt_logprobs)
            self._choice_bytes += sum(CHOICE_BYTES + TOP_BYTES * len(choice.top) for choice in choices)
        if event.outcome is not None:
            self.outcome, self._sequence = event.outcome, None
            self._usage = event.sequence.usage if event.sequence is not None else None

    def read(self, start: int, end: int) -> tuple[str, tuple[int, ...]]:
        """Returns the text and the ids of tokens ``start`` to ``end``, ``end`` excluded."""
        first = self._ends[start - 1] if start else 0
        last = self._ends[end - 1] if end else 0
        return self._text[first:last].decode(), tuple(self._token_ids[start:end])

    def logprobs(self, start: int, end: int) -> tuple[Choice, ...]:
        """Returns the log probabilities of tokens ``start`` to ``end``, ``end`` excluded; none unless requested."""
        return tuple(self._logprobs[start:end])

    def forget(self) -> None:
        """Drop the output; the token count, outcome and usage stay."""
        self._token_ids, self._text, self._ends = array("I"), bytearray(), array("I")
        self._logprobs, self._prompt_logprobs, self._choice_bytes = [], (), 0
