"""What a run sends, and when: both follow from a seed, whoever computes them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve import trace
from benchmarks.serve.trace import Scaled


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a run. ``rate`` is in requests per second; without one, the first ``burst`` are due at once.

    ``salt`` keeps a run from finding what an earlier one left in the prefix cache.
    """

    rate: float | None
    seconds: float
    burst: int
    seed: int
    divisor: int
    output_divisor: int
    context: int
    vocab_size: int
    salt: str
    trace: str = ""

    def requests(self) -> list[tuple[float, Scaled]]:
        """Every request, and when it is due, in seconds from the start.

        Raises ValueError if the trace has fewer requests, or a line that is not one.
        """
        due = [0.0] * self.burst if self.rate is None else list(arrivals(self.rate, self.seconds, self.seed))
        traced = trace.read(Path(self.trace)) if self.trace else trace.invented(len(due), self.seed)
        if len(traced) < len(due):
            raise ValueError(f"{self.trace} has {len(traced)} requests; {len(due)} are due in {self.seconds:g} s")
        sent = trace.scaled(
            traced[: len(due)], self.divisor, self.output_divisor, self.context, self.vocab_size, self.seed
        )
        return list(zip(due, sent, strict=True))

    def at(self, rate: float | None, salt: str) -> Plan:
        """The same with another rate and salt."""
        return dataclasses.replace(self, rate=rate, salt=salt)


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """The times of a Poisson process of ``rate`` in ``seconds``. Another rate stretches the same times."""
    draw = random.Random(f"arrivals-{seed}")
    times = itertools.accumulate(draw.expovariate(1.0) / rate for _ in itertools.count())
    return itertools.takewhile(lambda at: at < seconds, times)
