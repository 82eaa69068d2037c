"""Computes one step: the scheduled chunks as one forward pass, then one sample for each that wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import structlog

from kernels import sample_numpy
from kernels.sampling import TokenCounts
from services.engine.batch import Row
from services.engine.choice import Choice, Computed, Draw, Result
from services.engine.pagesource import PageCopy
from services.engine.sampling import Drawer, SamplingParams, certain, choose, sample
from services.engine.sequence import Sequence
from services.engine.step import Chunk
from services.errors import ForwardFailed, GpuError, ServiceError

log = structlog.get_logger()


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


@dataclass(frozen=True, slots=True)
class _Ask:
    """What is wanted of one row of logits: a draw, and one more for each sequence that is to go on from here too."""

    params: SamplingParams
    position: int
    counts: TokenCounts | None = None
    banned: frozenset[int] = frozenset()
    forks: tuple[_Ask, ...] = ()


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
        draw: Drawer = sample_numpy.sample,
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
        rows = [_row(chunk) for chunk in step]
        asks = [ask for chunk, row in zip(step, rows, strict=True) for ask in _asks(chunk, row.want_logits)]
        if all(row.want_logits <= 1 for row in rows):
            drawn = iter(self._drawn(self._model.forward(rows, self._memory()), asks))
        else:
            states, most = self._model.states(rows, self._memory()), self._model.logits_at_once
            drawn = (
                one
                for at in range(0, len(asks), most)
                for one in self._drawn(self._model.logits(states[at : at + most]), asks[at : at + most])
            )
        of_rows = [list(islice(drawn, row.want_logits)) for row in rows]
        return [_result(chunk, found) for chunk, found in zip(step, of_rows, strict=True)]

    def _drawn(self, logits: Any, asks: list[_Ask]) -> list[tuple[Draw, ...]]:
        if not asks:
            return []
        drawn: list[tuple[Draw, ...]] = [(one,) for one in self._of_rows(logits, asks)]
        for at, ask in enumerate(asks):
            if ask.forks:
                drawn[at] += tuple(self._of_rows(logits[at : at + 1], [fork])[0] for fork in ask.forks)
        return drawn

    def _of_rows(self, logits: Any, asks: list[_Ask]) -> list[Draw]:
        params = [ask.params for ask in asks]
        # A token's random numbers depend on the seed and its position alone, not on batch, chunk or attempt.
        positions = [ask.position for ask in asks]
        counts = [ask.counts for ask in asks]
        banned = [ask.banned for ask in asks] if any(ask.banned for ask in asks) else None
        if any(one.logprobs is not None for one in params):
            chosen = choose(logits, params, positions, counts, banned, self._draw)
            return [
                one.token if isinstance(one, Choice) and ask.params.logprobs is None else one
                for one, ask in zip(chosen, asks, strict=True)
            ]
        return list(sample(logits, params, positions, counts, banned, self._draw))


def _row(chunk: Chunk) -> Row:
    sequence = chunk.sequence
    return Row(
        tokens=sequence.tokens[chunk.start : chunk.start + chunk.count],
        start=chunk.start,
        pages=sequence.pages,
        want_logits=_untold(chunk) + chunk.samples,
    )


def _untold(chunk: Chunk) -> int:
    """Of how many of the prompt's tokens the chunk has the log probabilities that are still to be told."""
    request = chunk.sequence.request
    if request.sampling.prompt_logprobs is None:
        return 0
    # Whatever lies before the chunk was told when it was computed, perhaps for pages that were given up since.
    return max(0, min(chunk.start + chunk.count, len(request.prompt) - 1) - len(chunk.sequence.prompt_logprobs))


def _asks(chunk: Chunk, count: int) -> Iterator[_Ask]:
    sequence = chunk.sequence
    told = len(sequence.prompt_logprobs)
    for at in range(told + 1, told + 1 + count - chunk.samples):
        yield _Ask(certain(sequence.tokens[at], sequence.request.sampling.prompt_logprobs), at)
    if chunk.samples:
        first = not sequence.num_generated_tokens
        yield _ask(sequence, tuple(map(_ask, sequence.forks)) if first else ())


def _ask(sequence: Sequence, forks: tuple[_Ask, ...] = ()) -> _Ask:
    stopping, banned = sequence.request.stopping, frozenset[int]()
    if sequence.num_generated_tokens + 1 < stopping.min_tokens:
        banned = stopping.eos_token_ids | stopping.stop_token_ids
    return _Ask(sequence.request.sampling, sequence.num_tokens, _counts(sequence), banned, forks)


def _counts(sequence: Sequence) -> TokenCounts | None:
    """How often the sequence has which token, where its draw needs to know; kept whatever becomes of its pages."""
    if not sequence.request.sampling.counts_tokens:
        return None
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
