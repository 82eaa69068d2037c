"""A step: which tokens of which requests are computed together, and how its budget of tokens is shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """``count`` tokens of a sequence from ``start`` on; ``samples`` when they are its last and the next is wanted.

    Not frozen, as a row's records are not: to make one takes a quarter of the time.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


def share_out(running: Iterable[Sequence], budget: int, page_size: int) -> tuple[Chunk, ...]:
    """A step of at most ``budget`` tokens for those of ``running``, which are in order, that have pages to compute in.

    No prefill stalls a decoding request, nor the reverse: each that lacks one token has it, and the others share what
    is left. A budget that is not larger than the batch may leave some without a token: the last of those that decode.
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
    """Share out a budget that is less than the chunks want; ``decoding`` of them are of one that lacks one token."""
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
