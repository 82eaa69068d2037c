"""The half of the connector in vLLM's worker: the session with the daemon, and a thread that copies blocks and pages.

The thread makes every call of the session, so nothing that the daemon does can hold up a step. Without a session every
lookup is a miss and every load fails, at once, and the thread tries to open one until it can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rocmforge.client.demands import Demand, Grant
from rocmforge.client.errors import KvCacheDown, ServiceError
from rocmforge.client.events import LOGGED, EventLog
from rocmforge.vllm.plan import Load, Opening, Plan, Report, Save

#: Seconds between attempts to open a session: the first, and the longest.
BACKOFF_S, MAX_BACKOFF_S = 0.25, 5.0
IDLE_S = 0.5
#: A sequence is gone, whatever is done about it.
_GONE = frozenset({"SEQUENCE_UNKNOWN", "SEQUENCE_REMOVED", "SEQUENCE_MISMATCH", "POSITION_MISMATCH"})


class Session(Protocol):
    """What is used of `rocmforge.client.KvCache`."""

    @property
    def pages(self) -> Any:
        """The pages of this session."""

    def step(self, demands: Sequence[Demand], removed: Sequence[str] = ()) -> list[Grant]:
        """Make a step call."""

    def may_write(self) -> bool:
        """Whether the pages are certain to be this session's."""

    def reopen(self) -> None:
        """Open a session."""

    def close(self) -> None:
        """End it."""


class Blocks(Protocol):
    """vLLM's blocks, and the copies between them and the daemon's pages, which have arrived when ``load`` or ``save``
    returns.
    """

    @property
    def order(self) -> str:
        """How pages are filled: ``native`` or ``packed``."""

    def attach(self, pages: Any) -> None:
        """Take the pages of a session."""

    def detach(self) -> None:
        """Keep nothing of them."""

    def mark(self) -> Any:
        """A point after all that vLLM has launched so far, for ``load`` and ``save`` to wait for."""

    def load(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: Any) -> int:
        """Copy tokens [start, stop) of a block table into blocks; returns the bytes."""

    def save(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: Any) -> int:
        """Copy tokens [start, stop) from blocks into the pages of a block table; returns the bytes."""


