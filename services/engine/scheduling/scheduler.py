"""Schedules the next step's tokens, and the exchange with the page source that runs meanwhile.

One rule covers everything: each request's ``num_computed_tokens`` catches up with its ``num_tokens``. A step has a
token budget: each request that lacks a single token gets it, and the others share the rest, in order. Chunked prefill,
prefix cache hits, decode, and resumption after a preemption are all cases of this rule.

One order, ``Sequence.order``, decides admission and prefill and, from its end, preemption. It is arrival order, with
each request moved ahead by ``priority_step_s`` seconds per point of priority. A request can therefore be overtaken only
by requests that arrive within that time per point of priority difference: no request starves.

A round is ``demands() -> schedule() -> apply() -> granted()``. The demands describe the state after the last
synchronized step and are served while the scheduled step runs, so a page is reported or released only when no step
uses it. A request that ended is *leaving* until its pages are released, and *settled* after that.

With asynchronous steps a round is ``demands() -> granted() -> schedule() -> launched()``, then ``apply()`` of the step
launched in the round before. What a step in flight computes and samples is scheduled as if it were there already; the
demands still describe the synchronized state, and nothing is released that a step in flight was given.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile

import structlog

from services.common.errors import (
    ExceedsPool,
    Internal,
    PagesFilling,
    RequestExists,
    SequenceRemoved,
    SequenceUnknown,
    ServiceError,
)
from services.common.tracing.span import Span
from services.engine.pages.source import Demand, Grant, Opening, PageCopy
from services.engine.sampling.result import Choice, Computed, Draw, Result
from services.engine.scheduling.block_tables import BlockTables
from services.engine.scheduling.event import Event
from services.engine.scheduling.queue.admission import GROWTH_PAGES, Admission, Limits
from services.engine.scheduling.queue.deadlines import Deadlines
from services.engine.scheduling.queue.fill_waits import FillWaits
from services.engine.scheduling.queue.waiting_queue import WaitingQueue
from services.engine.scheduling.sequence import MAX_SAMPLES, Key, Outcome, Request, Sequence, State, key_of
from services.engine.scheduling.step import Chunk, share_out

log = structlog.get_logger()

#: Complete pages that justify a call just to report them. A decoding request reports whenever it allocates a page; this
#: is for long prompts, whose pages other requests may share and which a preemption would otherwise lose.
REPORT_PAGES = 4
SOURCE_ID_CHARS = 128


@dataclass(slots=True)
class Advance:
    """The result of a step: one event per accepted token, in order, and the times needed for latency metrics.

    ``first_s`` has the seconds from submission to first token, for requests that got their first token. ``since`` has
    the time of the previous token for the others; requests that were in the same previous step share that time.
    """

    now: float
    events: list[Event] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    since: list[float] = field(default_factory=list)


class Scheduler:
    """The queues and block tables of one engine. Used by its thread only; times are seconds of the injected clock.

    A live sequence is in exactly one of ``waiting``, ``running`` (both in order) and ``leaving``; ``live`` indexes all
    of them by key. Each sample of a request is a sequence; if one fails, all of them fail.
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
        self._fill_waits = FillWaits(limits.fill_wait_s, clock)
        self._arrivals = 0
        self._source_ids = 0
        self.live: dict[Key, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.leaving: dict[str, Sequence] = {}  # by source id
        self._released: dict[str, Sequence] = {}  # by source id to remove; the request continues under another
        self._unsure: dict[str, Sequence] = {}  # by source id: may be open at the source, the reply was lost
        self._settled: list[Sequence] = []
        self._deadlines = Deadlines()
        self._holds = BlockTables()
        self._sent: tuple[list[tuple[Demand, Sequence]], list[str]] = ([], [])
        self._in_flight: deque[Items[Chunk]] = deque()  # launched and not applied, in order
        self.opening = False  # whether the last demands open sequences
        self.preemptions = 0
        self.looked_up_tokens = 0  # prompt tokens at first admission, and how many of them were cached
        self.cached_tokens = 0

    def __repr__(self) -> str:
        return f"<Scheduler: {len(self.running)} running, {len(self.waiting)} waiting, {len(self.leaving)} leaving>"

    @property
    def held_pages(self) -> int:
        """Distinct pages of live requests."""
        return len(self._holds)

    @property
    def total_pages(self) -> int:
        """Pages in the pool, shared by all engines."""
        return self._admission.total_pages

    @property
    def admits_at(self) -> float | None:
        """When the next waiting request may be opened; None when none waits."""
        if not self.waiting:
            return None
        return max(self._admission.opens_at, self._fill_waits.due_at(one for one in self.waiting if one.leader is None))

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of a live request; infinite when there is none."""
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
        """Returns the live sequences of a request."""
        keys = (key_of(request_id, sample) for sample in range(MAX_SAMPLES))
        return [self.live[key] for key in keys if key in self.live]

    def finish(self, sequence: Sequence, outcome: Outcome) -> None:
        """End a sequence in any state. Every sequence ends here. Idempotent."""
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
            self._fill_waits.forget(sequence)
        sequence.state, sequence.outcome, sequence.finished_at = State.FINISHED, outcome, self._clock()
        self._leave(sequence)
        owed = [source_id for source_id, one in self._released.items() if one is sequence]
        if owed and not sequence.source_id:  # like any other, it settles once its removal is confirmed
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
        """Returns the live sequences of requests whose deadline has passed; each request is returned once."""
        names = self._deadlines.take(self._clock())
        return [one for name in names for one in self.samples(name) if one.state is not State.FINISHED]

    def take_settled(self) -> list[Sequence]:
        """Removes and returns the sequences that ended and hold no pages."""
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
        """Returns the next exchange: demands, and source ids to remove. Both are empty when no exchange is needed.

        Complete pages are reported with any exchange that is sent anyway. The source handles removals before demands,
        so a request that ends with unreported complete pages is removed one exchange later.

        If a reply was lost, the source may have opened a waiting request. Such an opening is repeated or removed:
        otherwise it could hold pages that requests ahead of it wait for.
        """
        removed, urgent, along, returning = list[str](), [], [], []
        size, held_back = self._page_size, list[Sequence]()
        busy = self._busy() if self._in_flight and (self.leaving or self._released) else frozenset[str]()
        for source_id, sequence in self.leaving.items():
            if source_id in busy:
                continue
            if sequence.forks or self._has_last_report(sequence):
                urgent.append((self._demand(sequence, 0), sequence))
            else:
                removed.append(source_id)
                returning.append(sequence.pages)
                self._admission.open()
        for sequence in self.running:
            if (sequence.shares_tail or sequence.forks) and sequence.held:
                # Report the pages that its forks share before the forks; its own growth comes after them.
                urgent.append((self._demand(sequence, 0), sequence))
                held_back.append(sequence)
                continue
            reported, worth_a_call = sequence.num_reported_tokens, False
            unreported = sequence.num_computed_tokens // size - reported // size
            if unreported:
                in_prompt = reported < len(sequence.request.prompt)
                # While it decodes, a growth normally comes first and reports them.
                worth_a_call = unreported >= (REPORT_PAGES if in_prompt else 2 * GROWTH_PAGES)
            if worth_a_call or len(sequence.tokens) + sequence.pending >= len(sequence.pages) * size:
                pages = self._admission.growth(sequence)
                if worth_a_call or pages > len(sequence.pages):
                    urgent.append((self._demand(sequence, pages), sequence))
                    continue
            if unreported:
                along.append(sequence)
        forks, openings = self._joining(returning) if self.waiting else ([], [])
        for sequence in held_back:
            if sequence.held:  # by the forks in this exchange
                sequence.shares_tail = True
                forks.append((self._demand(sequence, self._admission.growth(sequence)), sequence))
        self._release_unsure({demand.sequence_id for demand, _ in (*forks, *openings)})
        removed += [source_id for source_id in self._released if source_id not in busy]
        self.opening = bool(forks or openings)
        if not (removed or urgent or openings):
            return [], []
        demands = [*urgent, *((self._demand(sequence, 0), sequence) for sequence in along), *forks, *openings]
        self._sent = (demands, removed)
        return [demand for demand, _ in demands], removed

    def traces(self) -> list[Span]:
        """Returns the spans of the sampled requests that the last ``demands()`` are for, each once."""
        demands, removed = self._sent
        gone = (self.leaving.get(source_id) or self._released.get(source_id) for source_id in removed)
        spans = [sequence.request.trace for _, sequence in demands]
        spans += [sequence.request.trace for sequence in gone if sequence is not None]
        return list({id(span): span for span in spans if span is not None}.values())

    def _joining(self, returning: Items[Items[int]]) -> tuple[list[tuple[Demand, Sequence]], ...]:
        """Returns the demands of forks and of other waiting requests to open now, once ``returning`` is released."""
        held = self._holds.without(returning)
        forks, own = self._forks(held)
        free = self._fill_waits.due(sequence for sequence in self.waiting if sequence.leader is None)
        opened = [*self.running, *(sequence for _, sequence in forks)]
        return forks, [self._opening(sequence) for sequence in self._admission.candidates(free, opened, held + own)]

    def _release_unsure(self, asked: set[str]) -> None:
        """Remove the unanswered openings that this exchange does not repeat."""
        for source_id, sequence in self._unsure.items():
            if sequence.state is State.WAITING and sequence.source_id == source_id and source_id not in asked:
                self._release(sequence)
        self._unsure.clear()

    def schedule(self) -> tuple[Chunk, ...]:
        """Returns the chunks of the next step."""
        return share_out(self.running, self._max_step_tokens, self._page_size)

    def launched(self, step: Items[Chunk]) -> None:
        """A step was launched and will be applied later, in order of launch."""
        self._in_flight.append(step)
        for chunk in step:
            sequence = chunk.sequence
            sequence.in_flight += chunk.count
            if chunk.samples:
                sequence.pending += 1

    def _busy(self) -> frozenset[str]:
        """Source ids of the sequences whose pages a step in flight may read and write."""
        return frozenset(chunk.source_id for step in self._in_flight for chunk in step)

    def apply(self, step: Items[Chunk], results: Items[Result]) -> Advance:
        """Commit a synchronized step; ``results[i]`` is what chunk i sampled, or the error that ends its request.

        The results of a sequence that has ended or lost its pages since the launch are discarded.
        """
        advance, running = Advance(self._clock()), State.RUNNING
        behind = bool(self._in_flight)
        if behind:
            self._in_flight.popleft()
        for chunk, result in zip(step, results, strict=True):
            sequence = chunk.sequence
            if sequence.state is not running or (behind and sequence.source_id != chunk.source_id):
                continue
            if behind:
                sequence.in_flight -= chunk.count
                if chunk.samples:
                    sequence.pending -= 1
            if isinstance(result, ServiceError):
                self.finish(sequence, Outcome(error=result))
                continue
            sequence.num_computed_tokens = chunk.start + chunk.count
            if isinstance(result, Computed):
                sequence.prompt_logprobs.extend(result.prompt)
                takers = [sequence, *sequence.forks][: len(result.drawn)]
                for taker, draw in zip(takers, result.drawn, strict=True):
                    if taker.state is not State.FINISHED:  # an earlier sample may have failed the family
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
        if leader is not None:  # the prompt is computed for this fork too
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
        """Apply the grants of the last ``demands()``. Returns the page copies to make before the next step."""
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
                continue  # an earlier grant of this exchange requeued it
            error, waiting = grant.error, sequence.state is State.WAITING
            offered = demand.opening is not None and demand.opening.fill_wait_s is not None
            if isinstance(error, PagesFilling) and offered and waiting:
                self._fill_waits.refused(sequence, error.retry_after_s or 0.0)
                continue
            self._fill_waits.over(sequence)
            if error is None:
                copies += self._take(sequence, demand, grant)
                if demand.opening is not None or demand.parent:
                    opened.append(sequence)
            elif waiting and (error.code == "RESOURCE_EXHAUSTED" or isinstance(error, PagesFilling)):
                if sequence.leader is not None:  # refused as a fork: open it separately
                    self._go_alone(sequence)
                refused.append(sequence)  # short of pages, quota or sequences; retry later
            else:
                short |= self._refused(sequence, demand, error)
        self._admission.answered(opened, refused)
        # Pages about to be released may suffice. Otherwise preempt the last in order. The first request is preempted
        # only if it is the only one running: then other engines hold the pages it needs.
        if short and self.running and not self.leaving and not self._released:
            self._preempt(self.running[-1])
        return copies

    def unanswered(self) -> None:
        """The last exchange got no reply, but may have been served. The next one repeats its removals, reports,
        growths and still wanted openings, and removes its other openings.
        """
        (demands, _), self._sent = self._sent, ([], [])
        self._unsure = {
            demand.sequence_id: sequence for demand, sequence in demands if demand.opening is not None or demand.parent
        }

    def lost_pages(self, total_pages: int | None = None) -> None:
        """The session is lost with all pages: requeue running requests with their tokens, and settle leaving ones.

        No step may be in flight; what the last ones computed is discarded.
        """
        self._sent = ([], [])
        self._in_flight.clear()
        self._released.clear()
        self._unsure.clear()
        self._fill_waits.lost()
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
        """Returns the demands that fork computed prompts, and how many private pages they take; live requests keep
        ``held`` pages. A fork that cannot be opened now is opened separately later, because the leader moves on and its
        pages no longer match the fork. So is a fork that would take the slot of a waiting request that precedes it.
        """
        demands, own, opened = list[tuple[Demand, Sequence]](), 0, list(self.running)
        leaders = [one for one in (*self.running, *self.leaving.values()) if one.forks and one.num_generated_tokens]
        for leader in sorted(leaders, key=lambda one: one.order):
            before = takewhile(partial(_precedes, leader.forks[0]), self.waiting)
            ready = (one for one in before if one.leader is None and self._fill_waits.is_due(one))
            ahead = list(islice(ready, self._max_batch))
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
        """Detach a fork from its leader, and release its source id: the source may have created the fork."""
        self._leave(sequence)
        if sequence.source_id:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Remove its source id in the next exchange; the request continues without one."""
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
        wait_s = self._fill_waits.offer(sequence)
        opening = Opening(tokens, request.salt, request.retention, request.reuse_hint, wait_s)
        return self._demand(sequence, pages, opening), sequence

    def _take(self, sequence: Sequence, demand: Demand, grant: Grant) -> list[PageCopy]:
        copies = self._holds.take(sequence, grant)
        reported = demand.start + len(demand.tokens)
        sequence.num_reported_tokens = max(sequence.num_reported_tokens, reported)
        if demand.total_pages * self._page_size > reported:
            sequence.shares_tail = False
        if sequence.state is State.FINISHED:
            return []  # another sample failed its request
        if demand.opening is not None:
            self._admit(sequence, grant.cached_tokens)
        elif demand.parent:
            self._leave(sequence)
            self._admit(sequence, len(sequence.request.prompt))
        return copies

    def _admit(self, sequence: Sequence, cached_tokens: int) -> None:
        self.waiting.remove(sequence)
        self._fill_waits.forget(sequence)
        bisect.insort(self.running, sequence, key=lambda running: running.order)
        sequence.state = State.RUNNING
        sequence.num_computed_tokens = sequence.num_reported_tokens = cached_tokens
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
            sequence.cached_tokens = cached_tokens
            self.looked_up_tokens += len(sequence.request.prompt)
            self.cached_tokens += cached_tokens

    def _refused(self, sequence: Sequence, demand: Demand, error: ServiceError) -> bool:
        """Handle a grant's error. Returns whether a running request is short of pages."""
        if sequence.leader is not None:  # refused as a fork: open it separately
            self._go_alone(sequence)
        if sequence.state is State.FINISHED:
            sequence.num_reported_tokens = sequence.num_computed_tokens  # not worth another exchange
        elif error.code == "RESOURCE_EXHAUSTED":
            if demand.total_pages <= self._admission.pages_for(sequence.resident_target):
                return True
            self._admission.close()  # the refused demand was ahead of need; the next one is not
        elif isinstance(error, SequenceUnknown | SequenceRemoved):
            log.warning("sequence_lost", request_id=sequence.id, source_id=sequence.source_id, reason=error.reason)
            if sequence.state is State.RUNNING:
                # The source ended it and keeps its pages, which a step was to write: no step does from now on.
                self._release(sequence)
            self._requeue(sequence)
        elif isinstance(error, ExceedsPool):
            self.finish(sequence, Outcome(error=error))
        else:
            log.error("demand_refused", request_id=sequence.id, reason=error.reason, detail=error.message)
            self.finish(sequence, Outcome(error=Internal(f"the page source refused a demand: {error.message}")))
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Release a running request's pages. Reported complete pages stay cached and can be hit until evicted."""
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
    """Whether ``other`` comes before ``sequence``."""
    return other.order < sequence.order
