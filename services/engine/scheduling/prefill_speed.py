"""How fast the engine prefills."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from services.engine.scheduling.step import Chunk

#: Steps that count: the last ``STEPS`` with at least ``LEAST_TOKENS`` tokens of prompts. A step of fewer tokens takes
#: about as long as one of none, and says nothing of how long many would take.
STEPS = 32
LEAST_TOKENS = 64


class PrefillSpeed:
    """Prompt tokens computed per second, of recent steps. What else a step computes counts into its time: a request
    that waits to be prefilled is computed beside that, too.

    Written by the engine's thread only; any thread may read.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS)
        self._tokens_per_s = 0.0

    def step(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Record a step that took ``seconds``."""
        tokens = sum(chunk.count for chunk in chunks if chunk.count > 1)
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._steps.append((tokens, seconds))
            self._tokens_per_s = sum(count for count, _ in self._steps) / sum(took for _, took in self._steps)

    def tokens_per_s(self) -> float:
        """Returns tokens per second; 0 before the first step that counts."""
        return self._tokens_per_s
