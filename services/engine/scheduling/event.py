"""What the engine's thread has to say of a request."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.sampling.result import Choice
from services.engine.scheduling.sequence import Outcome, Sequence


@dataclass(slots=True)
class Event:
    """News of one request: first its ``sequence`` alone, once it is queued; then text and tokens; last, how it ended.

    A request that is refused has one event, its ``outcome`` without a ``sequence``. Of several samples each has its own
    text, tokens and end. ``logprobs`` are of ``token_ids``, one for each, or none; ``prompt_logprobs`` of the prompt's
    tokens but the first, and come with the first token.

    Nobody changes one. It is not frozen because each token has its own, and a frozen one takes three times as long to
    make.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    outcome: Outcome | None = None
    sequence: Sequence | None = None
    sample: int = 0
    logprobs: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[Choice, ...] = ()
