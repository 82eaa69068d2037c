"""What a generator writes down of each request, and of itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Record:
    """One request. All times are seconds from the start of the run; the planned arrival, ``due``, is the zero of all
    latencies, so a generator that sends late does not make an engine look fast.

    ``arrivals`` are the messages that carried tokens: when, and how many. ``error`` is the reason of a failed request.
    """

    number: int
    due: float
    wanted: int
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    end: float = 0.0
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_s(self) -> float | None:
        """From the planned arrival to the first token."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """The inter-token latencies: tokens that arrive together share the time since the previous ones evenly."""
        found: list[float] = []
        for place, (now, count) in enumerate(self.arrivals):
            if place:
                found += [(now - self.arrivals[place - 1][0]) / count] * count
            else:
                found += [0.0] * (count - 1)
        return found

    @property
    def silence_s(self) -> float:
        """The longest time between two messages; 0 if there is at most one."""
        return max((b[0] - a[0] for a, b in itertools.pairwise(self.arrivals)), default=0.0)


@dataclass(slots=True)
class Lag:
    """How late a generator was: with sending, and with whatever else its loop had to do. ``busy`` is its share of a
    core.
    """

    sends: list[float] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)
    busy: float = 0.0


def write(path: Path, records: list[Record], lag: Lag) -> None:
    """Write a generator's file."""
    found = {"records": [dataclasses.asdict(one) for one in records], "lag": dataclasses.asdict(lag)}
    path.write_text(json.dumps(found), encoding="utf-8")


def read(path: Path) -> tuple[list[Record], Lag]:
    """Read a generator's file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    records = [Record(**one | {"arrivals": [(at, count) for at, count in one["arrivals"]]}) for one in found["records"]]
    return records, Lag(**found["lag"])
