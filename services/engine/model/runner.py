"""Executes a step: one forward pass over the scheduled chunks, then sampling for each chunk that needs a token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeAlias

import structlog

from kernels.sampling import reference
from kernels.sampling.launch import Batch, Drawn, Sampler, TokenCounts
from services.common.errors import ForwardFailed, GpuError, ServiceError
from services.engine.model.batch import Row
from services.engine.pages.source import PageCopy
from services.engine.sampling.params import Drawer, SamplingParams, batch, certain, choices_of, tokens_of
from services.engine.sampling.result import Choice, Computed, Draw, Result
from services.engine.scheduling.sequence import Sequence
from services.engine.scheduling.step import Chunk, Flight

log = structlog.get_logger()

_NOTHING = frozenset[int]()
_NO_ROWS = batch([], [])


class Forward(Protocol):
    """The part of a model that a step needs."""

    @property
    def logits_at_once(self) -> int:
        """The most states that `logits` should be called with at a time."""

    def forward(self, rows: Items[Row], pages: Any, drawn: Any = None) -> Any:
        """Write the rows' K and V to their pages. Returns the logits that the rows want, in order.

        ``drawn`` are the tokens of the step before, for rows that take them from there.
        """

    def states(self, rows: Items[Row], pages: Any, drawn: Any = None) -> Any:
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

    def next_token(self, sequence: Sequence, position: int) -> None:
        """Add a row that samples a sequence's next token, which will be at ``position``."""
        request = sequence.request
        stopping, params, generated = request.stopping, request.sampling, position - len(request.prompt)
        banned = params.suppressed if generated else params.begin_suppressed
        if generated < stopping.min_tokens:
            banned = banned | stopping.eos_token_ids | stopping.stop_token_ids
        self.params.append(params)
        self.positions.append(position)
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

    def batch(self) -> Batch:
        """Returns the sampler's input."""
        return batch(self.params, self.positions, self.counts, self.banned if any(self.banned) else None)

    def draws(self, drawn: Drawn) -> list[Draw]:
        """Returns what was drawn for each row."""
        # A token's random numbers depend only on the seed and its position, not on batch, chunk or attempt.
        if any(one.logprobs is not None for one in self.params):
            return [
                one.token if isinstance(one, Choice) and asked.logprobs is None else one
                for one, asked in zip(choices_of(drawn, self.params, self.positions), self.params, strict=True)
            ]
        return list[Draw](tokens_of(drawn, self.positions))

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
        self._queue = draw if isinstance(draw, Sampler) else None
        # On a host, the thread that computes the steps of `launch`, in order.
        self._worker: ThreadPoolExecutor | None = None
        self._last: _Flight | None = None  # the last step launched, while it is in flight

    def run(self, step: Items[Chunk]) -> list[Result]:
        """Returns a result per chunk: a sampled token, None if none was wanted, or the error that ends the request.

        No step may be in flight.
        """
        try:
            work = _Work.of(step)
            results = work.results(self._computed(work, self._memory(), None, self._drawn_now))
            self._finish()
            return results
        except Exception as failure:
            _log_failure(step, failure)
            self.synchronize()
            if len(step) > 1:
                return [result for chunk in step for result in self.run((chunk,))]
            return [ForwardFailed(f"the forward pass raised {type(failure).__name__}")]

    def launch(self, step: Items[Chunk]) -> Flight:
        """Queue a step after those in flight. Tokens sampled by the last of them are handed over on the device.

        On a host a thread computes it. The next step may be launched behind it unless sampling needs what the host does
        not know then: the token counts of a penalty. Nor may it while a prompt's log probabilities are collected, which
        are counted as they arrive.
        """
        last, self._last = self._last, None
        work = _Work.of(step)
        if self._queue is not None:
            flight = self._last = _Flight(self, work, last, self._queued(work, last, self._queue))
        else:
            for row in work.rows:
                row.pages = row.pages[:]  # the sequence's change meanwhile: a preemption empties them
            worker = self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="step")
            running = worker.submit(self._computed_behind, work, self._memory(), last)
            flight = self._last = _Flight(self, work, last, running.result)
        return flight

    def copy_pages(self, copies: Items[PageCopy]) -> None:
        """Copy each source page to its target, in order, after all steps in flight. Raises GpuError."""
        try:
            self._drain()
            for copy in copies:
                self._model.copy_page(self._memory(), copy.source, copy.target)
            self._finish()
        except Exception as failure:
            raise GpuError(f"pages could not be copied: {failure}") from failure

    def again(self, step: Items[Chunk]) -> list[Result]:
        """Run the chunks of a launched step that failed one by one, now that all their tokens are known."""
        self.synchronize()
        return [None if chunk.void else self.run((chunk,))[0] for chunk in step]

    def synchronize(self) -> None:
        """Wait until no step reads or writes a page. Raises GpuError."""
        self._drain()
        try:
            self._finish()
        except Exception as lost:
            # After a sticky GPU error every call fails: no row is at fault, and none can run.
            raise GpuError(f"the GPU failed: {lost}") from lost

    def landed(self, flight: _Flight) -> None:
        """Forget a step that was launched, and the requests that it knows."""
        if self._last is flight:
            self._last = None

    def _drain(self) -> None:
        if self._worker is not None:
            self._worker.submit(lambda: None).result()

    # --- computing ----------------------------------------------------------------------------------------------

    def _queued(self, work: _Work, last: _Flight | None, queue: Sampler) -> Callable[[], list[_Drawing]]:
        """Queue a step on the device. Returns its draws, none if it failed."""

        def draw(logits: Any, batch: Batch) -> tuple[Any, Callable[[], Drawn]]:
            pending = queue.start(logits, batch)
            return pending.out, pending.fetch()

        try:
            drawings = self._computed(work, self._memory(), last and last.drawn, draw)
            if not drawings:  # the step is over when a draw for no row is
                work.over = draw(None, _NO_ROWS)[1]
        except Exception as failure:
            # Not kept: its frames know the memory, which must go when its session does.
            _log_failure(work.step, failure)
            work.failed = True
            return list
        work.drawn = drawings[0].out if drawings else None
        return lambda: drawings

    def _computed_behind(self, work: _Work, memory: Any, last: _Flight | None) -> list[_Drawing]:
        """Compute a step on the host, in the worker's thread."""
        if last is not None and last.failed:
            work.failed = True
            return []
        try:
            drawings = self._computed(work, memory, last and last.drawn, self._drawn_now)
        except Exception as failure:
            _log_failure(work.step, failure)
            work.failed = True
            return []
        work.drawn = drawings[0].out if drawings else None
        return drawings

    def _computed(self, work: _Work, memory: Any, drawn: Any, draw: _Draws) -> list[_Drawing]:
        """Compute a step, ``drawn`` by the one before. Returns its draws, with those of forks after their leader's."""
        model, rows, asks = self._model, work.rows, work.asks
        more = () if drawn is None or not work.hands_over else (drawn,)
        if not work.telling:
            return self._drawings(model.forward(rows, memory, *more), asks, draw)
        states, most = model.states(rows, memory, *more), model.logits_at_once
        return [
            one
            for at in range(0, len(asks), most)
            for one in self._drawings(model.logits(states[at : at + most]), asks.part(at, at + most), draw)
        ]

    def _drawings(self, logits: Any, asks: _Asks, draw: _Draws) -> list[_Drawing]:
        if not asks.params:
            return []
        drawings = [_Drawing(asks, None, *draw(logits, asks.batch()))]
        for at, forks in asks.forks.items():
            for sequence in forks:
                one = _Asks()
                one.next_token(sequence, len(sequence.tokens))
                drawings.append(_Drawing(one, at, *draw(logits[at : at + 1], one.batch())))
        return drawings

    def _drawn_now(self, logits: Any, batch: Batch) -> tuple[Any, Callable[[], Drawn]]:
        drawn = self._draw(logits, batch)
        return drawn.tokens, lambda: drawn


