"""Executes a step: one forward pass over the scheduled chunks, then sampling for each chunk that needs a token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import structlog

from kernels.sampling import reference
from kernels.sampling.launch import TokenCounts
from services.common.errors import ForwardFailed, GpuError, ServiceError
from services.engine.model.batch import Row
from services.engine.pages.source import PageCopy
from services.engine.sampling.params import Drawer, SamplingParams, certain, choose, sample
from services.engine.sampling.result import Choice, Computed, Draw, Result
from services.engine.scheduling.sequence import Sequence
from services.engine.scheduling.step import Chunk

log = structlog.get_logger()

_NOTHING = frozenset[int]()


class Forward(Protocol):
    """The part of a model that a step needs."""

    @property
    def logits_at_once(self) -> int:
        """The most states that `logits` should be called with at a time."""

    def forward(self, rows: Items[Row], pages: Any) -> Any:
        """Write the rows' K and V to their pages. Returns the logits that the rows want, in order."""

    def states(self, rows: Items[Row], pages: Any) -> Any:
        """Like `forward`, but returns the hidden states that `logits` takes."""

    def logits(self, states: Any) -> Any:
        """Returns the logits of consecutive states."""

    def copy_page(self, pages: Any, source: int, target: int) -> None:
        """Copy page ``source`` to page ``target``."""


@dataclass(slots=True)
class _Asks:
    """The sampling inputs of consecutive rows of logits, as columns: parameters, the position of the token to be
    sampled, the request's token counts, and banned tokens.

    ``forks`` maps a row to the sequences that fork there: one more token is sampled for each of them.
    """

    params: list[SamplingParams] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[TokenCounts | None] = field(default_factory=list)
    banned: list[frozenset[int]] = field(default_factory=list)
    forks: dict[int, list[Sequence]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.params)

    def next_token(self, sequence: Sequence) -> None:
        """Add a row that samples a sequence's next token."""
        request = sequence.request
        stopping, params = request.stopping, request.sampling
        banned = params.suppressed if sequence.num_generated_tokens else params.begin_suppressed
        if sequence.num_generated_tokens < stopping.min_tokens:
            banned = banned | stopping.eos_token_ids | stopping.stop_token_ids
        self.params.append(params)
        self.positions.append(len(sequence.tokens))
        self.counts.append(_counts(sequence) if params.counts_tokens else None)
        self.banned.append(banned)

    def prompt(self, sequence: Sequence, count: int) -> None:
        """Add rows for the log probabilities of the next ``count`` tokens of a prompt."""
        first = len(sequence.prompt_logprobs) + 1
        for at in range(first, first + count):
            self.params.append(certain(sequence.tokens[at], sequence.request.sampling.prompt_logprobs))
            self.positions.append(at)
            self.counts.append(None)
            self.banned.append(_NOTHING)

    def part(self, first: int, end: int) -> _Asks:
        """Returns the rows ``first`` to ``end``, ``end`` excluded."""
        cut = slice(first, end)
        forks = {at - first: one for at, one in self.forks.items() if first <= at < end}
        return _Asks(self.params[cut], self.positions[cut], self.counts[cut], self.banned[cut], forks)


