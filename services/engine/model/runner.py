"""Computes one step: the scheduled chunks as one forward pass, then one sample for each that wants it."""

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
        """Of how many tokens `logits` should be asked for at a time, at most."""

    def forward(self, rows: Items[Row], pages: Any) -> Any:
        """Write the rows' K and V into their pages; return the logits that they want, in order."""

    def states(self, rows: Items[Row], pages: Any) -> Any:
        """The same, but return what `logits` takes."""

    def logits(self, states: Any) -> Any:
        """Return the logits of consecutive states."""

    def copy_page(self, pages: Any, source: int, target: int) -> None:
        """Make a page equal to another."""


@dataclass(slots=True)
class _Asks:
    """What is wanted of rows of logits, one after another, as columns: how each is drawn from, the position that the
    token will have, what its request has so far, and what must not be drawn.

    ``forks`` are by row, of those from which one more is drawn for each sequence that is to go on from there too.
    """

    params: list[SamplingParams] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[TokenCounts | None] = field(default_factory=list)
    banned: list[frozenset[int]] = field(default_factory=list)
    forks: dict[int, list[Sequence]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.params)

    def next_token(self, sequence: Sequence) -> None:
        """Ask for what comes after a sequence's last token."""
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
        """Ask for the log probabilities of the next ``count`` tokens of a prompt."""
        first = len(sequence.prompt_logprobs) + 1
        for at in range(first, first + count):
            self.params.append(certain(sequence.tokens[at], sequence.request.sampling.prompt_logprobs))
            self.positions.append(at)
            self.counts.append(None)
            self.banned.append(_NOTHING)

    def part(self, first: int, end: int) -> _Asks:
        """Those of the rows ``first`` to ``end``."""
        cut = slice(first, end)
        forks = {at - first: one for at, one in self.forks.items() if first <= at < end}
        return _Asks(self.params[cut], self.positions[cut], self.counts[cut], self.banned[cut], forks)


class Runner:
    """Runs steps on a model and the memory that holds the pages.

    ``memory`` is asked at every step, since a session that was opened anew has another. A row that makes the forward
    pass raise is found by running the rows one by one; K and V are written again in place, so that changes nothing for
    the others. Only what computes failing as a whole is raised, as GpuError.
    """

    def __init__(
        self,
        model: Forward,
        memory: Callable[[], Any],
        draw: Drawer = reference.sample,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """``draw`` takes the model's logits. ``finish`` returns when nothing of a step is under way any more: pages are
        told of and given up only then.
        """
        self._model = model
        self._memory = memory
        self._draw = draw
        self._finish = finish

    def run(self, step: Items[Chunk]) -> list[Result]:
        """A result for each chunk: the token sampled, None when none was wanted, or the error that ends the request."""
        try:
            results = self._run(step)
            self._finish()
            return results
        except Exception as failure:
            log.exception("forward_failed", rows=len(step), request_ids=[chunk.sequence.id for chunk in step])
            try:
                self._finish()
            except Exception as lost:
                # A GPU that has failed once answers every call with an error: no row is at fault, and none can be run.
                raise GpuError(f"the GPU failed: {lost}") from failure
            if len(step) > 1:
                return [result for chunk in step for result in self.run((chunk,))]
            return [ForwardFailed(f"the forward pass raised {type(failure).__name__}")]

    def copy_pages(self, copies: Items[PageCopy]) -> None:
        """Make each target equal to its source, in order. No step is under way. Raises GpuError."""
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
        # A token's random numbers depend on the seed and its position alone, not on batch, chunk or attempt.
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
    """Of how many of the prompt's tokens the chunk has the log probabilities that are still to be told."""
    sequence = chunk.sequence
    # Whatever lies before the chunk was told when it was computed, perhaps for pages that were given up since.
    return max(0, min(chunk.start + chunk.count, len(sequence.request.prompt) - 1) - len(sequence.prompt_logprobs))


def _counts(sequence: Sequence) -> TokenCounts:
    """How often the sequence has which token; kept whatever becomes of its pages."""
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
