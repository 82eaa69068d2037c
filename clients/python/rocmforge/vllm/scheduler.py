"""The half of the connector in vLLM's scheduler: which prefixes to look up, to load and to save.

It never calls the daemon: what it wants goes to the worker with the next step, and is answered with a later one. Pure
Python: requests and the block pool are vLLM's, seen through the protocols below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rocmforge.vllm.plan import Load, Opening, Plan, Report, Save


class Request(Protocol):
    """vLLM's ``Request``, as far as it is read here."""

    request_id: str
    num_computed_tokens: int
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt's and the generated ones."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """They themselves."""


class BlockPool(Protocol):
    """vLLM's ``BlockPool``: a block that was touched is not reused until it is freed as often."""

    @property
    def blocks(self) -> Sequence[Any]:
        """All of them, by number."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks."""

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """Let go of them."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One step of vLLM's scheduler. By request: ``tables`` has the block tables that are new, ``grown`` the blocks that
    were added to others, ``computed`` the tokens that have been computed when the step is over.
    """

    tables: Mapping[str, Sequence[int]] = field(default_factory=dict)
    grown: Mapping[str, Sequence[int]] = field(default_factory=dict)
    computed: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request that shares its pages. ``resident`` tokens are in pages of its sequence, and the saves of those up to
    ``submitted`` are in progress. Without ``sequence`` it has none yet; ``open`` is set once the daemon has opened it.
    A request that ``gave_up`` does not look up, and an ``unlucky`` one does not load, since a load of it has failed.
    """

    request: Request
    salt: str
    sequence: str = ""
    asked_at: float = 0.0
    open: bool = False
    resident: int = 0
    submitted: int = 0
    retry_at: int = 0
    local: int = 0
    load: Load | None = None
    gave_up: bool = False
    unlucky: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Whether vLLM may be waiting for its lookup or its load."""
        return self.load is not None or (self.sequence != "" and not self.open and not self.gave_up)

    def forget(self) -> None:
        """The sequence is gone, and with it all that the daemon held for it."""
        self.sequence, self.open, self.resident, self.submitted, self.retry_at = "", False, 0, 0, 0


@dataclass(frozen=True, slots=True)
class Published:
    """Tokens [start, stop) of a request have been published."""

    request: Request
    start: int
    stop: int


