"""The results of a step: sampled tokens and log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.common.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, or a prompt token.

    ``logprob`` and ``rank`` refer to the model's raw logits, before temperature, penalties, biases and bans: the
    natural logarithm of the token's softmax probability, and its rank, 1 for the likeliest. ``top`` has the likeliest
    tokens in descending order, with their log probabilities. None and empty unless requested.
    """

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


#: A token, as a Choice if log probabilities were requested; or the error that prevented sampling.
Draw: TypeAlias = int | Choice | ServiceError


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a chunk with more than one token.

    ``prompt`` has the next prompt tokens with log probabilities. ``drawn`` has the sequence's token, followed by one
    for each fork if it was the first; empty when no token was wanted.
    """

    prompt: tuple[Choice, ...] = ()
    drawn: tuple[Draw, ...] = ()


#: A chunk's result: a draw, a Computed, or None when nothing was wanted. An error ends the request.
Result: TypeAlias = Draw | Computed | None
