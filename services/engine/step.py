"""A step: which tokens of which requests are computed together, and how its budget of tokens is shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of a sequence from ``start`` on; ``samples`` when they are its last and the next is wanted."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


def share_out(running: Iterable[Sequence], budget: int, page_size: int) -> tuple[Chunk, ...]:
    """A step of at most ``budget`` tokens for those of ``running``, which are in order, that have pages to compute in.

    No prefill stalls a decoding request, nor the reverse: each that lacks one token has it, and the others share what
    is left. A budget that is not larger than the batch may leave some without a token: the last of those that decode.
    """
    ready: list[tuple[Sequence, int, int]] = []
    for sequence in running:
        if sequence.held:
            continue
        missing = sequence.num_tokens - sequence.num_computed_tokens
        want = min(missing, len(sequence.pages) * page_size - sequence.num_computed_tokens)
        if want > 0:
            ready.append((sequence, want, missing))
    decoding = sum(missing == 1 for _, _, missing in ready)
    chunks = []
    prefills = max(1, budget - decoding) if decoding < len(ready) else 0
    decodes = budget - prefills
    for sequence, want, missing in ready:
        if missing == 1:
            count = min(1, decodes)
            decodes -= count
        else:
            count = min(want, prefills)
            prefills -= count
        if count:
            chunks.append(Chunk(sequence, sequence.num_computed_tokens, count, samples=count == missing))
    return tuple(chunks)
