"""Admission control: which waiting requests to open now, by the engine's limits and an estimate of available pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

from services.common.errors import ExceedsPool, FieldInvalid, QueueFull
from services.engine.scheduling.queue.retry_after import RetryAfter
from services.engine.scheduling.queue.waiting_queue import WaitingQueue
from services.engine.scheduling.sequence import Sequence

#: Seconds before a refused opening is retried if none of this engine's requests ends first; another engine's may.
ADMISSION_RETRY_S = 0.1
#: Most prompt tokens opened in one exchange; the first request is exempt. A gRPC message has a size limit, and opening
#: many long prompts at once would delay decoding requests.
OPENING_TOKENS = 1 << 20
#: Pages that a growing request allocates at a time, to save calls. All requests together hold at most 1/`AHEAD_SHARE`
#: of the pool ahead of need.
GROWTH_PAGES = 8
AHEAD_SHARE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """At most ``max_batch`` requests run at once, with ``max_step_tokens`` tokens per step. Up to ``max_queue`` more
    may wait, with ``max_queue_tokens`` tokens in total. A growing request allocates ``growth_pages`` pages at a time.
    One point of priority is worth being queued ``priority_step_s`` seconds earlier. A request waits at most
    ``fill_wait_s`` seconds for pages to be copied from a lower tier.

    The configuration requires ``max_step_tokens > max_batch``, so each step has a token for every decoding request and
    at least one for prefill.
    """

    max_batch: int
    max_step_tokens: int
    max_queue: int
    max_queue_tokens: int = 1 << 20
    growth_pages: int = GROWTH_PAGES
    priority_step_s: float = 1.0
    fill_wait_s: float = 0.0


class Admission:
    """The gate between the queue and the batch.

    A request is opened with the pages of its whole prompt: it either fits entirely or waits. Only the page source knows
    whether it fits. The estimate here avoids futile calls, and avoids admitting a request whose first growth would
    preempt itself or another one. After a refusal the gate stays closed until pages are released or
    `ADMISSION_RETRY_S` has passed; then only the head of the queue is tried. If later requests were admitted while a
    request was refused, no later request is tried again until that request is admitted or ends.
    """

    def __init__(self, limits: Limits, page_size: int, total_pages: int, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._page_size = page_size
        self.total_pages = total_pages
        self._clock = clock
        self._probing = False
        self._overtaken: set[Sequence] = set()  # waiting sequences that a later one was admitted before
        self.opens_at = float("-inf")
        self.retry_after = RetryAfter(clock)

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages ``tokens`` tokens need."""
        return -(-tokens // self._page_size)

    def check_queue(self, waiting: WaitingQueue, running: int, tokens: int, count: int = 1) -> None:
        """Check that ``count`` more sequences of ``tokens`` tokens each may wait. Raises QueueFull with the time to
        retry after, and FieldInvalid when ``count`` is above what can ever run and wait at once.

        Sequences that will be admitted in the next step do not count as waiting. An empty queue accepts a request of
        any length.
        """
        limits = self._limits
        most = limits.max_batch + limits.max_queue
        if count > most:
            raise FieldInvalid(f"n is {count}; at most {most} requests can run or wait", field="n", limit=most)
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
                f"the queue is full: {queued} tokens are waiting, the limit is {limits.max_queue_tokens} tokens, and "
                f"this request has {tokens}",
                retry_after_s=self.retry_after.wait_for(places),
                limit_tokens=limits.max_queue_tokens,
                queued_tokens=queued,
                tokens=tokens,
            )

    def check_fits(self, sequence: Sequence) -> None:
        """Check that a request could run with the whole pool to itself. Raises ExceedsPool."""
        needed = self.pages_for(sequence.max_resident_tokens)
        if needed > self.total_pages:
            raise ExceedsPool(
                f"prompt and completion may need {needed} pages of {self._page_size} tokens; the pool has "
                f"{self.total_pages}",
                needed_pages=needed,
                total_pages=self.total_pages,
            )

    def growth(self, sequence: Sequence) -> int:
        """Returns how many pages a running request should hold: what it needs, plus some ahead unless pages are
        short.
        """
        needed = self.pages_for(sequence.resident_target)
        if needed <= len(sequence.pages):
            return needed
        ahead = 0
        if self._clock() >= self.opens_at:
            ahead = min(self._limits.growth_pages - 1, self.total_pages // AHEAD_SHARE // self._limits.max_batch)
        return min(needed + ahead, self.pages_for(sequence.max_resident_tokens))

    # --- the gate -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Pages are short: admit nothing until some are released or `ADMISSION_RETRY_S` has passed."""
        self.opens_at = self._clock() + ADMISSION_RETRY_S

    def answered(self, granted: Items[Sequence], refused: Items[Sequence]) -> None:
        """Record the outcome of the openings and forks of one exchange."""
        self._overtaken.difference_update(granted)
        if refused:
            self.close()
            self._probing = True
            last = max((sequence.order for sequence in granted), default=(float("-inf"), 0))
            self._overtaken.update(sequence for sequence in refused if sequence.order < last)
        elif granted:
            self._probing = False

    def ended(self, sequence: Sequence) -> None:
        """Forget a request that ended while it waited."""
        self._overtaken.discard(sequence)

    def open(self) -> None:
        """Pages are being released: admit again."""
        self.opens_at = float("-inf")

    def candidates(self, waiting: Iterable[Sequence], running: Items[Sequence], held: int) -> Iterator[Sequence]:
        """Yields the requests to open now, from the head of the queue; live requests keep ``held`` pages."""
        if self._clock() < self.opens_at:
            return
        slots = max(0, self._limits.max_batch - len(running))
        if not slots:
            return
        # The pages of running and newly admitted requests, plus one page for each that may still grow.
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
        """Returns the sequences of ``wanted`` to fork now, and how many private pages they need in total. Forks share
        all complete pages of their prompt. Live requests keep ``held`` pages; batch slots and pages are reserved for
        the waiting requests ``ahead``, which precede the forks in order.
        """
        if self._probing or self._clock() < self.opens_at or not self._overtaken.isdisjoint(ahead):
            return [], 0
        room = self.total_pages - held - sum(self._may_grow(sequence, len(sequence.pages)) for sequence in running)
        for sequence in ahead:
            pages = self.pages_for(sequence.resident_target)
            room -= pages + self._may_grow(sequence, pages)
        room -= 1  # the leader's private copy of its last page, which it must not write while forks copy it
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
        """Returns the longest prefix, in pages, that a waiting request shares with a running one."""
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
