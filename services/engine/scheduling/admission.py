"""Which waiting requests may be opened now: the bounds of the engine, and a guess at whether their pages are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

from services.common.errors import ExceedsPool, FieldInvalid, QueueFull
from services.engine.scheduling.retry_after import RetryAfter
from services.engine.scheduling.sequence import Sequence
from services.engine.scheduling.waiting_queue import WaitingQueue

#: Seconds until a refused opening is tried again when no request of ours ends before: another engine's may.
ADMISSION_RETRY_S = 0.1
#: Prompt tokens opened in one exchange, after the first: a message has a limit, and many long prompts at once would
#: hold up the decoding ones.
OPENING_TOKENS = 1 << 20
#: Pages that a growing request asks for at a time, so that a call is needed every so many pages only; and the part of
#: the pool that all requests together may have ahead of need.
GROWTH_PAGES = 8
AHEAD_SHARE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_batch`` requests run at once, on ``max_step_tokens`` a step; ``max_queue`` may wait beyond those, with
    ``max_queue_tokens`` tokens together. A growing request asks for ``growth_pages`` pages at a time. A point of
    priority is worth ``priority_step_s`` seconds of having come earlier.

    Where ``max_step_tokens`` is more than ``max_batch``, as the configuration demands, each step has a token for every
    decoding request and some for a prompt.
    """

    max_batch: int
    max_step_tokens: int
    max_queue: int
    max_queue_tokens: int = 1 << 20
    growth_pages: int = GROWTH_PAGES
    priority_step_s: float = 1.0