#: Draws from logits: the drawn tokens, where they are, and a function that waits for the results.
_Draws: TypeAlias = Callable[[Any, Batch], tuple[Any, Callable[[], Drawn]]]


@dataclass(slots=True)
class _Drawing:
    """One draw: of consecutive rows of a step, or for a ``fork`` of the row with that number in the draw before."""

    asks: _Asks
    fork: int | None
    out: Any
    wait: Callable[[], Drawn]


@dataclass(slots=True)
class _Work:
    """A step as the model and the sampler take it. ``drawn`` has its tokens, on the device, once they are queued; if
    nothing is drawn, ``over`` waits for the step.
    """

    step: Items[Chunk]
    rows: list[Row]
    asks: _Asks
    telling: bool
    hands_over: bool
    drawn: Any = None
    over: Callable[[], Any] = lambda: None
    failed: bool = False

    @classmethod
    def of(cls, step: Items[Chunk]) -> _Work:
        rows, asks, telling, hands_over = list[Row](), _Asks(), False, False
        for chunk in step:
            sequence, start, wanted = chunk.sequence, chunk.start, int(chunk.samples)
            tokens: Items[int] = sequence.tokens[start : start + chunk.count]
            if not tokens:
                tokens, hands_over = (-1 - sequence.draw_row,), True
            if sequence.request.sampling.prompt_logprobs is not None:
                untold = _untold(chunk)
                asks.prompt(sequence, untold)
                wanted += untold
                telling |= untold > 0
            if chunk.samples:
                if sequence.forks and not sequence.num_generated_tokens:
                    asks.forks[len(asks)] = list(sequence.forks)
                sequence.draw_row = len(asks)
                asks.next_token(sequence, start + chunk.count)
            rows.append(Row(tokens, start, sequence.pages, wanted))
        return cls(step, rows, asks, telling, hands_over)

    def results(self, drawings: Items[_Drawing]) -> list[Result]:
        """Returns the results of the chunks, once the step is over."""
        self.over()
        drawn = list[tuple[Draw, ...]]()
        first = 0
        for drawing in drawings:
            found = drawing.asks.draws(drawing.wait())
            if drawing.fork is None:
                first = len(drawn)
                drawn += [(one,) for one in found]
            else:
                drawn[first + drawing.fork] += tuple(found)
        if len(drawn) == len(self.step) and not self.telling and not self.asks.forks:
            return [one for (one,) in drawn]
        every = iter(drawn)
        return [
            _result(chunk, list(islice(every, row.want_logits)))
            for chunk, row in zip(self.step, self.rows, strict=True)
        ]