class Runner:
    """Runs steps on a model and the memory that holds the pages.

    ``memory`` is called at every step, because a new session maps different memory. If the forward pass raises, the
    rows are run one by one to find the row at fault; rewriting the same K and V in place does not affect the others.
    Raises GpuError only when the device itself has failed.
    """

    def __init__(
        self,
        model: Forward,
        memory: Callable[[], Any],
        draw: Drawer = reference.sample,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """``draw`` samples from the model's logits. ``finish`` synchronizes: pages are reported and released only after
        it returns.
        """
        self._model = model
        self._memory = memory
        self._draw = draw
        self._finish = finish

    def run(self, step: Items[Chunk]) -> list[Result]:
        """Returns a result per chunk: a sampled token, None if none was wanted, or the error that ends the request."""
        try:
            results = self._run(step)
            self._finish()
            return results
        except Exception as failure:
            log.exception("forward_failed", rows=len(step), request_ids=[chunk.sequence.id for chunk in step])
            try:
                self._finish()
            except Exception as lost:
                # After a sticky GPU error every call fails: no row is at fault, and none can run.
                raise GpuError(f"the GPU failed: {lost}") from failure
            if len(step) > 1:
                return [result for chunk in step for result in self.run((chunk,))]
            return [ForwardFailed(f"the forward pass raised {type(failure).__name__}")]

    def copy_pages(self, copies: Items[PageCopy]) -> None:
        """Copy each source page to its target, in order. No step may be in flight. Raises GpuError."""
        try:
            for copy in copies:
                self._model.copy_page(self._memory(), copy.source, copy.target)
            self._finish()
        except Exception as failure:
            raise GpuError(f"pages could not be copied: {failure}") from failure

    def _run(self, step: Items[Chunk]) -> list[Result]:
        rows, asks, telling = list[Row](), _Asks(), False
        for chunk in step:
            sequence, start, wanted = chunk.sequence, chunk.start, int(chunk.samples)
            if sequence.request.sampling.prompt_logprobs is not None:
                untold = _untold(chunk)
                asks.prompt(sequence, untold)
                wanted += untold
                telling |= untold > 0
            if chunk.samples:
                if sequence.forks and not sequence.num_generated_tokens:
                    asks.forks[len(asks)] = sequence.forks
                asks.next_token(sequence)
            rows.append(Row(sequence.tokens[start : start + chunk.count], start, sequence.pages, wanted))
        if telling:
            states, most = self._model.states(rows, self._memory()), self._model.logits_at_once
            drawn = [
                one
                for at in range(0, len(asks), most)
                for one in self._drawn(self._model.logits(states[at : at + most]), asks.part(at, at + most))
            ]
        else:
            drawn = self._drawn(self._model.forward(rows, self._memory()), asks)
        if len(drawn) == len(step) and not telling and not asks.forks:
            return [one for (one,) in drawn]
        found = iter(drawn)
        return [_result(chunk, list(islice(found, row.want_logits))) for chunk, row in zip(step, rows, strict=True)]

    def _drawn(self, logits: Any, asks: _Asks) -> list[tuple[Draw, ...]]:
        if not asks.params:
            return []
        drawn: list[tuple[Draw, ...]] = [(one,) for one in self._of_rows(logits, asks)]
        for at, forks in asks.forks.items():
            for sequence in forks:
                one = _Asks()
                one.next_token(sequence)
                drawn[at] += tuple(self._of_rows(logits[at : at + 1], one))
        return drawn

    def _of_rows(self, logits: Any, asks: _Asks) -> list[Draw]:
        # A token's random numbers depend only on the seed and its position, not on batch, chunk or attempt.
        params, positions, counts = asks.params, asks.positions, asks.counts
        banned = asks.banned if any(asks.banned) else None
        if any(one.logprobs is not None for one in params):
            chosen = choose(logits, params, positions, counts, banned, self._draw)
            return [
                one.token if isinstance(one, Choice) and asked.logprobs is None else one
                for one, asked in zip(chosen, params, strict=True)
            ]
        return list[Draw](sample(logits, params, positions, counts, banned, self._draw))


def _untold(chunk: Chunk) -> int:
    """Returns how many prompt tokens get their log probabilities from this chunk for the first time."""
    sequence = chunk.sequence
    # Those before the chunk were returned when they were computed, perhaps before a preemption.
    return max(0, min(chunk.start + chunk.count, len(sequence.request.prompt) - 1) - len(sequence.prompt_logprobs))


def _counts(sequence: Sequence) -> TokenCounts:
    """Returns the sequence's token counts, up to date. They survive the loss of its pages."""
    prompt, counts = sequence.request.prompt, sequence.counts
    if counts is None:
        counts = sequence.counts = TokenCounts(prompt)
    for token in sequence.tokens[len(prompt) + counts.output :]:
        counts.add(token)
    return counts


def _result(chunk: Chunk, found: list[tuple[Draw, ...]]) -> Result:
    if not found:
        return None
    drawn = found.pop() if chunk.samples else ()
    prompt = []
    for (one,) in found:
        if isinstance(one, ServiceError):
            return one
        prompt.append(one if isinstance(one, Choice) else Choice(one))
    return drawn[0] if not prompt and len(drawn) == 1 else Computed(tuple(prompt), drawn)
