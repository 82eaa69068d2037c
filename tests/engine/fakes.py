"""Stand-ins for the engine's edges: a clock, a text stream, a model whose "K and V" are the tokens themselves."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.common.errors import ServiceError
from services.engine.pages.source import Demand, Exchange, Grant, PageCopy, PageSource
from services.engine.sampling.result import Computed, Result
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import FinishReason, Key, Outcome, Request, Stopping, key_of
from services.engine.scheduling.step import Chunk

VOCABULARY = 6
EOS = 5
POISON = -1
#: Rounds without a step that an engine may need although its page source answers and nobody else uses the pool: a last
#: report, a removal, an opening that is refused, and its next try.
FRUITLESS_ROUNDS = 4


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class PlainText:
    """Tokens as letters: 0 is ``a``. ``stop`` strings end the text and are left out of it; nothing is held back."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stop = stop
        self.stopped: str | None = None
        self.text = ""

    def push(self, token: int) -> str:
        added = chr(ord("a") + token)
        for stop in self.stop:
            if (self.text + added).endswith(stop):
                self.stopped = stop
                added = ""
        self.text += added
        return added

    def finish(self) -> str:
        return ""


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (0, 1, 2),
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    seed: int = 0,
    salt: str = "",
    eos: bool = False,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    deadline: float | None = None,
    priority: int = 0,
    n: int = 1,
) -> Request:
    """A request of the fake model; its sampling parameters are the seed."""
    stopping = Stopping(max_tokens, min_tokens, frozenset({EOS} if eos else ()), frozenset(stop_token_ids))
    request = Request(
        request_id, tuple(prompt), stopping, seed, PlainText(stop), salt, deadline=deadline, priority=priority
    )
    others = [
        dataclasses.replace(request, sample=sample, sampling=seed + sample, text=PlainText(stop))
        for sample in range(1, n)
    ]
    return dataclasses.replace(request, others=tuple(others))


