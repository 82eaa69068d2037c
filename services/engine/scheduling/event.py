"""Events of a request, sent by the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.sampling.result import Choice
from services.engine.scheduling.sequence import Outcome, Sequence


@dataclass(slots=True)
class Event:
    """An event of one request. The first carries only the ``sequence``, once it is queued; later ones carry text and
    tokens; the last carries the ``outcome``.

    A refused request has a single event: its ``outcome``, without a ``sequence``. Each of several samples has its own
    text, tokens and outcome. ``logprobs`` has one entry per token id, or none; ``prompt_logprobs`` covers the prompt's
    tokens except the first, and comes with the first generated token.

    Treat it as immutable. It is not frozen because one is created per token, and a frozen dataclass takes three times
    as long to create.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    outcome: Outcome | None = None
    sequence: Sequence | None = None
    sample: int = 0
    logprobs: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[Choice, ...] = ()