@dataclass(slots=True)
class Counts:
    """What the worker has done since this was last read; seconds of copies, bytes, and tokens."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float = 1) -> None:
        """Count."""
        self.values[name] = self.values.get(name, 0) + value


@dataclass(slots=True)
class _Sequence:
    """A sequence of this session: its pages, how many tokens the daemon has of it."""

    table: list[int]
    resident: int


#: A sequence by name, and what is to be saved to its pages: each save with what it waits for, or once it is copied.
_Growing = tuple[str, _Sequence, list[tuple[Save, Any]]]
_Grown = tuple[str, _Sequence, list[Save]]


@dataclass(slots=True)
class _Jobs:
    openings: list[Opening] = field(default_factory=list)
    loads: list[tuple[Load, Any]] = field(default_factory=list)
    saves: list[tuple[Save, Any]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.openings or self.loads or self.saves or self.endings)


class WorkerHalf:
    """Serves the plans of the scheduler's half. ``submit``, ``wait`` and ``collect`` are vLLM's worker's to call."""

    def __init__(
        self,
        session: Session,
        blocks: Blocks,
        *,
        page_size: int,
        log: EventLog = LOGGED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._blocks, self._page_size, self._log, self._clock = session, blocks, page_size, log, clock
        self._changed = threading.Condition()
        self._jobs = _Jobs()
        self._report = Report()
        self._counts = Counts()
        self._number = 0  # of the session; 0 while there is none
        self._sessions = 0
        self._refused_with = ""
        self._sequences: dict[str, _Sequence] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rocmforge-vllm", daemon=True)

    def start(self) -> None:
        """Open the session, and start the thread.

        A daemon that is not there, or says to come back, is waited for by the thread. Raises the ServiceError that it
        refuses this pool with otherwise: nothing that is tried later helps.
        """
        refused = self._open()
        if refused is not None and not isinstance(refused, KvCacheDown) and refused.retry_after_s is None:
            self._session.close()
            raise refused
        self._thread.start()

    # --- vLLM's thread --------------------------------------------------------------------------------------------

    def submit(self, plan: Plan, *, saves: bool) -> None:
        """Take a plan, but for its saves: those are taken with ``saves`` alone, when the step that computes is under
        way, and nothing else is.
        """
        with self._changed:
            up = self._number > 0
            if saves:
                if plan.saves and up:
                    after = self._blocks.mark()
                    self._jobs.saves += [(save, after) for save in plan.saves]
                self._report.saved |= {} if up else dict.fromkeys((save.number for save in plan.saves), False)
            elif up:
                self._jobs.openings += plan.openings
                self._jobs.endings += plan.endings
                after = self._blocks.mark() if plan.loads else None
                self._jobs.loads += [(load, after) for load in plan.loads]
            else:
                self._report.opened |= dict.fromkeys(opening.sequence for opening in plan.openings)
                self._unloaded(plan.loads)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to collect, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._report.empty, timeout_s)

    def collect(self) -> Report:
        """What happened since the last call."""
        with self._changed:
            report, self._report = self._report, Report()
            report.session = self._number
            return report

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._changed:
            taken, self._counts = self._counts.values, Counts()
            return taken

    @property
    def connected(self) -> bool:
        """Whether there is a session."""
        return self._number > 0

    def close(self) -> None:
        """Finish what is being copied and end the session. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread of its own ------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = BACKOFF_S
        while not self._closed:
            if self._number:
                backoff = BACKOFF_S
                self._serve_or_lose(self._next())
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._closed, backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)
            if not self._closed:
                self._open()
        self._lose(_Jobs(), "closed")
        self._session.close()

    def _next(self) -> _Jobs:
        with self._changed:
            # Looks up now and then, to see a lease that ended while there was nothing to do.
            self._changed.wait_for(lambda: self._closed or bool(self._jobs), IDLE_S)
            jobs, self._jobs = self._jobs, _Jobs()
            return jobs

    def _open(self) -> ServiceError | None:
        try:
            self._session.reopen()
            self._blocks.attach(self._session.pages)
        except ServiceError as error:
            if error.reason != self._refused_with:
                self._log.warning("kvcache_unavailable", reason=error.reason, detail=error.message)
            self._refused_with = error.reason
            return error
        self._refused_with = ""
        with self._changed:
            self._sessions += 1
            self._number = self._sessions
            self._counts.add("sessions")
        return None

    def _serve_or_lose(self, jobs: _Jobs) -> None:
        try:
            if jobs:
                self._serve(jobs)
            elif not self._session.may_write():
                self._session.step(())  # renews the lease, or learns that it is over
        except ServiceError as error:
            self._lose(jobs, error.reason)
        except Exception as error:  # whatever it is, nobody may wait for this thread
            self._log.error("kvcache_connector_failed", error=repr(error))
            self._lose(jobs, "INTERNAL")

    def _lose(self, jobs: _Jobs, reason: str) -> None:
        """There is no session any more: answer every outstanding request."""
        self._blocks.detach()
        self._sequences.clear()
        with self._changed:
            lost, self._number = self._number, 0
            self._report.opened = dict.fromkeys(self._report.opened)  # whatever was opened, it is gone
            for some in (jobs, self._jobs):
                self._report.opened |= dict.fromkeys(
                    opening.sequence for opening in some.openings if opening.sequence not in self._report.opened
                )
                self._report.saved |= {
                    save.number: False for save, _ in some.saves if save.number not in self._report.saved
                }
                self._unloaded([load for load, _ in some.loads if load.request not in self._report.loaded])
            self._jobs = _Jobs()
            self._changed.notify_all()
        if lost and not self._closed:
            self._log.warning("kvcache_lost", reason=reason)
            self._count("lost_sessions")

    def _serve(self, jobs: _Jobs) -> None:
        while jobs.loads:  # first, since requests wait for them
            self._load(*jobs.loads[0])
            del jobs.loads[0]
        growing = self._growing(jobs)
        demands = [Demand.of_prompt(one.sequence, one.tokens, 0, salt=one.salt) for one in jobs.openings]
        demands += [
            Demand.of_step(name, sequence.resident, (), saves[-1][0].stop // self._page_size, len(sequence.table))
            for name, sequence, saves in growing
        ]
        # A sequence that also has something to save ends with the next call.
        busy = {name for name, _, _ in growing}
        removed = [name for name in jobs.endings if name not in busy]
        if not demands and not removed:
            return
        grants = self._session.step(demands, removed)
        for name in removed:
            self._sequences.pop(name, None)
        opened = len(jobs.openings)
        self._opened(jobs, grants[:opened])
        written = self._written(growing, grants[opened:])
        if written or busy:
            self._publish(jobs, written, [name for name in jobs.endings if name in busy])

    def _opened(self, jobs: _Jobs, grants: Sequence[Grant]) -> None:
        with self._changed:
            for opening, grant in zip(jobs.openings, grants, strict=True):
                if grant.error is None:
                    self._sequences[opening.sequence] = _Sequence(list(grant.pages), grant.cached_tokens)
                    self._report.opened[opening.sequence] = grant.cached_tokens
                    self._counts.add("lookup_tokens", len(opening.tokens))
                    self._counts.add("hit_tokens", grant.cached_tokens)
                else:
                    self._report.opened[opening.sequence] = None
                    self._counts.add("refused_lookups")
            jobs.openings.clear()
            self._changed.notify_all()

    def _growing(self, jobs: _Jobs) -> list[_Growing]:
        """The saves that fit on what the daemon has, by sequence; the others have failed."""
        by_name: dict[str, list[tuple[Save, Any]]] = {}
        for save, after in jobs.saves:
            sequence = self._sequences.get(save.sequence)
            before = by_name.get(save.sequence)
            at = before[-1][0].stop if before else sequence.resident if sequence else -1
            if save.start == at:
                by_name.setdefault(save.sequence, []).append((save, after))
            else:
                self._saved(save, False)
        return [(name, self._sequences[name], saves) for name, saves in by_name.items()]

    def _written(self, growing: Sequence[_Growing], grants: Sequence[Grant]) -> list[_Grown]:
        written: list[_Grown] = []
        for (name, sequence, saves), grant in zip(growing, grants, strict=True):
            if grant.error is not None:
                self._refused(name, grant.error, [save for save, _ in saves])
                continue
            sequence.table += grant.pages
            for save, after in saves:
                if not self._session.may_write():
                    raise KvCacheDown("the lease may be over")
                self._copied("save", self._blocks.save, sequence.table, save, after)
            written.append((name, sequence, [save for save, _ in saves]))
        return written

    def _publish(self, jobs: _Jobs, written: Sequence[_Grown], ended: Sequence[str]) -> None:
        """Report what was copied, whose bytes have arrived: from here on others read them. Then end sequences."""
        demands = [
            Demand.of_step(
                name,
                sequence.resident,
                [token for save in saves for token in save.tokens],
                len(sequence.table),
                len(sequence.table),
            )
            for name, sequence, saves in written
        ]
        grants = self._session.step(demands) if demands else []
        for (name, sequence, saves), grant in zip(written, grants, strict=True):
            if grant.error is not None:
                self._refused(name, grant.error, saves)
                continue
            sequence.resident = saves[-1].stop
            for save in saves:
                self._saved(save, True)
        jobs.saves.clear()
        if ended:
            self._session.step((), ended)
            for name in ended:
                self._sequences.pop(name, None)

    def _refused(self, name: str, error: ServiceError, saves: Sequence[Save]) -> None:
        for save in saves:
            self._saved(save, False)
        if error.reason in _GONE:
            self._sequences.pop(name, None)
            with self._changed:
                self._report.lost.append(name)

    def _saved(self, save: Save, done: bool) -> None:
        with self._changed:
            self._report.saved[save.number] = done
            self._counts.add("saved_tokens" if done else "unsaved_tokens", len(save.tokens))
            self._changed.notify_all()

    def _load(self, load: Load, after: Any) -> None:
        """Its pages are held by the sequence. If the lease may have ended before the last byte was read, another's may
        have been in them: then nothing was loaded.
        """
        sequence = self._sequences.get(load.sequence)
        done = False
        if sequence is not None and load.stop <= sequence.resident and self._session.may_write():
            self._copied("load", self._blocks.load, sequence.table, load, after)
            done = self._session.may_write()
        with self._changed:
            if done:
                self._report.loaded.add(load.request)
                self._counts.add("loaded_tokens", load.stop - load.start)
            else:
                self._unloaded([load])
            self._changed.notify_all()

    def _copied(self, name: str, copy: Callable[..., int], table: Sequence[int], job: Load | Save, after: Any) -> None:
        began = self._clock()
        copied = copy(table, job.start, job.stop, job.blocks, after)
        with self._changed:
            self._counts.add(f"{name}_bytes", copied)
            self._counts.add(f"{name}_seconds", self._clock() - began)

    def _unloaded(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self._report.loaded.add(load.request)
            self._report.unloaded.update(load.blocks)
            self._counts.add("unloaded_tokens", load.stop - load.start)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts.add(name)
