"""Waiting requests whose pages are being copied from a lower tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.engine.scheduling.sequence import Sequence

#: The least seconds between two openings of a request that is refused for a fill.
LEAST_RETRY_S = 0.002


@dataclass(slots=True)
class _Wait:
    """A fill that a sequence waits for; times in seconds of the clock. ``yields`` is set when its opening was refused:
    the next exchange then opens others first, so that it does not keep a batch slot from one that is ready.
    """

    since: float
    offered_s: float
    again_at: float
    yields: bool = True

    @property
    def ends_at(self) -> float:
        """When its patience is over."""
        return self.since + self.offered_s


class FillWaits:
    """Who waits for a fill, and when its opening is due again.

    A sequence waits at most ``patience_s`` seconds between two admissions, however often and for whatever the source
    refuses it. After that its openings offer no wait, so the source opens it with what the pool has. Nobody overtakes
    it for longer than that.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience = patience_s
        self._clock = clock
        self._waits: dict[Sequence, _Wait] = {}
        self._spent: dict[Sequence, float] = {}  # in waits that are over, since its last admission

    def __len__(self) -> int:
        return len(self._waits)

    def offer(self, sequence: Sequence) -> float | None:
        """Returns for how long its opening may be refused for a fill, in seconds; None if it may not be."""
        wait = self._waits.get(sequence)
        if wait is not None:
            return wait.offered_s if self._clock() < wait.ends_at else None
        left = self._patience - self._spent.get(sequence, 0.0)
        return left if left > 0 else None

    def refused(self, sequence: Sequence, retry_after_s: float) -> None:
        """Its opening was refused for a fill: it is due again after ``retry_after_s``, or when its patience ends."""
        now, wait = self._clock(), self._waits.get(sequence)
        if wait is None:
            left = max(0.0, self._patience - self._spent.get(sequence, 0.0))
            wait = self._waits[sequence] = _Wait(now, left, now)
        wait.again_at = min(now + max(LEAST_RETRY_S, retry_after_s), wait.ends_at)
        wait.yields = True

    def over(self, sequence: Sequence) -> None:
        """It no longer waits for a fill: its opening had another answer."""
        wait = self._waits.pop(sequence, None)
        if wait is not None:
            waited_s = self._clock() - wait.since
            sequence.fill_wait_s += waited_s
            self._spent[sequence] = self._spent.get(sequence, 0.0) + waited_s

    def forget(self, sequence: Sequence) -> None:
        """It was admitted, or has ended."""
        self.over(sequence)
        self._spent.pop(sequence, None)

    def lost(self) -> None:
        """The session is lost, and with it what was being filled for it."""
        for sequence in list(self._waits):
            self.over(sequence)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether it may be opened now."""
        wait = self._waits.get(sequence)
        return wait is None or self._clock() >= wait.again_at

    def due_at(self, waiting: Iterable[Sequence]) -> float:
        """Returns when the first of ``waiting`` may be opened; minus infinity if that is now, or if there is none."""
        now, earliest = float("-inf"), float("inf")
        for sequence in waiting:
            wait = self._waits.get(sequence)
            if wait is None:
                return now
            earliest = min(earliest, wait.again_at)
        return earliest if earliest < float("inf") else now

    def due(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yields those of ``waiting`` that may be opened now: in order, but for those that yield, which come last."""
        now, last = self._clock(), list[Sequence]()
        for sequence in waiting:
            wait = self._waits.get(sequence)
            if wait is not None and now < wait.again_at:
                continue
            if wait is not None and wait.yields and now < wait.ends_at:
                wait.yields = False
                last.append(sequence)
                continue
            yield sequence
        yield from last
