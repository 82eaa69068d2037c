"""The session with the daemon, and the call beside each of vLLM's steps: what it says, and what its answer means.

Complete pages are published, sequences begin, grow and end. Pure Python.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rocmforge.client.demands import Demand, Grant
from rocmforge.client.errors import ServiceError
from rocmforge.client.events import LOGGED, EventLog
from rocmforge.vllm.direct.coming import Coming
from rocmforge.vllm.direct.link import Link
from rocmforge.vllm.direct.table import Table
from rocmforge.vllm.scheduler import Published
from rocmforge.vllm.worker import Counts

#: Refused for want of room: it may be asked for again.
_FULL = frozenset({"NO_PAGES", "QUOTA_EXCEEDED", "HOST_MEMORY_EXCEEDED"})
#: Pages that a running request holds beyond those that it needs.
AHEAD = 1
#: Waiting requests whose prefix is looked up before one of those that run has ended.
LOOK_AHEAD = 4
#: A request that was refused pages asks again after this.
RETRY_S = 0.05
_MOST_ENDINGS = 2048


class Memory(Protocol):
    """Where vLLM's KV cache lies."""

    def attach(self, pages: Any) -> None:
        """Have the pages of a session there."""

    def detach(self) -> None:
        """Have private memory there."""


@dataclass(slots=True)
class _Call:
    """What the call in progress asks for: a demand for each of the tables, and the sequences that it ends."""

    tables: list[tuple[Table, Demand]]
    removed: list[Table]