class Admission:
    """The gate between the queue and the batch.

    A request is opened with the pages of its whole prompt, so it fits as a whole or waits. Whether it fits, the page
    source knows; the guess here keeps the engine from asking in vain, and from letting a request in whose first
    growth would push itself or another one out again. After a refusal the gate is closed until pages come back or a
    while has passed, and then the head of the queue is tried alone. Who was refused while others behind it were let in
    is overtaken no more: nobody behind it is tried as long as it waits.
    """

    def __init__(self, limits: Limits, page_size: int, total_pages: int, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._page_size = page_size
        self.total_pages = total_pages
        self._clock = clock
        self._probing = False
        self._overtaken: set[Sequence] = set()  # of those that wait
        self.opens_at = float("-inf")
        self.retry_after = RetryAfter(clock)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self._page_size)

    def check_queue(self, waiting: WaitingQueue, running: int, tokens: int, count: int = 1) -> None:
        """Whether ``count`` more, of so many tokens each, may wait. Raises QueueFull, saying when to try again, and
        FieldInvalid when they are more than may ever be here at once.

        What waits only for the next step does not count. An empty queue takes a request of any length.
        """
        limits = self._limits
        most = limits.max_batch + limits.max_queue
        if count > most:
            raise FieldInvalid(f"n is {count}; at most {most} requests can run or wait here", field="n", limit=most)
        slots = limits.max_batch - running if self._clock() >= self.opens_at else 0
        if len(waiting) + count <= slots:
            return
        behind = max(0, len(waiting) - slots)
        excess = len(waiting) + count - slots - limits.max_queue
        if excess > 0:
            room = "is full" if count == 1 else f"has no room for {count} samples"
            raise QueueFull(
                f"the queue {room}: {behind} requests are waiting, and at most {limits.max_queue} can",
                retry_after_s=self.retry_after.wait_for(excess),
                limit=limits.max_queue,
            )
        tokens *= count
        if not behind or waiting.tokens + tokens <= limits.max_queue_tokens:
            return
        queued = waiting.tokens_behind(slots)
        if queued + tokens > limits.max_queue_tokens:
            places = (queued + tokens - limits.max_queue_tokens) * behind / queued
            raise QueueFull(
                f"the queue is full: requests of {queued} tokens are waiting, at most {limits.max_queue_tokens} tokens "
                f"can, and this request has {tokens}",
                retry_after_s=self.retry_after.wait_for(places),
                limit_tokens=limits.max_queue_tokens,
                queued_tokens=queued,
                tokens=tokens,
            )

    def check_fits(self, sequence: Sequence) -> None:
        """Whether a request could run with the pool to itself. Raises ExceedsPool."""
        needed = self.pages_for(sequence.max_resident_tokens)
        if needed > self.total_pages:
            raise ExceedsPool(
                f"prompt and completion may need {needed} pages of {self._page_size} tokens and the pool has "
                f"{self.total_pages}",
                needed_pages=needed,
                total_pages=self.total_pages,
            )

    def growth(self, sequence: Sequence) -> int:
        """How many pages a running request should have: those it needs, and some ahead where pages are plenty."""
        needed = self.pages_for(sequence.resident_target)
        if needed <= len(sequence.pages):
            return needed
        ahead = 0
        if self._clock() >= self.opens_at:
            ahead = min(self._limits.growth_pages - 1, self.total_pages // AHEAD_SHARE // self._limits.max_batch)
        return min(needed + ahead, self.pages_for(sequence.max_resident_tokens))

    # --- the gate -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """There are too few pages: wait for some to come back, or a while."""
        self.opens_at = self._clock() + ADMISSION_RETRY_S

    def answered(self, granted: Items[Sequence], refused: Items[Sequence]) -> None:
        """Openings, those of forks too, that were asked for together were granted or refused."""
        self._overtaken.difference_update(granted)
        if refused:
            self.close()
            self._probing = True
            last = max((sequence.order for sequence in granted), default=(float("-inf"), 0))
            self._overtaken.update(sequence for sequence in refused if sequence.order < last)
        elif granted:
            self._probing = False

    def ended(self, sequence: Sequence) -> None:
        """A request ended while it waited."""
        self._overtaken.discard(sequence)

    def open(self) -> None:
        """Pages come back."""
        self.opens_at = float("-inf")

    def candidates(self, waiting: Iterable[Sequence], running: Items[Sequence], held: int) -> Iterator[Sequence]:
        """Requests to open now, from the head of the queue; ``held`` pages stay with live requests."""
        if self._clock() < self.opens_at:
            return
        slots = max(0, self._limits.max_batch - len(running))
        if not slots:
            return
        # What those that run and those just let in take, and a page to come for each that may still grow.
        taken = held + sum(self._may_grow(sequence, len(sequence.pages)) for sequence in running)
        tokens = 0
        for nth, sequence in enumerate(islice(waiting, min(1, slots) if self._probing else slots)):
            pages, room = self.pages_for(sequence.resident_target), self.total_pages - taken
            if pages > room and pages - self._shared_pages(sequence, running) > room:
                self.close()
                return
            if nth and tokens + sequence.num_tokens > OPENING_TOKENS:
                return
            taken += pages + self._may_grow(sequence, pages)
            tokens += sequence.num_tokens
            yield sequence
            if sequence in self._overtaken:
                return

    def forks(
        self, wanted: Items[Sequence], running: Items[Sequence], held: int, ahead: Items[Sequence]
    ) -> tuple[list[Sequence], int]:
        """Which of the sequences that would share all pages of their prompts may be opened now, and with how many pages
        of their own; ``held`` pages stay with live requests. There is place and room left for those ``ahead``, which
        wait and come before them.
        """
        if self._probing or self._clock() < self.opens_at or not self._overtaken.isdisjoint(ahead):
            return [], 0
        room = self.total_pages - held - sum(self._may_grow(sequence, len(sequence.pages)) for sequence in running)
        for sequence in ahead:
            pages = self.pages_for(sequence.resident_target)
            room -= pages + self._may_grow(sequence, pages)
        room -= 1  # for the last page of whom they fork from, which it must not write while they copy it
        chosen, own = list[Sequence](), 0
        for sequence in wanted[: max(0, self._limits.max_batch - len(running) - len(ahead))]:
            pages = self.pages_for(sequence.resident_target)
            more = pages - len(sequence.request.prompt) // self._page_size
            room -= more + self._may_grow(sequence, pages)
            if room < 0:
                break
            chosen.append(sequence)
            own += more
        return chosen, own

    def _may_grow(self, sequence: Sequence, pages: int) -> bool:
        return self.pages_for(sequence.max_resident_tokens) > pages

    def _shared_pages(self, sequence: Sequence, running: Iterable[Sequence]) -> int:
        """How many pages of a waiting request some running one surely has already."""
        size, most = self._page_size, 0
        for other in running:
            if other.request.salt != sequence.request.salt:
                continue
            limit = min(sequence.num_tokens - 1, other.num_reported_tokens) // size
            same = 0
            while same < limit:
                at = same * size
                if sequence.tokens[at : at + size] != other.tokens[at : at + size]:
                    break
                same += 1
            most = max(most, same)
        return most
