"""The queue of waiting requests, ordered by arrival and priority."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import islice

from services.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Waiting sequences by `Sequence.order`. ``tokens`` is the total they have to compute: their prompts, and what they
    generated before they lost their pages. A sequence gains no tokens while it waits.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        bisect.insort(self._sequences, sequence, key=_order)
        self.tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        del self._sequences[bisect.bisect_left(self._sequences, sequence.order, key=_order)]
        self.tokens -= sequence.num_tokens

    def tokens_behind(self, count: int) -> int:
        """Returns the tokens of all sequences but the first ``count``."""
        return self.tokens - sum(sequence.num_tokens for sequence in islice(self._sequences, count))


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
