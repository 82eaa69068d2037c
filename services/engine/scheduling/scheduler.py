"""Which tokens run in the next step, and what is asked of the page source meanwhile.

One rule schedules everything: each request has ``num_computed_tokens`` chasing ``num_tokens``. A step has a budget of
tokens: each request that lacks one token has it, and the others share what is left, in order. Chunked prefill, prefix
hits, decoding and resuming after a preemption are all that.

One order, ``Sequence.order``, rules who is admitted, whose prompt is computed and, from its end, who is preempted. It
is that of arrival, each request moved to the front by so many seconds for a point of its priority. So a request is
overtaken by those alone that came less than that after it, for the points that they are above it: nobody starves.

A round is ``demands() -> schedule() -> apply() -> granted()``: the demands speak of the state after the last
synchronised step and are served while the scheduled one runs, so a page is reported or let go of only once no step
touches it. A request that ended is *leaving* until its pages are given back, and only then *settled*.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile

import structlog

from services.common.errors import (
    ExceedsPool,
    Internal,
    RequestExists,
    SequenceRemoved,
    SequenceUnknown,
    ServiceError,
)
from services.engine.pages.source import Demand, Grant, Opening, PageCopy
from services.engine.sampling.result import Choice, Computed, Draw, Result
from services.engine.scheduling.admission import GROWTH_PAGES, Admission, Limits
from services.engine.scheduling.block_tables import BlockTables
from services.engine.scheduling.deadlines import Deadlines
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import MAX_SAMPLES, Key, Outcome, Request, Sequence, State, key_of
from services.engine.scheduling.step import Chunk, share_out
from services.engine.scheduling.waiting_queue import WaitingQueue

log = structlog.get_logger()

#: Complete pages that make a report worth a call of its own. A decoding request reports with each page it asks for;
#: this is for long prompts, whose pages others may share, and which a preemption would otherwise lose.
REPORT_PAGES = 4
SOURCE_ID_CHARS = 128


@dataclass(slots=True)
class Advance:
    """What a step brought: an event for each token that was accepted, in order, and when those tokens came.

    ``first_s`` are seconds from a request's submission to its first token. ``since`` are the times at which the others
    had the token before; those that were in one step before this have the same.
    """

    now: float
    events: list[Event] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    since: list[float] = field(default_factory=list)


class Scheduler:
    """Queues and block tables of one engine. Used by its thread alone; times are seconds of the injected clock.

    A live sequence is in exactly one of ``waiting``, ``running`` (both in order) and ``leaving``; ``live`` has them by
    key. Of a request's samples each is a sequence, and all of them fail if one does.
    """

    def __init__(
        self, limits: Limits, page_size: int, total_pages: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_batch = limits.max_batch
        self._max_step_tokens = limits.max_step_tokens
        self._priority_step = limits.priority_step_s
        self._page_size = page_size
        self._clock = clock
        self._admission = Admission(limits, page_size, total_pages, clock)
        self._arrivals = 0
        self._source_ids = 0
        self.live: dict[Key, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.leaving: dict[str, Sequence] = {}  # by source id
        self._released: dict[str, Sequence] = {}  # by source id to remove; the request goes on under another
        self._unsure: dict[str, Sequence] = {}  # by source id: may be open, the reply was lost
        self._settled: list[Sequence] = []
        self._deadlines = Deadlines()
        self._holds = BlockTables()
        self._sent: tuple[list[tuple[Demand, Sequence]], list[str]] = ([], [])
        self.preemptions = 0
        self.looked_up_tokens = 0  # of prompts at their first admission, and those of them that were cached
        self.cached_tokens = 0

    def __repr__(self) -> str:
        return f"<Scheduler: {len(self.running)} running, {len(self.waiting)} waiting, {len(self.leaving)} leaving>"

    @property
    def held_pages(self) -> int:
        """Distinct pages of live requests."""
        return len(self._holds)

    @property
    def total_pages(self) -> int:
        """Pages of the pool, whoever has them."""
        return self._admission.total_pages

    @property
    def admits_at(self) -> float | None:
        """When a waiting request may be opened; None when none waits."""
        return self._admission.opens_at if self.waiting else None

    @property
    def next_deadline(self) -> float:
        """When the next of the live requests runs out of time; infinite when none does."""
        return self._deadlines.next_at

    # --- requests come and go -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> Sequence:
        """Queue a request. Raises RequestExists, QueueFull, ExceedsPool, and FieldInvalid for too many samples."""
        if self.samples(request.request_id):
            raise RequestExists(f"request {request.request_id!r} is live", field="request_id")
        virtual_arrival = self._clock() - request.priority * self._priority_step
        family = [
            Sequence(one, self._arrivals + 1 + at, virtual_arrival) for at, one in enumerate((request, *request.others))
        ]
        first = family[0]
        self._admission.check_fits(first)
        self._admission.check_queue(self.waiting, len(self.running), first.num_tokens, len(family))
        self._arrivals += len(family)
        if request.deadline is not None:
            self._deadlines.add(request.request_id, request.deadline)
        for sequence in family:
            self.live[sequence.key] = sequence
            self._wait(sequence)
            if sequence is not first:
                sequence.leader = first
                first.forks.append(sequence)
            if request.others:
                sequence.family = family
        return first

    def samples(self, request_id: str) -> list[Sequence]:
        """The live sequences of a request."""
        keys = (key_of(request_id, sample) for sample in range(MAX_SAMPLES))
        return [self.live[key] for key in keys if key in self.live]

    def finish(self, sequence: Sequence, outcome: Outcome) -> None:
        """End a request, whatever it was doing: the one way out. Ending it twice changes nothing."""
        if sequence.state is State.FINISHED:
            return
        if all(other.state is State.FINISHED for other in sequence.family if other is not sequence):
            self._deadlines.discard(sequence.id)
        if self.waiting:
            self._admission.retry_after.ended()
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self._admission.ended(sequence)
        sequence.state, sequence.outcome, sequence.finished_at = State.FINISHED, outcome, self._clock()
        self._leave(sequence)
        owed = [source_id for source_id, one in self._released.items() if one is sequence]
        if owed and not sequence.source_id:  # its end waits for the removal, as that of any other does
            sequence.source_id = owed[-1]
            del self._released[sequence.source_id]
        if sequence.source_id:
            self.leaving[sequence.source_id] = sequence
        else:
            self._settle(sequence)
        if outcome.error is not None:
            for other in sequence.family:
                self.finish(other, outcome)

    def overdue(self) -> list[Sequence]:
        """Requests whose time is up; each is told once."""
        names = self._deadlines.take(self._clock())
        return [one for name in names for one in self.samples(name) if one.state is not State.FINISHED]

    def take_settled(self) -> list[Sequence]:
        """Requests that ended and hold nothing any more; nothing here knows them from now on."""
        settled, self._settled = self._settled, []
        return settled

    def _wait(self, sequence: Sequence) -> None:
        if not self.waiting:
            self._admission.retry_after.begin()
        self.waiting.add(sequence)

    def _settle(self, sequence: Sequence) -> None:
        self._holds.drop(sequence)
        del self.live[sequence.key]
        self._settled.append(sequence)

    # --- one round ----------------------------------------------------------------------------------------------

    def demands(self) -> tuple[list[Demand], list[str]]:
        """The next exchange; both lists are empty when nobody needs one.

        Complete pages are reported along with whatever is sent anyway. What is let go of is removed before any demand
        is served, so a request that ends with complete pages to report is removed one exchange later.

        A waiting request that the source may have opened, because the reply was lost, is asked for again or removed:
        otherwise it could keep the pages that requests ahead of it wait for.
        """
        removed, urgent, along, returning = list[str](), [], [], []
        size, held_back = self._page_size, list[Sequence]()
        for source_id, sequence in self.leaving.items():
            if sequence.forks or self._has_last_report(sequence):
                urgent.append((self._demand(sequence, 0), sequence))
            else:
                removed.append(source_id)
                returning.append(sequence.pages)
                self._admission.open()
        for sequence in self.running:
            if (sequence.shares_tail or sequence.forks) and sequence.held:
                # What its forks are to find is told before them; it asks for room of its own behind them.
                urgent.append((self._demand(sequence, 0), sequence))
                held_back.append(sequence)
                continue
            reported, worth_a_call = sequence.num_reported_tokens, False
            unreported = sequence.num_computed_tokens // size - reported // size
            if unreported:
                in_prompt = reported < len(sequence.request.prompt)
                # Once it decodes a growth comes before, and tells them.
                worth_a_call = unreported >= (REPORT_PAGES if in_prompt else 2 * GROWTH_PAGES)
            if worth_a_call or len(sequence.tokens) >= len(sequence.pages) * size:
                pages = self._admission.growth(sequence)
                if worth_a_call or pages > len(sequence.pages):
                    urgent.append((self._demand(sequence, pages), sequence))
                    continue
            if unreported:
                along.append(sequence)
        forks, openings = self._joining(returning) if self.waiting else ([], [])
        for sequence in held_back:
            if sequence.held:  # by those forks that are on their way
                sequence.shares_tail = True
                forks.append((self._demand(sequence, self._admission.growth(sequence)), sequence))
        self._release_unsure({demand.sequence_id for demand, _ in (*forks, *openings)})
        removed += self._released
        if not (removed or urgent or openings):
            return [], []
        demands = [*urgent, *((self._demand(sequence, 0), sequence) for sequence in along), *forks, *openings]
        self._sent = (demands, removed)
        return [demand for demand, _ in demands], removed

    def _joining(self, returning: Items[Items[int]]) -> tuple[list[tuple[Demand, Sequence]], ...]:
        """Demands of forks, and of others that wait, that may be opened now, ``returning`` tables given back."""
        held = self._holds.without(returning)
        forks, own = self._forks(held)
        free = (sequence for sequence in self.waiting if sequence.leader is None)
        opened = [*self.running, *(sequence for _, sequence in forks)]
        return forks, [self._opening(sequence) for sequence in self._admission.candidates(free, opened, held + own)]

    def _release_unsure(self, asked: set[str]) -> None:
        """Give up the openings without a reply that this exchange does not ask for again."""
        for source_id, sequence in self._unsure.items():
            if sequence.state is State.WAITING and sequence.source_id == source_id and source_id not in asked:
                self._release(sequence)
        self._unsure.clear()

    def schedule(self) -> tuple[Chunk, ...]:
        """The next step."""
        return share_out(self.running, self._max_step_tokens, self._page_size)

    def apply(self, step: Items[Chunk], results: Items[Result]) -> Advance:
        """Commit a step that has synchronised; ``results[i]`` is what chunk i sampled, or the error that ends it."""
        advance, running = Advance(self._clock()), State.RUNNING
        for chunk, result in zip(step, results, strict=True):
            sequence = chunk.sequence
            if sequence.state is not running:
                continue  # another sample of its request failed in this step
            if isinstance(result, ServiceError):
                self.finish(sequence, Outcome(error=result))
                continue
            sequence.num_computed_tokens = chunk.start + chunk.count
            if isinstance(result, Computed):
                sequence.prompt_logprobs.extend(result.prompt)
                takers = [sequence, *sequence.forks][: len(result.drawn)]
                for taker, draw in zip(takers, result.drawn, strict=True):
                    if taker.state is not State.FINISHED:  # with one before it, by an error
                        self._accept(taker, draw, advance)
            elif result is not None:
                self._accept(sequence, result, advance)
        return advance

    def _accept(self, sequence: Sequence, draw: Draw, advance: Advance) -> None:
        logprobs: tuple[Choice, ...] = ()
        prompt: tuple[Choice, ...] = ()
        if isinstance(draw, int):
            token = draw
        elif isinstance(draw, Choice):
            token, logprobs = draw.token, (draw,)
        else:
            self.finish(sequence, Outcome(error=draw))
            return
        leader, before, now = sequence.leader, sequence.last_token_at, advance.now
        if leader is not None:  # the prompt is computed, for this one as well
            self.waiting.remove(sequence)
            sequence.admitted_at, sequence.cached_tokens = leader.admitted_at, len(sequence.request.prompt)
            self.looked_up_tokens += sequence.cached_tokens
            self.cached_tokens += sequence.cached_tokens
        try:
            text, outcome = sequence.accept(token, now)
        except Exception as error:
            log.exception("token_not_accepted", request_id=sequence.id, token=token)
            text, outcome = "", Outcome(error=Internal(f"token {token} could not be turned into text: {error}"))
        if leader is not None:
            self.waiting.add(sequence)
        if outcome is None or outcome.error is None:
            request = sequence.request
            if before is None:
                advance.first_s.append(now - request.submitted_at)
                prompt = tuple(sequence.prompt_logprobs)
            else:
                advance.since.append(before)
            event = Event(request.request_id, text, (token,), None, None, request.sample, logprobs, prompt)
            advance.events.append(event)
        if outcome is not None:
            self.finish(sequence, outcome)

    def granted(self, grants: Items[Grant]) -> list[PageCopy]:
        """Take the answer to the last ``demands()``. Returns the copies to be made before the next step."""
        copies: list[PageCopy] = []
        (demands, removed), self._sent = self._sent, ([], [])
        for source_id in removed:
            sequence = self.leaving.pop(source_id, None)
            if sequence is not None:
                self._settle(sequence)
            self._released.pop(source_id, None)
        short, opened, refused = False, list[Sequence](), list[Sequence]()
        for (demand, sequence), grant in zip(demands, grants, strict=True):
            if sequence.source_id != demand.sequence_id:
                continue  # an answer further up has put it back to waiting
            if grant.error is None:
                copies += self._take(sequence, demand, grant)
                if demand.opening is not None or demand.parent:
                    opened.append(sequence)
            elif sequence.state is State.WAITING and grant.error.code == "RESOURCE_EXHAUSTED":
                if sequence.leader is not None:  # refused as a fork, it opens as any other
                    self._go_alone(sequence)
                refused.append(sequence)  # pages, quota, sequences: what is short now may be there later
            else:
                short |= self._refused(sequence, demand, grant.error)
        self._admission.answered(opened, refused)
        # Pages on their way back may be enough; else the last in order makes room, and only if the first itself is the
        # last one running does it step back, since others than us hold what it needs.
        if short and self.running and not self.leaving and not self._released:
            self._preempt(self.running[-1])
        return copies

    def unanswered(self) -> None:
        """The last exchange got no reply and may have been served. The next one repeats its removals, reports and
        growths, and the openings that are still wanted; the other openings it removes.
        """
        (demands, _), self._sent = self._sent, ([], [])
        self._unsure = {
            demand.sequence_id: sequence for demand, sequence in demands if demand.opening is not None or demand.parent
        }

    def lost_pages(self, total_pages: int | None = None) -> None:
        """Every page is lost with its session: all that ran waits again, tokens kept, and what ended is settled."""
        self._sent = ([], [])
        self._released.clear()
        self._unsure.clear()
        self._admission.open()
        leaving, self.leaving = self.leaving, {}
        for sequence in leaving.values():
            self._settle(sequence)
        for sequence in self.running:
            self._wait(sequence)
        self.running.clear()
        for sequence in self.waiting:
            self._holds.drop(sequence)
            sequence.forget_pages()
        for sequence in self.waiting:
            if sequence.leader is not None and sequence.num_generated_tokens:
                self._go_alone(sequence)
        if total_pages is not None:
            self._admission.total_pages = total_pages
            for sequence in list(self.waiting):
                try:
                    self._admission.check_fits(sequence)
                except ExceedsPool as error:
                    self.finish(sequence, Outcome(error=error))

    # --- pages --------------------------------------------------------------------------------------------------

    def _forks(self, held: int) -> tuple[list[tuple[Demand, Sequence]], int]:
        """Demands of those whose prompt is computed, and how many pages of their own they take; ``held`` stay with live
        requests. Who cannot be opened now will be on its own: the leader goes on and is no longer what it was. So will
        whoever would take the place of one that waits and comes before it.
        """
        demands, own, opened = list[tuple[Demand, Sequence]](), 0, list(self.running)
        leaders = [one for one in (*self.running, *self.leaving.values()) if one.forks and one.num_generated_tokens]
        for leader in sorted(leaders, key=lambda one: one.order):
            before = takewhile(partial(_precedes, leader.forks[0]), self.waiting)
            ahead = list(islice((one for one in before if one.leader is None), self._max_batch))
            chosen, more = self._admission.forks(leader.forks, opened, held + own, ahead)
            opened += chosen
            own += more
            for sequence in leader.forks[len(chosen) :]:
                self._go_alone(sequence)
            for sequence in chosen:
                self._name(sequence)
                pages = self._admission.pages_for(sequence.resident_target)
                demands.append((self._demand(sequence, pages, parent=leader.source_id), sequence))
        return demands, own

    def _go_alone(self, sequence: Sequence) -> None:
        """Have a sequence share nobody's pages; a fork of it that was asked for may have been made."""
        self._leave(sequence)
        if sequence.source_id:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Have its source id removed in the next exchange; the request goes on without it."""
        self._released[sequence.source_id] = sequence
        sequence.source_id = ""

    def _leave(self, sequence: Sequence) -> None:
        if sequence.leader is not None:
            sequence.leader.forks.remove(sequence)
            sequence.leader = None

    def _name(self, sequence: Sequence) -> None:
        if not sequence.source_id:
            self._source_ids += 1
            sequence.source_id = f"{self._source_ids}:{sequence.id}"[:SOURCE_ID_CHARS]

    def _demand(self, sequence: Sequence, total_pages: int, opening: Opening | None = None, parent: str = "") -> Demand:
        at = sequence.num_reported_tokens
        return Demand(
            sequence.source_id,
            start=at,
            tokens=sequence.tokens[at : sequence.num_computed_tokens],
            total_pages=total_pages,
            known_pages=len(sequence.pages),
            opening=opening,
            parent=parent,
        )

    def _has_last_report(self, sequence: Sequence) -> bool:
        failed = sequence.outcome is not None and sequence.outcome.error is not None
        return bool(sequence.pages) and not failed and sequence.unreported_pages(self._page_size) > 0

    def _opening(self, sequence: Sequence) -> tuple[Demand, Sequence]:
        self._name(sequence)
        pages = self._admission.pages_for(sequence.resident_target)
        request = sequence.request
        tokens = request.prompt if not sequence.num_generated_tokens else tuple(sequence.tokens)
        opening = Opening(tokens, request.salt, request.retention)
        return self._demand(sequence, pages, opening), sequence

    def _take(self, sequence: Sequence, demand: Demand, grant: Grant) -> list[PageCopy]:
        copies = self._holds.take(sequence, grant)
        reported = demand.start + len(demand.tokens)
        sequence.num_reported_tokens = max(sequence.num_reported_tokens, reported)
        if demand.total_pages * self._page_size > reported:
            sequence.shares_tail = False
        if sequence.state is State.FINISHED:
            return []  # with another sample of its request
        if demand.opening is not None:
            self._admit(sequence, grant.cached_tokens)
        elif demand.parent:
            self._leave(sequence)
            self._admit(sequence, len(sequence.request.prompt))
        return copies

    def _admit(self, sequence: Sequence, cached_tokens: int) -> None:
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda running: running.order)
        sequence.state = State.RUNNING
        sequence.num_computed_tokens = sequence.num_reported_tokens = cached_tokens
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
            sequence.cached_tokens = cached_tokens
            self.looked_up_tokens += len(sequence.request.prompt)
            self.cached_tokens += cached_tokens

    def _refused(self, sequence: Sequence, demand: Demand, error: ServiceError) -> bool:
        """Take an item's error; returns whether a running request is short of pages."""
        if sequence.leader is not None:  # refused as a fork, it opens as any other
            self._go_alone(sequence)
        if sequence.state is State.FINISHED:
            sequence.num_reported_tokens = sequence.num_computed_tokens  # not worth another exchange
        elif error.code == "RESOURCE_EXHAUSTED":
            if demand.total_pages <= self._admission.pages_for(sequence.resident_target):
                return True
            self._admission.close()  # it asked ahead of need: next it asks for what it needs
        elif isinstance(error, SequenceUnknown | SequenceRemoved):
            log.warning("sequence_lost", request_id=sequence.id, source_id=sequence.source_id, reason=error.reason)
            self._requeue(sequence)
        elif isinstance(error, ExceedsPool):
            self.finish(sequence, Outcome(error=error))
        else:
            log.error("demand_refused", request_id=sequence.id, reason=error.reason, detail=error.message)
            self.finish(sequence, Outcome(error=Internal(f"the page source refused a demand: {error.message}")))
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Give a running request's pages up. Its complete ones stay cached, for it to find again if they last."""
        log.info("preempted", request_id=sequence.id, tokens=sequence.num_tokens, pages=len(sequence.pages))
        self.preemptions += 1
        sequence.preemptions += 1
        self._release(sequence)
        self._requeue(sequence)
        self._admission.close()

    def _requeue(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._wait(sequence)
        if sequence.num_generated_tokens:
            for fork in list(sequence.forks):
                self._go_alone(fork)
        self._holds.drop(sequence)
        sequence.forget_pages()


def _precedes(sequence: Sequence, other: Sequence) -> bool:
    """Whether the other comes before it."""
    return other.order < sequence.order
