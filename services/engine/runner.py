"""Computes one step: the scheduled chunks as one forward pass, then one sample for each that wants it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Protocol

import structlog

from services.engine.batch import Row
from services.engine.sampling import sample
from services.engine.scheduler import Chunk
from services.errors import ForwardFailed, GpuError, ServiceError

log = structlog.get_logger()


class Forward(Protocol):
    """The part of a model that a step needs."""

    def forward(self, rows: Items[Row], pages: Any) -> Any:
        """Write the rows' K and V into their pages; return the logits of the rows that want them, in order."""


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
        sampler: Callable[..., Any] = sample,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """``finish`` returns when nothing of a step is under way any more: pages are told of and given up only then."""
        self._model = model
        self._memory = memory
        self._sampler = sampler
        self._finish = finish

    def run(self, step: Items[Chunk]) -> list[int | ServiceError | None]:
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

    def _run(self, step: Items[Chunk]) -> list[int | ServiceError | None]:
        logits = self._model.forward([self._row(chunk) for chunk in step], self._memory())
        sampling = [chunk.sequence for chunk in step if chunk.samples]
        if not sampling:
            return [None] * len(step)
        # A token's random numbers depend on the seed and its position alone, not on batch, chunk or attempt.
        drawn = iter(self._sampler(logits, [s.request.sampling for s in sampling], [s.num_tokens for s in sampling]))
        return [next(drawn) if chunk.samples else None for chunk in step]

    @staticmethod
    def _row(chunk: Chunk) -> Row:
        sequence = chunk.sequence
        return Row(
            tokens=sequence.tokens[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            pages=sequence.pages,
            want_logits=chunk.samples,
        )