class SchedulerHalf:
    """Tracks each request from its first look at the cache to its end.

    ``salt_of`` gives the salt that a request shares its pages under, None if it must not share any. A lookup that is
    not answered within ``lookup_timeout_s`` counts as a miss.
    """

    def __init__(
        self,
        *,
        page_size: int,
        block_size: int,
        salt_of: Callable[[Any], str | None],
        lookup_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_size, self._block_size = page_size, block_size
        self._salt_of = salt_of
        self._lookup_timeout_s = lookup_timeout_s
        self._clock = clock
        self._pool: BlockPool | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._by_sequence: dict[str, _Tracked] = {}
        self._sequences = 0
        self._session = 0
        self._plan = Plan()
        self._saves: dict[int, tuple[_Tracked, Save]] = {}
        self._numbered = 0
        self._published: list[Published] = []

    def bind(self, pool: BlockPool) -> None:
        """Take the pool whose blocks are held while a save reads them."""
        self._pool = pool

    @property
    def pending(self) -> bool:
        """Whether something is left to be sent or reported, so that vLLM must keep stepping."""
        return bool(self._saves or not self._plan.empty)

    # --- what vLLM asks -------------------------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the ``computed`` ones can be loaded; None while the daemon has not answered."""
        tracked = self._track(request)
        if tracked is None or request.skip_reading_prefix_cache or tracked.gave_up or tracked.unlucky:
            return 0, False
        if not tracked.sequence:
            if request.num_tokens <= self._page_size:
                return 0, False  # the last token is never matched
            self._ask(tracked, request.num_tokens)
        if computed >= (request.num_tokens - 1) // self._block_size * self._block_size:
            return 0, False  # vLLM has all of it: what the daemon answers is for saves alone
        if not tracked.open:
            if self._clock() - tracked.asked_at < self._lookup_timeout_s:
                return None, False
            tracked.gave_up = True
            return 0, False
        # One token at least has to be computed, and vLLM takes whole blocks.
        usable = min(tracked.resident, request.num_tokens - 1) // self._block_size * self._block_size
        tracked.local = computed
        return (usable - computed, True) if usable > computed else (0, False)

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """vLLM gave the request these blocks, its whole table, and wants ``external`` tokens loaded into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks)
        tracked.gave_up = False  # it may look again after a preemption
        tracked.load = None
        if external:
            start, stop = tracked.local, tracked.local + external
            wanted = list(blocks[start // self._block_size : -(-stop // self._block_size)])
            tracked.load = Load(request.request_id, tracked.sequence, start, stop, wanted)
            self._plan.loads.append(tracked.load)

    def finished(self, request: Request, blocks: Sequence[int]) -> None:
        """The request is over: save what is complete of it, and end its sequence."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.load is None:
            # The last token was sampled and never run. What a step in flight computes is written before the save reads.
            tracked.blocks = list(blocks)
            self._save(tracked, min(request.num_computed_tokens, request.num_tokens - 1), final=True)
        self._drop(tracked)

    def plan(self, step: Scheduled) -> Plan:
        """What this step asks of the worker. Blocks to be saved are held from here on."""
        for request_id, table in step.tables.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.blocks = list(table)
        for request_id, blocks in step.grown.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.blocks.extend(blocks)
        for request_id, computed in step.computed.items():
            if (tracked := self._tracked.get(request_id)) is None:
                continue
            known = min(computed, tracked.request.num_tokens)  # a token that is not back from the GPU has no number yet
            if tracked.sequence:
                self._save(tracked, known)
            elif self._session and known >= self._page_size and not tracked.gave_up:
                self._ask(tracked, known)
        plan, self._plan = self._plan, Plan()
        idle = not step.computed
        waits = idle and any(one.waits for one in self._tracked.values())
        return Plan(plan.openings, plan.loads, plan.saves, plan.endings, idle=idle, waits=waits)

    def report(self, report: Report) -> None:
        """Take the worker's report."""
        if report.session != self._session:
            self._session = report.session
            for tracked in self._tracked.values():
                tracked.gave_up = False
                if tracked.open:  # what was only asked for is answered by the session that it comes to
                    self._drop(tracked)
        for sequence, resident in report.opened.items():
            opened = self._by_sequence.get(sequence)
            if opened is None:
                continue
            if resident is None:
                self._drop(opened)
                opened.gave_up = True
            else:
                opened.open, opened.resident, opened.submitted = True, resident, resident
        for number, done in report.saved.items():
            self._saved(number, done)
        for sequence in report.lost:
            if (ended := self._by_sequence.get(sequence)) is not None:
                self._drop(ended)
        for request_id in report.loaded:
            loaded = self._tracked.get(request_id)
            if loaded is not None and loaded.load is not None:
                loaded.unlucky = not report.unloaded.isdisjoint(loaded.load.blocks)
                loaded.load = None

    def take_published(self) -> list[Published]:
        """What was published since the last call."""
        taken, self._published = self._published, []
        return taken

    def reset(self) -> None:
        """Share nothing more of what was computed so far. Saves under way go on, under the salt they began with."""
        for tracked in self._tracked.values():
            self._drop(tracked)
        self._tracked.clear()

    # --- a request's sequence -------------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None and (salt := self._salt_of(request)) is not None:
            tracked = self._tracked[request.request_id] = _Tracked(request, salt)
        return tracked

    def _ask(self, tracked: _Tracked, tokens: int) -> None:
        self._sequences += 1
        # The number makes it unique in the session: vLLM's ids may come again.
        tracked.sequence = f"{self._sequences}:{tracked.request.request_id}"[:128]
        tracked.asked_at = self._clock()
        self._by_sequence[tracked.sequence] = tracked
        self._plan.openings.append(
            Opening(tracked.sequence, list(tracked.request.all_token_ids[:tokens]), tracked.salt)
        )

    def _drop(self, tracked: _Tracked) -> None:
        """Have its sequence ended, whether it is open, about to be, or gone, which changes nothing then."""
        if tracked.sequence:
            self._plan.endings.append(tracked.sequence)
            self._by_sequence.pop(tracked.sequence, None)
            tracked.forget()

    def _save(self, tracked: _Tracked, known: int, *, final: bool = False) -> None:
        stop = known // self._page_size * self._page_size
        if not tracked.open or stop <= tracked.submitted or (stop < tracked.retry_at and not final):
            return
        pool = self._pool
        if pool is None:
            raise RuntimeError("no block pool is bound")
        start, size = tracked.submitted, self._block_size
        blocks = tracked.blocks[start // size : -(-stop // size)]
        self._numbered += 1
        save = Save(self._numbered, tracked.sequence, start, list(tracked.request.all_token_ids[start:stop]), blocks)
        pool.touch([pool.blocks[block] for block in blocks])
        tracked.submitted = stop
        self._saves[save.number] = tracked, save
        self._plan.saves.append(save)

    def _saved(self, number: int, done: bool) -> None:
        found = self._saves.pop(number, None)
        if found is None:
            return
        tracked, save = found
        if self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(save.blocks)])
        if done:
            self._published.append(Published(tracked.request, save.start, save.stop))
        if tracked.sequence != save.sequence:
            return  # of an earlier session
        if done:
            tracked.resident = max(tracked.resident, save.stop)
        else:  # the pool is full: try again when there is more to save
            tracked.submitted, tracked.retry_at = tracked.resident, save.stop + self._page_size