class _Flight:
    """A step that was launched. ``before`` is the one launched before it, if that was in flight then."""

    def __init__(
        self, runner: Runner, work: _Work, before: _Flight | None, ready: Callable[[], list[_Drawing]]
    ) -> None:
        self._runner = runner
        self._work = work
        self._before = before
        self._ready = ready
        self.leads = not (work.failed or work.telling or any(work.asks.counts))

    @property
    def drawn(self) -> Any:
        """What it drew, on the device; row i of its draws at i."""
        return self._work.drawn

    @property
    def failed(self) -> bool:
        """Whether it could not be computed; steps launched after it are void."""
        return self._work.failed

    def wait(self) -> list[Result]:
        """See `step.Flight`. A step that could not be computed is run again, row by row. Raises GpuError."""
        self._runner.landed(self)
        work, before, self._before = self._work, self._before, None
        drawings, results = self._ready(), list[Result]()
        work.failed |= before is not None and before.failed
        if not work.failed:
            try:
                results = work.results(drawings)
            except Exception as failure:
                _log_failure(work.step, failure)
                work.failed = True
        if work.failed:
            self.leads = False
            results = self._runner.again(work.step)
        return results

    def discard(self) -> None:
        """See `step.Flight`. Raises GpuError."""
        self._before = None
        self._runner.landed(self)
        self._runner.synchronize()


def _log_failure(step: Items[Chunk], failure: Exception) -> None:
    log.error("forward_failed", rows=len(step), request_ids=[chunk.sequence.id for chunk in step], exc_info=failure)


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
