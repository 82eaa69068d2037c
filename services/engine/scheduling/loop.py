"""The engine's thread. Each round: inbox, exchange with the page source, step, outbox.

Other threads only post to the inbox; events return through one callback, in one list per delivery. A token's text is
sent as soon as it is sampled, a request's outcome after its pages are released.

With asynchronous steps a step is launched behind one that is still in flight, so that the device never waits for the
host: between two launches the host learns what the step before last sampled, and sends it.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, Protocol, runtime_checkable

import structlog

from services.common.errors import DeadlineExceeded, Internal, KvCacheDown, ServiceError, SessionExpired
from services.common.tracing.span import Span
from services.engine.pages.source import Demand, Exchange, PageCopy, PageSource
from services.engine.sampling.result import Result
from services.engine.scheduling.event import Event
from services.engine.scheduling.prefill_speed import PrefillSpeed
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.scheduler import Advance, Scheduler
from services.engine.scheduling.sequence import FinishReason, Outcome, Request, Sequence, State, Usage
from services.engine.scheduling.stats import EngineStats, Snapshot, Totals
from services.engine.scheduling.step import Chunk, Flight
from services.engine.scheduling.watchdog import Watchdog

log = structlog.get_logger()

#: How often, in seconds, an idle engine checks that its session is still open; it opens a new one if not.
IDLE_CHECK_S = 1.0
BACKOFF_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
#: Of a request's log line.
_USAGE_FIELDS = tuple(field.name for field in dataclasses.fields(Usage))
#: A step of at most this many requests that brings a first token is waited for before the next one is launched. It may
#: be over before the next one is, and its first token must not wait for that.
FEW = 4


class StepRunner(Protocol):
    """Computes a step synchronously. Each chunk gets a result: its sampled token, an error, or None."""

    def run(self, step: Items[Chunk]) -> list[Result]:
        """A failure of the model is returned as the error of the chunks at fault. Raises if nothing can be computed."""

    def copy_pages(self, copies: Items[PageCopy]) -> None:
        """Copy each source page to its target, between two steps. Raises when a copy fails."""


@runtime_checkable
class Launcher(StepRunner, Protocol):
    """Also computes steps asynchronously."""

    def launch(self, step: Items[Chunk]) -> Flight:
        """Queue a step behind those in flight."""


@dataclasses.dataclass(slots=True)
class _Launched:
    """A step in flight."""

    step: tuple[Chunk, ...]
    flight: Flight
    at: float


class EngineLoop:
    """Drives a scheduler, a runner and a page source.

    ``submit``, ``snapshot``, ``cancel``, ``drain`` and ``stop`` may be called from any thread; ``run``, or ``iterate``
    in a loop of the caller's own, from one thread. Requests fail after ``patience_s`` seconds without a page source.
    ``on_serving`` is called when the engine becomes able or unable to serve: with False after ``unready_after_s``
    seconds without one, or at the end of the patience if that comes first. ``on_failed`` is called after an unexpected
    failure, from which the engine does not recover.
    ``launch`` makes steps asynchronous: it queues a step after those in flight, which ``runner.run`` no longer does.
    ``exchange`` is what makes the source's exchanges if they are traced, with the spans of the requests they are for.
    ``prefill`` is told how long steps take.
    """

    def __init__(
        self,
        runner: StepRunner,
        source: PageSource,
        limits: Limits,
        outbox: Callable[[list[Event]], None],
        *,
        launch: Callable[[Items[Chunk]], Flight] | None = None,
        exchange: Callable[[Items[Demand], Items[str], Items[Span]], Exchange] | None = None,
        prefill: PrefillSpeed | None = None,
        patience_s: float = 60.0,
        unready_after_s: float = 5.0,
        on_serving: Callable[[bool], None] = lambda serving: None,
        on_failed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._launch_step = launch
        self._traced_exchange = exchange
        self._flight: _Launched | None = None  # between two rounds: the one step in flight
        self._landed_at = float("-inf")  # the last step that was in flight
        self._prefill = PrefillSpeed() if prefill is None else prefill
        self._busy_s = 0.0  # of this round: launching steps and waiting for them
        self._source = source
        self._limits = limits
        self._outbox = outbox
        self._patience = patience_s
        self._unready_after = unready_after_s
        self._on_serving = on_serving
        self._on_failed = on_failed
        self._serving = True
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arriving: dict[int, int] = {}  # samples of each request that is still in the inbox
        self._events: list[Event] = []
        self._draining = self._stopping = False
        self._refusal: ServiceError | None = None  # raised for new requests while none can be served
        # The session: lost or not; whether it has answered yet; since when it is unanswered; when to retry.
        self._lost = False
        self._proven = True
        self._down_since: float | None = None
        self._failures = 0
        self._retry_at = float("-inf")
        self.totals = Totals()
        self.stats = EngineStats()
        self.watchdog = Watchdog(clock)
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._limits, self._source.page_size, self._source.total_pages, self._clock)

    # --- from any thread ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Its events go to the outbox; each sample's last one has its outcome."""
        self._arriving[id(request)] = 1 + len(request.others)
        self._inbox.put(partial(self._submit, request))

    def snapshot(self) -> Snapshot:
        """Return the current counts, without waiting for the engine's thread."""
        scheduler = self.scheduler
        # One copy of all live sequences, which nothing interrupts: none is counted twice, or between two states.
        states = [sequence.state for sequence in list(scheduler.live.values())]
        waiting = states.count(State.WAITING)
        return Snapshot(
            running_requests=len(states) - waiting,
            waiting_requests=waiting + sum(list(self._arriving.values())),
            waiting_tokens=scheduler.waiting.tokens,
            held_pages=scheduler.held_pages,
            total_pages=scheduler.total_pages,
            preemptions=scheduler.preemptions,
            looked_up_tokens=scheduler.looked_up_tokens,
            cached_tokens=scheduler.cached_tokens,
            stalled_s=self.watchdog.stalled_s,
        )

    def cancel(self, request_id: str) -> None:
        """Cancel a request; does nothing when it has ended or is unknown."""
        self._inbox.put(partial(self._cancel, request_id))

    def drain(self, error: ServiceError) -> None:
        """Reject new requests and end those that never ran with ``error``; the others continue."""
        self._inbox.put(partial(self._drain, error))

    def stop(self, error: ServiceError) -> None:
        """Reject new requests and end the live ones with ``error``; then ``run`` closes the page source and returns."""
        self._inbox.put(partial(self._stop, error))

    # --- the engine's thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until stopped. Never raises: an unexpected failure ends all requests, and new ones are rejected."""
        try:
            while True:
                delay = self.iterate()
                if self.stopped:
                    break
                self.wait(delay)
        except Exception as error:
            self._fail(error)
            while not self._stopping:
                self._inbox.get()()
                self._flush()
        finally:
            self._close()

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens computed per second, of recent steps; 0 if unknown."""
        return self._prefill.tokens_per_s()

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called and no request holds anything."""
        return self._stopping and not self.scheduler.live

    def wait(self, delay: float) -> None:
        """Process the next inbox message, waiting at most ``delay`` seconds for one."""
        try:
            message = self._inbox.get(block=delay > 0, timeout=delay)
        except queue.Empty:
            return
        message()

    def iterate(self) -> float:
        """Run one round. Returns how many seconds to wait for the inbox before the next one."""
        while not self._inbox.empty():
            self._inbox.get()()
        self._end_overdue()
        steps = self.totals.steps
        if not self._lost and not self._source.may_launch():
            self._lose(SessionExpired("the lease was not renewed in time"))
        now = self._clock()
        overdue = self._down_since is not None and now - self._down_since > self._patience
        if overdue and (self._lost or self._proven):  # give a new session one exchange first
            self._give_up()
        if self._lost:
            delay = self._recover(now)
        else:
            delay = self._round(now) if self._launch_step is None else self._round_ahead(now, self._launch_step)
        self._flush()
        self._show()
        self._watch(stepped=self.totals.steps > steps)
        return max(0.0, min(delay, self.scheduler.next_deadline - self._clock()))

    def _show(self) -> None:
        """Tell whether the engine can serve, if that has changed."""
        since = self._source.silent_since if self._down_since is None else self._down_since
        if self._refusal is not None:
            serving = False
        elif since is None:
            serving = True
        else:
            serving = self._serving and self._clock() - since <= self._unready_after
        if serving != self._serving:
            self._serving = serving
            self._on_serving(serving)

    def _watch(self, *, stepped: bool = False) -> None:
        silent_s = 0.0 if self._down_since is None else self._clock() - self._down_since
        self.watchdog.look(self.scheduler, stepped=stepped, silent_s=silent_s)

    def _round(self, now: float) -> float:
        began = self._clock()
        exchange = self._ask() if now >= self._retry_at else None
        self._deliver()
        return self._run_step(began, exchange, self.scheduler.schedule())

    def _run_step(self, began: float, exchange: Exchange | None, step: tuple[Chunk, ...]) -> float:
        """The rest of a round that ``began`` with that exchange, and waits for its step."""
        launched = computed = self._clock()
        if step:
            results = self._runner.run(step)
            computed = self._clock()
            self.totals.steps += 1
            if self._outlived_lease():
                return 0.0
            self._prefill.step(step, computed - launched)
            self._apply(step, results)
        done = self._clock()
        waited_s = self._collect(exchange) if exchange is not None else 0.0
        if step:
            tokens = sum([chunk.count for chunk in step])
            scheduled_s = (launched - began) + (done - computed)
            self.stats.step(len(step), tokens, scheduled_s, computed - launched, waited_s)
        if step or self._lost:
            return 0.0
        return self._idle_for()

    def _outlived_lease(self) -> bool:
        """Whether the lease ended during the step that is over, which loses the session: others may have written what
        the step has read since.
        """
        if self._source.may_launch():
            return False
        self._lose(SessionExpired("the lease ended during a step"))
        return True

    def _apply(self, step: Items[Chunk], results: Items[Result]) -> None:
        advance = self.scheduler.apply(step, results)
        self._count_tokens(advance)
        self._events += advance.events
        self._deliver()
        if len(step) == 1 and step[0].sequence.num_generated_tokens == 1:
            # Yield the GIL so that a lone request's first token is sent before this thread prepares the next step,
            # which may take longer than the step did. In a larger batch this would delay every request.
            time.sleep(0)

    # --- asynchronous steps -------------------------------------------------------------------------------------

    def _round_ahead(self, now: float, launch: Callable[[Items[Chunk]], Flight]) -> float:
        """A round that leaves a step in flight, if one can be launched after it.

        If requests are opened, their grants come before the step is scheduled, while the one before is computed: their
        first tokens take no more steps than without asynchronous steps. Other grants are not needed before the next
        round's step, since a page is asked for a step ahead.
        """
        exchange = self._ask() if now >= self._retry_at else None
        self._deliver()
        ahead, self._busy_s, waited_s = self._flight, 0.0, 0.0
        if ahead is not None and exchange is not None and self.scheduler.opening:
            waited_s, exchange = self._collect(exchange), None
            if self._lost:
                return 0.0
        step, flying = self.scheduler.schedule(), None
        if ahead is None and _brings_first_token(step):
            return self._run_step(now, exchange, step)
        if step:
            # It may have been long since the round began.
            if ahead is not None and not self._source.may_launch():
                self._lose(SessionExpired("the lease was not renewed in time"))
                return 0.0
            began = self._clock()
            flying = _Launched(step, launch(step), began)
            self._busy_s += self._clock() - began
            self.scheduler.launched(step)
        leads = flying is not None and flying.flight.leads and not _brings_first_token(step)
        if ahead is not None:
            self._flight = flying
            if not self._land(ahead):
                return 0.0
            leads = leads and ahead.flight.leads
        self._flight = flying if leads else None
        if flying is not None and not leads and not self._land(flying):
            return 0.0
        if exchange is not None:
            waited_s = self._collect(exchange)
        if step:
            tokens = sum([chunk.count for chunk in step])
            self.stats.step(
                len(step), tokens, max(0.0, self._clock() - now - self._busy_s - waited_s), self._busy_s, waited_s
            )
        if step or ahead is not None or self._lost:
            return 0.0
        return self._idle_for()

    def _land(self, launched: _Launched) -> bool:
        """Wait for a step and apply it. Returns False if the session is lost: then nothing is in flight any more."""
        began = self._clock()
        results = launched.flight.wait()
        landed = self._clock()
        self._busy_s += landed - began
        self.totals.steps += 1
        if self._outlived_lease():
            return False
        # The device begins a step when it has done the one before.
        self._prefill.step(launched.step, landed - max(launched.at, self._landed_at))
        self._landed_at = landed
        self._apply(launched.step, results)
        return True

    def _ground(self) -> None:
        """Wait for the step in flight, if any, and discard its results."""
        launched, self._flight = self._flight, None
        if launched is not None:
            try:
                launched.flight.discard()
            except Exception as error:
                log.warning("flight_failed", error=type(error).__name__, detail=str(error))

    def _close(self) -> None:
        """Close the session once no step is in flight: closing it says that its pages are no longer used."""
        self._ground()
        self._source.close()

    def _ask(self) -> Exchange | None:
        demands, removed = self.scheduler.demands()
        if not (demands or removed or not self._proven):
            return None
        self.totals.page_calls += 1
        if self._traced_exchange is None:
            return self._source.exchange(demands, removed)
        return self._traced_exchange(demands, removed, self.scheduler.traces())

    def _collect(self, exchange: Exchange) -> float:
        """Wait for an exchange and apply its grants. Returns the seconds both took."""
        started = self._clock()
        try:
            grants = exchange.result()
        except ServiceError as error:
            # Do not wait for a session that has never answered or is about to be closed.
            if isinstance(error, KvCacheDown) and self._proven and not self._stopping:
                self.scheduler.unanswered()
                self._back_off(error)
            else:
                self._lose(error)
        else:
            copies = self.scheduler.granted(grants)
            if copies:  # before the next step, which may write past the copied tokens
                self._runner.copy_pages(copies)
            self._proven, self._down_since, self._failures, self._retry_at = True, None, 0, float("-inf")
            if not self._draining:
                self._refusal = None
        waited_s = self._clock() - started
        self.totals.page_wait_s += waited_s
        self.stats.exchange_wait.observe(waited_s)
        return waited_s

    def _idle_for(self) -> float:
        now, scheduler = self._clock(), self.scheduler
        if scheduler.running or scheduler.leaving or not self._proven:
            return max(0.0, self._retry_at - now)
        admits_at = scheduler.admits_at
        if admits_at is None:
            return IDLE_CHECK_S
        return min(IDLE_CHECK_S, max(0.0, admits_at - now, self._retry_at - now))

    # --- losing and regaining the session -----------------------------------------------------------------------

    def _back_off(self, error: ServiceError) -> None:
        now = self._clock()
        if self._down_since is None:
            self._down_since = now
        self._failures += 1
        self._retry_at = now + BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
        if self._failures.bit_count() == 1:  # at powers of two
            log.warning("kvcache_unreachable", failures=self._failures, reason=error.reason, detail=error.message)

    def _lose(self, error: ServiceError) -> None:
        """The session is lost and its pages with it: every request restarts, keeping its tokens."""
        log.warning("session_lost", reason=error.reason, detail=error.message, running=len(self.scheduler.running))
        self._lost = True
        self._ground()
        if self._down_since is None:
            self._down_since = self._clock()
        if not self._proven:  # lost before its first answer: do not spin
            self._back_off(error)
        self.scheduler.lost_pages()

    def _recover(self, now: float) -> float:
        if now < self._retry_at:
            return self._retry_at - now
        try:
            self._source.reopen()
        except ServiceError as error:
            self._back_off(error)
            return max(0.0, self._retry_at - self._clock())
        self.scheduler.lost_pages(self._source.total_pages)
        self._lost, self._proven = False, False
        self.totals.recoveries += 1
        log.info("session_reopened", waiting=len(self.scheduler.waiting))
        return 0.0

    def _give_up(self) -> None:
        """The daemon has not answered for too long: fail live requests, reject new ones, and keep retrying."""
        if not self._lost:
            self._lose(KvCacheDown("the KV-cache daemon did not answer for too long"))
        error = KvCacheDown(f"the KV-cache daemon has not answered for {self._patience:g} s")
        self._abort_all(error)
        if self._refusal is None:
            self._refusal = error.bare()

    # --- messages -----------------------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        del self._arriving[id(request)]
        refusal = self._refusal
        if refusal is None:
            try:
                sequence = self.scheduler.submit(request)
                self.totals.prompt_tokens += len(request.prompt) * (1 + len(request.others))
                self._events.append(Event(request.request_id, sequence=sequence))
                return
            except ServiceError as error:
                refusal = error
        self.totals.refused[refusal.reason] += 1
        self._events.append(Event(request.request_id, outcome=Outcome(error=refusal)))

    def _cancel(self, request_id: str) -> None:
        for sequence in self.scheduler.samples(request_id):
            self.scheduler.finish(sequence, Outcome(FinishReason.CANCELLED))

    def _abort_all(self, error: ServiceError) -> None:
        for sequence in list(self.scheduler.live.values()):
            self.scheduler.finish(sequence, Outcome(error=error))

    def _end_overdue(self) -> None:
        for sequence in self.scheduler.overdue():
            spent = self._clock() - sequence.request.submitted_at
            generated = sequence.num_generated_tokens
            error = DeadlineExceeded(f"deadline exceeded after {spent:.3g} s, with {generated} tokens generated")
            self.scheduler.finish(sequence, Outcome(error=error))

    def _drain(self, error: ServiceError) -> None:
        self._draining, self._refusal = True, error
        for sequence in list(self.scheduler.waiting):
            # A waiting sample that was admitted before, or whose prompt is being computed, may finish.
            if all(sample.admitted_at is None for sample in sequence.family or (sequence,)):
                self.scheduler.finish(sequence, Outcome(error=error))

    def _stop(self, error: ServiceError) -> None:
        self._draining = self._stopping = True
        self._refusal = error
        self._abort_all(error)

    def _fail(self, error: Exception) -> None:
        log.exception("engine_failed", live=len(self.scheduler.live))
        self._flush()  # requests that had released everything keep their outcomes
        failure = Internal(f"the engine failed: {type(error).__name__}")
        live = list(self.scheduler.live.values())
        self.scheduler = self._new_scheduler()
        self._watch()
        self._close()
        self._events.extend(
            Event(s.id, outcome=Outcome(error=failure), sequence=s, sample=s.request.sample) for s in live
        )
        self.totals.errors[failure.reason] += len(live)
        self._refusal = failure
        self._on_serving(False)
        self._on_failed()
        self._flush()

    # --- events -------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        for sequence in self.scheduler.take_settled():
            outcome = sequence.outcome or Outcome(error=Internal("ended without an outcome"))
            self._count(sequence, outcome)
            self._events.append(Event(sequence.id, outcome=outcome, sequence=sequence, sample=sequence.request.sample))
        self._deliver()

    def _deliver(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._outbox(events)

    def _count_tokens(self, advance: Advance) -> None:
        self.totals.generated_tokens += len(advance.events)
        for waited_s in advance.first_s:
            self.stats.first_token.observe(waited_s)
        for since, tokens in Counter(advance.since).items():
            self.stats.between_tokens.observe(advance.now - since, tokens)

    def _count(self, sequence: Sequence, outcome: Outcome) -> None:
        usage = sequence.usage
        self.stats.ended(usage)
        fields: dict[str, Any] = {"request_id": sequence.id}
        for name in _USAGE_FIELDS:
            value = getattr(usage, name)
            fields[name] = round(value, 6) if isinstance(value, float) else value
        if outcome.reason is not None:
            self.totals.ended[outcome.reason] += 1
        if outcome.error is not None:
            self.totals.errors[outcome.error.reason] += 1
            log.warning("request_failed", reason=outcome.error.reason, detail=outcome.error.message, **fields)
        elif outcome.reason is FinishReason.CANCELLED:
            log.info("request_cancelled", **fields)
        else:
            log.info("request_finished", reason=outcome.reason.name if outcome.reason else "", **fields)


def _brings_first_token(step: Items[Chunk]) -> bool:
    """Whether a step of few requests samples the first token of one."""
    if len(step) > FEW:
        return False
    return any(chunk.samples and chunk.start + chunk.count == len(chunk.sequence.request.prompt) for chunk in step)
