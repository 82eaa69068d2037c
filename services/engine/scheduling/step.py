"""Composes a step: which tokens of which requests are computed together within the token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """``count`` tokens of a sequence from position ``start`` on. ``samples`` is set when they are the sequence's last
    tokens and the next one is to be sampled.

    Not frozen: a mutable dataclass takes a quarter of the time to create.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


def share_out(running: Iterable[Sequence], budget: int, page_size: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a step: at most ``budget`` tokens of ``running``, in order, for requests with room in their
    pages.

    Prefill does not stall decode, nor decode prefill: each decoding request gets its one token, and prefills share the
    rest. If the budget is not larger than the batch, the last decoding requests may get no token.
    """
    chunks, decoding, wanted = list[Chunk](), 0, 0
    for sequence in running:
        if (sequence.shares_tail or sequence.forks) and sequence.held:
            continue
        start = sequence.num_computed_tokens
        room = len(sequence.pages) * page_size - start
        if room <= 0:
            continue
        missing = len(sequence.tokens) - start
        if missing == 1:
            chunks.append(Chunk(sequence, start, 1, True))
            decoding += 1
            wanted += 1
        elif missing:
            count = min(missing, room)
            chunks.append(Chunk(sequence, start, count, count == missing))
            wanted += count
    return tuple(chunks if wanted <= budget else _cut(chunks, budget, decoding))


def _cut(chunks: list[Chunk], budget: int, decoding: int) -> list[Chunk]:
    """Split a budget that is smaller than what the chunks need; ``decoding`` of them are decoding requests."""
    prefills = max(1, budget - decoding) if decoding < len(chunks) else 0
    decodes = budget - prefills
    for chunk in chunks:
        want = chunk.count
        if len(chunk.sequence.tokens) - chunk.start == 1:
            chunk.count = min(1, decodes)
            decodes -= chunk.count
        else:
            chunk.count = min(want, prefills)
            prefills -= chunk.count
        chunk.samples &= chunk.count == want
    return [chunk for chunk in chunks if chunk.count]
