"""Which pages the outer tier has: nobody but the mover can tell, and what it said is true for a while."""

from __future__ import annotations

from collections.abc import Callable

from services.kvcache.mover.orders import MOST_KEYS, Lookup
from services.kvcache.tiers.jobs import MoverJobs, Search

#: Seconds for which an answer is taken as true.
_TRUE_S = 1.0

#: Answers that are remembered.
_MOST_ANSWERS = 4096

#: Bytes that the daemon keeps of an answer.
ANSWER = 320

#: ``(asked, found, seconds)``; no seconds if there was no answer.
OnFound = Callable[[int, int, float | None], None]


class Lookups:
    """Answers by the digest of the first page that was looked up."""

    def __init__(self, jobs: MoverJobs, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._clock = clock
        self._answers: dict[bytes, tuple[int, float]] = {}
        self._asked: set[bytes] = set()
        #: Whether the outer tier can be reached.
        self.is_up = False
        #: Pages that one lookup may be about.
        self.most = MOST_KEYS

    def known(self, digests: list[bytes], now: float) -> int | None:
        """How many of these pages, from the first, the outer tier has; None if that has to be looked up."""
        count, until = self._answers.get(digests[0], (0, 0.0))
        return min(count, len(digests)) if now < until else None

    def ask(self, digests: list[bytes], on_found: OnFound, now: float) -> bool:
        """Look these pages up, unless somebody does; False if that cannot be done now."""
        first = digests[0]
        if first in self._asked:
            return True

        def found(count: int, seconds: float | None) -> None:
            self._asked.discard(first)
            self._learn(first, count)
            if 0 < count < len(digests):
                self._learn(digests[count], 0)
            on_found(len(digests), count, seconds)

        if not self.begin(digests, found):
            return False
        self._asked.add(first)
        return True

    def begin(self, digests: list[bytes], found: Callable[[int, float | None], None]) -> bool:
        """Look these pages up, whatever is known of them; False if that cannot be done now."""
        search = Search(len(digests), found)
        return self.is_up and self._jobs.begin(search, lambda number: Lookup(number, tuple(digests)))

    def forget(self, digest: bytes) -> None:
        """The outer tier has this page now: what it said before may be wrong."""
        self._answers.pop(digest, None)

    def _learn(self, digest: bytes, count: int) -> None:
        self._answers.pop(digest, None)
        self._answers[digest] = (count, self._clock() + _TRUE_S)
        if len(self._answers) > _MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]
