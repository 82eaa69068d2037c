"""Clients that each break one law: the reference adapter, with one thing done wrong.

python -m tests.conformance.broken NAME
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from rocmforge.client import Demand, Grant
from rocmforge.client.errors import KvCacheDown, PagesFilling
from rocmforge.client.lease import Lease
from rocmforge.conformance.adapter import Adapter, Sequence, serve


class LeavesSessions(Adapter):
    """Does not close a session whose memory it could not map."""

    def open(self, **values: Any) -> dict[str, Any]:  # type: ignore[override]
        from rocmforge.client.cache import KvCache

        KvCache._close_best_effort = lambda self: None  # type: ignore[method-assign]
        return super().open(**values)


class WritesNextDoor(Adapter):
    """Counts slots from one."""

    def _slot(self, known: Sequence, position: int) -> tuple[int, int, int]:
        page, begin, end = super()._slot(known, position)
        size = end - begin
        begin = (begin + size) % self.cache.layout.page_bytes
        return page, begin, begin + size


class ChecksNothing(Adapter):
    """Writes wherever it is asked to."""

    def check_write(self, known: Sequence, position: int) -> None:
        if not self.cache.may_write():
            super().check_write(known, position)


class ReportsEarly(Adapter):
    """Reports a prompt as soon as it has pages for it."""

    def begin(self, sequence: str, prompt: list[int], pages: int, fill_wait_s: float | None = None) -> dict[str, Any]:
        answer = super().begin(sequence, prompt, pages, fill_wait_s)
        self.cache.step([self._demand(sequence, prompt[answer["cached_tokens"] :], pages)])
        return answer


class CopiesNothing(Adapter):
    """Takes the pages and leaves the copies."""

    def take(self, known: Sequence, grant: Grant) -> None:
        super().take(known, replace(grant, copies=()))


class AsksInOtherWords(Adapter):
    """Begins another sequence when nobody answered, and forgets the first."""

    def begin(self, sequence: str, prompt: list[int], pages: int, fill_wait_s: float | None = None) -> dict[str, Any]:
        step = self.cache.start_step([Demand.of_prompt(f"{sequence}?", prompt, pages)])
        try:
            step._attempt.result()
        except Exception:
            return super().begin(sequence, prompt, pages, fill_wait_s)
        self.cache.step([], removed=[f"{sequence}?"])
        return super().begin(sequence, prompt, pages, fill_wait_s)


class FailsTogether(Adapter):
    """Takes an error of one sequence for one of all."""

    def step(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        results = super().step(steps)["results"]
        failed = [result for result in results if "error" in result]
        return {"results": failed[:1] * len(results) if failed else results}


class Sleeps(Adapter):
    """Renews its lease with its own calls alone."""

    def open(self, **values: Any) -> dict[str, Any]:  # type: ignore[override]
        from rocmforge.client.lease import LeaseKeeper

        LeaseKeeper.start = lambda self: None  # type: ignore[method-assign]
        return super().open(**values)


class Trusts(Adapter):
    """Writes until it is asked to stop."""

    def check_write(self, known: Sequence, position: int) -> None:
        self.cache._live().lease.renewed_at = self.cache.now()
        super().check_write(known, position)


class Forgets(Adapter):
    """Opens a session and leaves the lost one to the daemon."""

    def recover(self) -> dict[str, Any]:
        close, self.cache._close_sessions = self.cache._close_sessions, lambda timeout_s: None  # type: ignore[method-assign]
        try:
            return super().recover()
        except KvCacheDown:
            close(1.0)
            raise


class KnowsNoEpochs(Adapter):
    """Goes on as long as its calls are answered."""

    def open(self, **values: Any) -> dict[str, Any]:  # type: ignore[override]
        def renewed(self: Lease, sent_at: float, epoch: int) -> None:
            self.renewed_at = max(self.renewed_at, sent_at)

        Lease.renewed = renewed  # type: ignore[method-assign]
        return super().open(**values)


class KeepsTables(Adapter):
    """Ends a sequence, and keeps its block table."""

    def remove(self, sequence: str) -> dict[str, Any]:
        self.cache.step([], removed=[sequence])
        return {}


class Remembers(Adapter):
    """Keeps the block table of each prompt that has ended, and takes its pages for cached."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[int, ...], Sequence] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}

    def begin(self, sequence: str, prompt: list[int], pages: int, fill_wait_s: float | None = None) -> dict[str, Any]:
        if (kept := self._kept.get(tuple(prompt))) is not None:
            return {"table": kept.table, "cached_tokens": 4}
        self._prompts[sequence] = tuple(prompt)
        return super().begin(sequence, prompt, pages, fill_wait_s)

    def remove(self, sequence: str) -> dict[str, Any]:
        self._kept[self._prompts[sequence]] = self._sequences[sequence]
        return super().remove(sequence)


class NeverCloses(Adapter):
    """Leaves its session to its lease."""

    def close(self) -> dict[str, Any]:
        return {}


class AsksAtOnce(Adapter):
    """Does not wait for pages that are being filled."""

    def wait(self, error: PagesFilling) -> None:
        return


class TakesRefusals(Adapter):
    """Begins a sequence in any pages when its own are being filled."""

    def begin(self, sequence: str, prompt: list[int], pages: int, fill_wait_s: float | None = None) -> dict[str, Any]:
        [grant] = self.cache.step([Demand.of_prompt(sequence, prompt, pages, fill_wait_s=fill_wait_s)])
        known = self._sequences[sequence] = Sequence(list(grant.pages) or list(range(pages)), grant.cached_tokens)
        return {"table": known.table, "cached_tokens": grant.cached_tokens}


#: By the law that each breaks.
BROKEN: dict[str, type[Adapter]] = {
    "attach": LeavesSessions,
    "places": WritesNextDoor,
    "grants": ChecksNothing,
    "publishing": ReportsEarly,
    "copies": CopiesNothing,
    "replies": AsksInOtherWords,
    "batches": FailsTogether,
    "filling": AsksAtOnce,
    "lease": Sleeps,
    "fence": Trusts,
    "loss": Forgets,
    "epoch": KnowsNoEpochs,
    "stale": KeepsTables,
    "end": NeverCloses,
}

#: Other clients that break a law, by a name of theirs, with the law.
OTHERS: dict[str, tuple[str, type[Adapter]]] = {
    "prompts": ("stale", Remembers),
    "refusals": ("filling", TakesRefusals),
}


if __name__ == "__main__":
    clients = BROKEN | {name: client for name, (_, client) in OTHERS.items()}
    serve(clients[sys.argv[1]](), sys.stdin, sys.stdout)