def next_token(context: Sequence[int], seed: int) -> int:
    """The fake model: a pure function of everything before and the seed."""
    digest = hashlib.blake2b(repr((tuple(context), seed)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def alone(request: Request) -> list[int]:
    """The output of a request alone on an engine with unlimited memory."""
    tokens = list(request.prompt)
    text = PlainText(request.text.stop)  # type: ignore[attr-defined]
    while True:
        token = next_token(tokens, request.sampling)
        tokens.append(token)
        generated = len(tokens) - len(request.prompt)
        may_stop = generated > request.stopping.min_tokens
        if may_stop and token in request.stopping.eos_token_ids | request.stopping.stop_token_ids:
            break
        text.push(token)
        if text.stopped is not None or generated == request.stopping.max_tokens:
            break
    return tokens[len(request.prompt) :]


class TokenMemory:
    """A runner whose pages hold tokens instead of K and V, and which reads the whole context back at every step.

    Whatever goes wrong with block tables, prefixes, preemption or page lifetimes reads a token that is not the
    sequence's; writing to a page that two block tables share is caught as such.
    """

    def __init__(self, total_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[POISON] * page_size for _ in range(total_pages)]
        self.steps: list[tuple[Chunk, ...]] = []
        self.fault: Callable[[Chunk], ServiceError | None] = lambda chunk: None
        self.copies: list[PageCopy] = []
        self.ahead: str | None = None
        self.flights: list[TokenFlight] = []
        self.unfollowed: Callable[[Sequence[Chunk]], bool] = lambda step: False
        self.most_in_flight = 0

    @property
    def computed(self) -> int:
        """The total number of tokens computed."""
        return sum(chunk.count for step in self.steps for chunk in step)

    def launch(self, step: Sequence[Chunk]) -> TokenFlight:
        """Launch a step on a device that computes it ``ahead``: at once ("early"), or as late as it may ("late")."""
        flight = TokenFlight(self, step, self.flights[-1] if self.flights else None)
        self.flights = [*(one for one in self.flights if not one.waited), flight]
        self.most_in_flight = max(self.most_in_flight, len(self.flights))
        self.steps.append(tuple(step))
        if self.ahead == "early":
            flight.compute()
        return flight

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for flight in self.flights:  # copies are queued behind the steps in flight
            flight.compute()
        for copy in copies:
            self.pages[copy.target] = list(self.pages[copy.source])
        self.copies += copies

    def run(self, step: Sequence[Chunk]) -> list[Result]:
        self.steps.append(tuple(step))
        tables = [(chunk, set(chunk.sequence.pages)) for chunk in step]
        for chunk in step:
            assert chunk.count > 0
            for position in range(chunk.start, chunk.start + chunk.count):
                page = chunk.sequence.pages[position // self.page_size]
                assert not any(page in table for other, table in tables if other is not chunk), "write to a shared page"
                self.pages[page][position % self.page_size] = chunk.sequence.tokens[position]
        return [self._result(chunk) for chunk in step]

    def _result(self, chunk: Chunk) -> Result:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        context = [self.pages[sequence.pages[at // self.page_size]][at % self.page_size] for at in range(end)]
        assert context == sequence.tokens[:end], f"{sequence} reads {context}, wrote {sequence.tokens[:end]}"
        assert chunk.samples == (end == sequence.num_tokens)
        error = self.fault(chunk)
        if error is not None:
            return error
        if not chunk.samples:
            return None
        token = next_token(context, sequence.request.sampling)
        if sequence.num_generated_tokens or not sequence.forks:
            return token
        return Computed(drawn=(token, *(next_token(context, fork.request.sampling) for fork in sequence.forks)))

    def poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.pages[page] = [POISON] * self.page_size


class TokenFlight:
    """A step in flight on a `TokenMemory`, with the block tables and tokens of its launch.

    It computes with these whatever has become of its sequences since: a page that was given to someone else before the
    step was waited for shows as a token that is not the sequence's.
    """

    def __init__(self, memory: TokenMemory, step: Sequence[Chunk], before: TokenFlight | None) -> None:
        self.memory, self.step, self.before = memory, step, before
        self.leads = not memory.unfollowed(step)
        self.waited = self.discarded = False
        self.results: list[Result] | None = None
        self.drawn: dict[int, int] = {}  # by the sequence's identity
        self.tables = [list(chunk.sequence.pages) for chunk in step]
        self.known = [list(chunk.sequence.tokens) for chunk in step]
        self.forks = [
            [] if chunk.sequence.num_generated_tokens or not chunk.samples else list(chunk.sequence.forks)
            for chunk in step
        ]
        for chunk, known in zip(step, self.known, strict=True):
            total = len(known) + chunk.sequence.pending
            assert chunk.source_id == chunk.sequence.source_id
            assert chunk.samples == (chunk.start + chunk.count == total)
            assert chunk.start + chunk.count <= len(known) + 1

    def compute(self) -> None:
        if self.results is not None:
            return
        if self.before is not None:
            self.before.compute()
        memory, size = self.memory, self.memory.page_size
        for at, (chunk, known, table) in enumerate(zip(self.step, self.known, self.tables, strict=True)):
            end = chunk.start + chunk.count
            if end > len(known):
                assert self.before is not None, "nothing samples the pending token"
                known.append(self.before.drawn.get(id(chunk.sequence), 0))
            for position in range(chunk.start, end):
                page = table[position // size]
                others = [set(one) for nth, one in enumerate(self.tables) if nth != at]
                assert not any(page in one for one in others), "write to a shared page"
                memory.pages[page][position % size] = known[position]
        self.results = [self._result(*one) for one in zip(self.step, self.known, self.tables, self.forks, strict=True)]

    def _result(self, chunk: Chunk, known: list[int], table: list[int], forks: list[Any]) -> Result:
        sequence, end, size = chunk.sequence, chunk.start + chunk.count, self.memory.page_size
        context = [self.memory.pages[table[at // size]][at % size] for at in range(end)]
        assert context == known[:end], f"{sequence} reads {context}, wrote {known[:end]}"
        error = self.memory.fault(chunk)
        if error is not None or not chunk.samples:
            return error
        token = next_token(context, sequence.request.sampling)
        self.drawn[id(sequence)] = token
        if not forks:
            return token
        return Computed(drawn=(token, *(next_token(context, fork.request.sampling) for fork in forks)))

    def wait(self) -> list[Result]:
        assert not self.waited and (self.before is None or self.before.waited), "steps are waited for in order"
        self.compute()
        self.waited, self.before = True, None
        assert self.results is not None
        return self.results

    def discard(self) -> None:
        self.wait()
        self.discarded = True


class Scripted:
    """A page source around another one, whose failures a test decides.

    Freshly granted pages are poisoned in ``tokens``. ``late`` serves an exchange when its result is asked for, after
    the step that it overlaps, instead of before it. Each entry of ``faults`` befalls one exchange: an error raised by
    ``result``, after (``served``) or before the exchange took effect.
    """

    def __init__(self, inner: PageSource, tokens: TokenMemory | None = None, *, late: bool = False) -> None:
        self.inner = inner
        self.tokens = tokens
        self.late = late
        self.faults: list[tuple[ServiceError, bool] | None] = []
        self.reopen_faults: list[ServiceError] = []
        self.lease = True
        self.exchanges: list[tuple[list[Demand], list[str]]] = []
        self.names: set[str] = set()  # of sequences that were demanded
        self.failures = 0
        self.reopened = 0
        self.closed = False
        self.silent: float | None = None
        self.tables: dict[str, set[int]] = {}  # pages that a sequence was granted

    @property
    def retains(self) -> bool:
        return self.inner.retains

    @property
    def total_pages(self) -> int:
        return self.inner.total_pages

    @property
    def available_pages(self) -> int | None:
        return self.inner.available_pages

    @property
    def page_size(self) -> int:
        return self.inner.page_size

    @property
    def memory(self) -> Any:
        return self.inner.memory

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    @property
    def silent_since(self) -> float | None:
        return self.silent

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str]) -> Exchange:
        assert not self._in_flight.intersection(removed), "a step in flight has the pages of a removed sequence"
        self.exchanges.append((list(demands), list(removed)))
        self.names.update(demand.sequence_id for demand in demands)
        fault = self.faults.pop(0) if self.faults else None
        return _Pending(self, list(demands), list(removed), fault)

    def serve(self, demands: list[Demand], removed: list[str]) -> list[Grant]:
        grants = self.inner.exchange(demands, removed).result()
        if self.tokens is not None:
            for demand, grant in zip(demands, grants, strict=True):
                known = grant.cached_tokens // self.page_size if demand.opening else 0
                had = self.tables.setdefault(grant.sequence_id, set())
                fresh = {*grant.pages[max(0, known - grant.first_index) :], *(copy.target for copy in grant.copies)}
                self.tokens.poison(fresh - (set() if demand.opening else had) - self.tables.get(demand.parent, set()))
                had.update(grant.pages, fresh)
        return grants

    @property
    def _in_flight(self) -> set[str]:
        """Source ids of the sequences in steps that were not waited for."""
        flights = [] if self.tokens is None else [one for one in self.tokens.flights if not one.waited]
        return {chunk.source_id for flight in flights for chunk in flight.step}

    def may_launch(self) -> bool:
        return self.lease

    def reopen(self) -> None:
        assert not self._in_flight, "a step of the session before is in flight"
        if self.reopen_faults:
            raise self.reopen_faults.pop(0)
        self.inner.reopen()
        self.lease = True
        self.reopened += 1

    def close(self) -> None:
        assert not self._in_flight
        self.closed = True
        self.inner.close()


class _Pending:
    def __init__(
        self, source: Scripted, demands: list[Demand], removed: list[str], fault: tuple[ServiceError, bool] | None
    ) -> None:
        self._source, self._demands, self._removed = source, demands, removed
        served = fault is None or fault[1]
        self._error = None if fault is None else fault[0]
        self._grants: list[Grant] | None = None
        self._serve = served
        if served and not source.late:
            self._grants = source.serve(demands, removed)

    def result(self) -> list[Grant]:
        if self._serve and self._grants is None:
            self._grants = self._source.serve(self._demands, self._removed)
        if self._error is not None:
            self._source.failures += 1
            raise self._error
        assert self._grants is not None
        return self._grants


class Harness:
    """An engine loop driven by hand, and its output by request id."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        max_batch: int = 8,
        max_step_tokens: int = 64,
        max_queue: int = 100,
        max_queue_tokens: int = 1 << 20,
        patience_s: float = 60.0,
        unready_after_s: float = 5.0,
        late: bool = False,
        ahead: str | None = None,
    ) -> None:
        from services.engine.pages.local import LocalPageSource

        self.clock = Clock()
        self.local = LocalPageSource(pages, page_size)
        self.memory = TokenMemory(pages, page_size)
        self.memory.ahead = ahead
        self.source = Scripted(self.local, self.memory, late=late)
        self.tokens: dict[Key, list[int]] = {}
        self.text: dict[Key, str] = {}
        self.ended: dict[Key, Outcome] = {}
        self.events: list[Event] = []
        self.serving: list[bool] = []
        self.fruitless = 0
        self.loop = EngineLoop(
            self.memory,
            self.source,
            Limits(max_batch, max_step_tokens, max_queue, max_queue_tokens),
            self._on_events,
            launch=self.memory.launch if ahead else None,
            patience_s=patience_s,
            unready_after_s=unready_after_s,
            on_serving=self.serving.append,
            clock=self.clock,
        )

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            name = key_of(event.request_id, event.sample)
            assert name not in self.ended, "an event after the last one"
            self.tokens.setdefault(name, []).extend(event.token_ids)
            self.text[name] = self.text.get(name, "") + event.text
            if event.outcome is not None:
                self.ended[name] = event.outcome

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.loop.submit(request)

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            loop, before = self.loop, self._progress
            waits = loop._lost or self.clock.now < max(loop._retry_at, loop.scheduler.admits_at or 0.0)
            delay = loop.iterate()
            self.clock.now += delay + 0.001
            self.check()
            moved = waits or loop._lost or before != self._progress
            idle = not (loop.scheduler.running or loop.scheduler.waiting)
            self.fruitless = 0 if moved or idle or self.shared else self.fruitless + 1
            assert self.fruitless <= FRUITLESS_ROUNDS, f"nothing runs in a pool of one's own: {loop.scheduler}"

    def until_idle(self, limit: int = 3000) -> None:
        """Work until nothing is live; a request that never ends fails the test."""
        for _ in range(limit):
            self.iterate()
            if not self.loop.scheduler.live:
                return
        raise AssertionError(f"not idle after {limit} rounds: {self.loop.scheduler}")

    @property
    def _progress(self) -> tuple[int, ...]:
        return len(self.memory.steps), self.loop.totals.steps, self.source.failures

    @property
    def shared(self) -> bool:
        """Whether another engine holds pages of the pool."""
        return not self.source.names.issuperset(self.local._sequences)

    def check(self) -> None:
        """The invariants between any two rounds."""
        scheduler = self.loop.scheduler
        waiting, running, leaving = list(scheduler.waiting), scheduler.running, list(scheduler.leaving.values())
        everywhere = [*waiting, *running, *leaving]
        assert len(everywhere) == len(set(map(id, everywhere))) == len(scheduler.live)
        assert {sequence.key for sequence in everywhere} == set(scheduler.live)
        assert all(sequence.virtual_arrival for sequence in everywhere), "one without a place in the order goes first"
        for queue in (waiting, running):
            assert [s.order for s in queue] == sorted(s.order for s in queue)
        table = {page for sequence in everywhere for page in sequence.pages}
        assert scheduler.held_pages == len(table)
        assert scheduler.waiting.tokens == sum(sequence.num_tokens for sequence in waiting)
        unfinished = {s.id: s.request.deadline for s in [*waiting, *running] if s.request.deadline is not None}
        assert scheduler._deadlines._at == unfinished
        assert scheduler._admission._overtaken <= set(waiting)
        for sequence in everywhere:
            assert len(set(sequence.pages)) == len(sequence.pages)
            assert sequence.num_reported_tokens <= sequence.num_computed_tokens <= sequence.num_tokens
            assert sequence.num_computed_tokens <= len(sequence.pages) * self.local.page_size or sequence in leaving
            assert all(fork.leader is sequence and fork in waiting for fork in sequence.forks)
            assert sequence.leader is None or sequence in sequence.leader.forks
        if not self.loop._lost:
            given_back = {*scheduler.leaving, *scheduler._released, *scheduler._unsure}
            known = {sequence.source_id for sequence in running} | given_back
            assert self.source.names.intersection(self.local._sequences) <= known, "pages that nothing would free"
        check_local(self.local)

    def check_empty(self) -> None:
        """The invariants when nothing is live."""
        scheduler = self.loop.scheduler
        assert not scheduler.live and not scheduler.waiting and not scheduler.running and not scheduler.leaving
        assert not scheduler.held_pages and not scheduler.take_settled()
        assert not scheduler.waiting.tokens and not len(scheduler._deadlines)
        assert self.local.live_sequences == 0
        assert self.local.free_pages + self.local.cached_pages == self.local.total_pages

    def reason(self, request_id: Key) -> FinishReason | None:
        return self.ended[request_id].reason


def check_local(local: object) -> None:
    """Every page of a local source is in one state, and its books agree."""
    free, cached = local._free, local._cached  # type: ignore[attr-defined]
    holders = [0] * local._total  # type: ignore[attr-defined]
    for held in local._sequences.values():  # type: ignore[attr-defined]
        for page in [*held.pages, *([] if held.copied is None else [held.copied])]:
            holders[page] += 1
    assert holders == local._holders  # type: ignore[attr-defined]
    states = sorted([*free, *cached, *(page for page, count in enumerate(holders) if count)])
    assert states == list(range(local._total))  # type: ignore[attr-defined]
    reachable, stack = set(), [local._root]  # type: ignore[attr-defined]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if node.page >= 0:
            assert node.page not in reachable
            reachable.add(node.page)
    assert reachable == set(local._nodes)  # type: ignore[attr-defined]
    assert set(cached) <= reachable and not reachable & set(free)
