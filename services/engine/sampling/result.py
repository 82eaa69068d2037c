"""What a step says of a sequence: the tokens that were drawn for it, and how likely tokens were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.common.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Choice:
    """A token drawn, or one of a prompt.

    ``logprob`` and ``rank`` are of the logits as the model gave them, before temperature, penalties, biases and bans:
    the natural logarithm of the token's chance in their softmax, and 1 for the likeliest. ``top`` has the likeliest
    tokens, in this order, with their log probabilities. None and empty where the request did not ask.
    """

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


#: A token, as a Choice where its log probability was asked for; or why none could be drawn.
Draw: TypeAlias = int | Choice | ServiceError


@dataclass(frozen=True, slots=True)
class Computed:
    """All there is to say of a chunk that gave more than a token.

    ``prompt`` are the next of the prompt's tokens to be told of. ``drawn`` is the sequence's token, and behind it, when
    it was the first, one for each sequence that is to fork from it; empty when none was wanted.
    """

    prompt: tuple[Choice, ...] = ()
    drawn: tuple[Draw, ...] = ()


#: Of a chunk: what was drawn, more than that, or None when nothing was wanted. An error ends the request.
Result: TypeAlias = Draw | Computed | None
