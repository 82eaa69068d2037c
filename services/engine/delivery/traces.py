"""A sampled request's trace. Its stages are known once it has ended, so its spans are begun and ended then: tracing
takes no time from a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from services.common.tracing.span import Span, Value
from services.engine.delivery.streams import Listener
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import Outcome, Request, Sequence


def traced(
    request: Request, listener: Listener, call: Span, name: str, attributes: Mapping[str, Value]
) -> tuple[Request, Listener]:
    """A request and its listener, with a span of the request within its call's, which carries ``attributes``."""
    span = call.child(name, at=request.submitted_at, attributes=attributes)
    others = tuple(dataclasses.replace(other, trace=span) for other in request.others)
    return dataclasses.replace(request, trace=span, others=others), _TracedListener(listener, span, 1 + len(others))


class _TracedListener:
    """Passes events on, and ends the request's span after the last."""

    def __init__(self, listener: Listener, span: Span, samples: int) -> None:
        self._listener, self._span, self._live = listener, span, samples
        self._sequences: list[Sequence] = []
        self._error = ""

    def push(self, event: Event) -> None:
        """Receive the next event."""
        self._listener.push(event)
        if event.outcome is None:
            return
        self._error = self._error or _error(event.outcome)
        if event.sequence is None:  # refused, all samples at once
            self._span.end(error=self._error)
            return
        self._sequences.append(event.sequence)
        self._live -= 1
        if not self._live:
            self._end()

    def _end(self) -> None:
        for sequence in self._sequences:
            self._stages(sequence)
        first = min(self._sequences, key=lambda sequence: sequence.request.sample)
        usages = [sequence.usage for sequence in self._sequences]
        attributes: dict[str, Value] = {
            "gen_ai.usage.input_tokens": usages[0].prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": first.cached_tokens,
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            "gen_ai.response.finish_reasons": [_reason(sequence.outcome) for sequence in self._sequences],
            "rocmforge.preemptions": sum(usage.preemptions for usage in usages),
        }
        first_s = [usage.first_token_s for usage in usages if usage.first_token_s is not None]
        if first_s:
            attributes["gen_ai.response.time_to_first_chunk"] = min(first_s)
        self._span.set(attributes)
        self._span.end(error=self._error)

    def _stages(self, sequence: Sequence) -> None:
        """From one time to the next, as far as it came. The prompt of several samples is computed once."""
        request, ended, sample = sequence.request, sequence.finished_at, sequence.request.sample
        error = _error(sequence.outcome)
        stages = [
            ("queue", request.submitted_at),
            ("prefill", sequence.admitted_at),
            ("decode", sequence.first_token_at),
        ]
        if sample:
            stages = stages[-1:]
        reached = [(name, at) for name, at in stages if at is not None]
        # It holds its pages until the daemon has them back; then its caller hears of the end.
        ends = [*(at for _, at in reached[1:]), ended]
        for (name, began), over in zip(reached, ends, strict=True):
            last = name == reached[-1][0]
            attributes: dict[str, Value] = {"rocmforge.sample": sample} if sample else {}
            if name == "decode":
                attributes["gen_ai.usage.output_tokens"] = sequence.num_generated_tokens
            if name == "prefill":
                attributes["gen_ai.usage.cache_read.input_tokens"] = sequence.cached_tokens
            self._span.child(name, at=began, attributes=attributes).end(over, error=error if last else "")
        if ended is not None:
            self._span.child("release", at=ended).end()


def _error(outcome: Outcome | None) -> str:
    if outcome is None or outcome.error is None:
        return ""
    return outcome.error.reason


def _reason(outcome: Outcome | None) -> str:
    if outcome is None or outcome.reason is None:
        return "error"
    return outcome.reason.name.lower()
