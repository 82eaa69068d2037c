"""The requests that wait to run, in their order: as they came, moved by their priority."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import islice

from services.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Knows how many tokens wait, which a request's computation begins with: its prompt, and what it generated before
    it lost its pages. A sequence gains no tokens while it is in here.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where it belongs."""
        bisect.insort(self._sequences, sequence, key=_order)
        self.tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is in here."""
        del self._sequences[bisect.bisect_left(self._sequences, sequence.order, key=_order)]
        self.tokens -= sequence.num_tokens

    def tokens_behind(self, count: int) -> int:
        """Tokens of all but the first ``count``."""
        return self.tokens - sum(sequence.num_tokens for sequence in islice(self._sequences, count))


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