class Exchange:
    """The tables of all requests, by their ids, and one call at a time for all of them.

    ``most_tokens`` is the longest that a request may become, ``most_running`` how many may run at once.
    """

    def __init__(
        self,
        link: Link,
        memory: Memory,
        *,
        page_size: int,
        most_tokens: int,
        most_running: int,
        log: EventLog = LOGGED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._memory, self._log, self._clock = link, memory, log, clock
        self.page_size, self._most_tokens, self._most_running = page_size, most_tokens, most_running
        self._tables: dict[str, Table] = {}
        self._ended: list[Table] = []
        self._call: _Call | None = None
        self._coming = Coming(page_size, self._place)
        self._numbered = 0
        self._turns = itertools.count()
        self._schedule = 0  # the first turn of the schedule that is being made
        self._up = self._fenced = False
        self._total = 0
        self._counts = Counts()
        self._published: list[Published] = []

    # --- the session ----------------------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        if self._link.take_opened():
            pages = self._link.session.pages
            self._memory.attach(pages)
            self._total = pages.total_pages
            self._up = True
            self._counts.add("sessions")

    def _lose(self, reason: str) -> None:
        """There is no session any more. This is between two steps, so nothing is written. vLLM finds no room for what
        runs, preempts it, and it begins again with the next session.
        """
        self._memory.detach()
        self._up = self._fenced = False
        self._tables.clear()
        self._ended.clear()
        self._coming.clear()
        self._call = None
        self._link.reopen()
        self._counts.add("lost_sessions")
        self._log.warning("kvcache_lost", reason=reason)

    def fence(self) -> bool:
        """Whether the lease may be over, so that what a step reads and writes counts for nothing. To be asked before
        the step, which then only reaches private memory, and after it.
        """
        if self._up and not self._fenced and not self._link.session.may_write():
            self._fenced = True
            self._memory.detach()
        return self._fenced or not self._up

    @property
    def connected(self) -> bool:
        """Whether there is a session."""
        return self._up

    def close(self) -> None:
        """End the session. Idempotent."""
        self._up = False
        self._memory.detach()
        self._link.close()

    @property
    def available(self) -> int:
        """Pages of the whole pool that are free or evictable, as of the last answer; 0 without a session."""
        return (self._link.session.available_pages or 0) if self._up else 0

    @property
    def held(self) -> bool:
        """Whether vLLM uses a page."""
        return any(one.used for one in self._tables.values())

    def free(self, request_id: str) -> None:
        """vLLM no longer uses the request's pages, and no step is in progress. What is complete is published first."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        table.final, table.ended = table.written, True
        self._coming.forget(table)
        if table.name:
            self._ended.append(table)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _drop_waiting(self, but: Table | None = None) -> bool:
        """End the sequences of requests that do not run yet. They look again when it is their turn."""
        dropped = [name for name, one in self._tables.items() if one.name and not one.used and one is not but]
        for request_id in dropped:
            self.free(request_id)
        return bool(dropped)

    def _send(self) -> None:
        now = self._clock()
        removed = [one for one in self._ended if self._complete(one) <= one.resident or one.broken][:_MOST_ENDINGS]
        going = {id(one) for one in removed}
        tables = [(one, self._report(one, now)) for one in self._ended if id(one) not in going and one.open]
        tables += [(one, self._report(one, now)) for one in self._tables.values() if one.open and not one.broken]
        demands = [(one, demand) for one, demand in tables if demand is not None]
        for table, demand in demands:  # lookups of the same call find what it publishes
            self._coming.arrived(table, demand.start + len(demand.tokens))
        demands += [(one, self._opening(one)) for one in self._to_open(now)]
        if demands or removed:
            self._call = _Call(demands, removed)
            self._link.send([demand for _, demand in demands], [one.name for one in removed])

    def _report(self, table: Table, now: float) -> Demand | None:
        """What to report of an open sequence."""
        stop, have = max(table.resident, self._complete(table)), len(table.pages)
        wanted = have
        if not table.ended and now >= table.retry_at:
            ahead = min(table.used + AHEAD, self._longest(table)) if table.used else 0
            wanted = max(have, table.wanted, ahead)
        if stop == table.resident and wanted == have:
            return None
        tokens = list(table.request.all_token_ids[table.resident : stop])
        return Demand.of_step(table.name, table.resident, tokens, wanted, have)

    def _to_open(self, now: float) -> list[Table]:
        """Requests to look up: as many as may run beside those that do, and a few that come next. None whose prefix
        another one is about to publish: it would be computed twice.
        """
        opened = sum(1 for one in self._tables.values() if one.name)
        waiting = [one for one in self._tables.values() if not one.name and now >= one.retry_at]
        chosen: list[Table] = []
        for table in sorted(waiting, key=self._place):
            if opened + len(chosen) >= self._most_running + LOOK_AHEAD:
                break
            if not self._coming.comes(table):
                chosen.append(table)
                self._coming.announce(table)
        return chosen

    def _place(self, table: Table) -> float:
        """Its place in vLLM's queue; the end, if vLLM did not come to it in this schedule."""
        return table.turn if table.turn >= self._schedule else math.inf

    def _opening(self, table: Table) -> Demand:
        self._numbered += 1
        # The number makes it unique in the session: vLLM's ids may come again.
        table.name = f"{self._numbered}:{table.request.request_id}"[:128]
        tokens = list(table.request.all_token_ids)
        needed = min(self._pages(len(tokens)) + AHEAD, self._longest(table))
        # Pages for one that only waits are taken where there are many.
        pages = 0 if table.bare or self.available < needed + self._total // 8 else needed
        return Demand.of_prompt(table.name, tokens, pages, salt=table.salt)

    def _receive(self, *, wait: bool) -> bool:
        """Take the answer of the call in progress; False if there is none, or the session is over."""
        try:
            grants = self._link.receive(wait=wait)
        except ServiceError as error:
            self._lose(error.reason)
            return False
        call = self._call
        if grants is None or call is None:
            return False
        self._call = None
        for table in call.removed:
            self._ended.remove(table)
        for (table, demand), grant in zip(call.tables, grants, strict=True):
            (self._opened if demand.opens else self._stepped)(table, demand, grant)
        return True

    def _opened(self, table: Table, demand: Demand, grant: Grant) -> None:
        if grant.error is not None:
            # Nothing was opened. An id that was refused may be used, but one that has ended needs no ending.
            table.name, table.bare, table.retry_at = "", True, self._clock() + (RETRY_S if table.bare else 0)
            self._counts.add("refused_lookups")
            self._coming.forget(table)
            if table.ended:
                self._ended.remove(table)
            return
        table.open, table.pages = True, list(grant.pages)
        table.cached = table.resident = grant.cached_tokens
        self._coming.arrived(table, grant.cached_tokens)
        if table.shares and demand.opening is not None:
            self._counts.add("lookup_tokens", len(demand.opening.prompt))
            self._counts.add("hit_tokens", grant.cached_tokens)

    def _stepped(self, table: Table, demand: Demand, grant: Grant) -> None:
        stop = demand.start + len(demand.tokens)
        if grant.error is not None:
            if grant.error.reason in _FULL and demand.total_pages > demand.known_pages:
                table.retry_at = self._clock() + RETRY_S  # the report goes without the growth
                if not self.held:
                    self._drop_waiting(but=table)
            else:
                self._counts.add("unsaved_tokens", len(demand.tokens))
                self._log.warning("kvcache_sequence_lost", sequence=table.name, reason=grant.error.reason)
                table.broken = True
                self._coming.forget(table)
            return
        table.pages += grant.pages
        if len(table.pages) >= table.wanted:
            table.wanted = 0
        if stop > table.resident:
            self._published.append(Published(table.request, table.resident, stop))
            self._counts.add("saved_tokens", stop - table.resident)
            table.resident = stop

    # --- pages ----------------------------------------------------------------------------------------------------

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _longest(self, table: Table) -> int:
        request = table.request
        return self._pages(min(request.num_prompt_tokens + request.max_tokens, self._most_tokens))

    def _complete(self, table: Table) -> int:
        """The tokens of whole pages that are written; none beyond the resident ones if it must not share."""
        return table.written // self.page_size * self.page_size if table.shares and table.used else table.resident
