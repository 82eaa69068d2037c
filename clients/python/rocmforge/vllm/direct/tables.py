"""The block tables of vLLM's requests on the daemon's pages: what vLLM's block pool is otherwise.

Each request is a sequence of the daemon, and its block table that sequence's, so a page is held for as long as vLLM may
read or write it. What happens between two steps goes into one call beside the next one: complete pages are published,
sequences begin, grow and end. Only a request that could run at once is looked up ahead of the step. A running request
holds one page more than it needs; only one that has used that up, and was refused another, is waited for. Pure Python:
vLLM and torch are not imported.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from rocmforge.vllm.direct.exchange import Exchange, Memory
from rocmforge.vllm.direct.link import Link
from rocmforge.vllm.direct.table import Request, Table
from rocmforge.vllm.scheduler import Published
from rocmforge.vllm.worker import Counts

#: The longest that a step waits for a lookup.
LOOKUP_S = 0.005
#: More blocks than any pool has: vLLM then waits, or preempts.
NEVER = 1 << 40


class BlockTables(Exchange):
    """The tables, as vLLM asks for them. ``salt_of`` gives the salt that a request shares its pages under, None if it
    must not share any; the rest is `Exchange`'s.
    """

    def __init__(self, link: Link, memory: Memory, *, salt_of: Callable[[Any], str | None], **more: Any) -> None:
        super().__init__(link, memory, **more)
        self._salt_of = salt_of

    def start(self) -> None:
        """Open the session. Raises the ServiceError of a daemon that refuses this pool."""
        self._link.open()
        self._begin_session()

    def begin(self) -> None:
        """A step is about to be scheduled: take what was answered."""
        self._schedule = next(self._turns)
        if self._fenced or (self._up and not self._link.session.may_write()):
            self._lose("the lease may be over")
        if not self._up:
            self._begin_session()
        if self._up and self._call is not None:
            self._receive(wait=False)
        if self._up and self._call is None and self._has_room():
            # A request that could run in this step is looked up ahead of it: a call is shorter than a step.
            self._send()
            if self._call is not None:
                self._link.wait(LOOKUP_S)
                self._receive(wait=False)

    def _has_room(self) -> bool:
        """Whether a request that was not looked up yet could run."""
        running = sum(1 for one in self._tables.values() if one.used)
        return running < self._most_running and any(not one.name for one in self._tables.values())

    # --- what vLLM asks -------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return self._total

    @property
    def pending(self) -> bool:
        """Whether something is left to be sent or answered, so that vLLM must keep stepping."""
        return self._up and bool(self._ended or self._call)

    def add(self, request: Request) -> Table:
        """A request has come: its prefix is looked up when there is time."""
        salt = None if request.skip_reading_prefix_cache else self._salt_of(request)
        table = Table(request, salt if salt is not None else f"alone:{secrets.token_hex(16)}", salt is not None)
        return self._tables.setdefault(request.request_id, table)

    def matched(self, request: Request) -> int | None:
        """It is the request's turn: how many of its tokens are in its pages; None until the daemon has answered."""
        table = self._tables.get(request.request_id)
        if table is not None and table.broken:
            self.free(request.request_id)
            table = None
        table = table or self.add(request)
        table.turn = next(self._turns)
        return table.cached if table.open else None

    def lacking(self, request_id: str, tokens: int) -> int:
        """How many pages it lacks to hold so many tokens: 0, or more than there can be."""
        table, needed = self._tables.get(request_id), self._pages(tokens)
        if table is None or table.broken or not table.open:
            return NEVER
        if needed <= len(table.pages):
            return 0
        if not table.used:
            table.wanted = needed  # the next call asks for them
            return NEVER
        return 0 if self._grow(table, needed) else NEVER

    def take(self, request_id: str, tokens: int) -> list[int]:
        """The pages that the request's block table grows by to hold so many tokens. Raises KeyError for one that has
        none, ValueError for more than it was granted.
        """
        table, needed = self._tables[request_id], self._pages(tokens)
        if needed > len(table.pages):
            raise ValueError(f"{request_id} has {len(table.pages)} pages, not {needed}")
        first, table.used = table.used, max(table.used, needed)
        return table.pages[first : table.used]

    @property
    def unanswered(self) -> bool:
        """Whether something is to be had by waiting: an answer, or a session."""
        return self._call is not None or not self._up

    def wait(self, timeout_s: float) -> None:
        """Wait for that, at most so long."""
        self._link.wait(timeout_s)

    def flush(self) -> None:
        """A step is scheduled: send what is due, unless a call is in progress."""
        if self._up and self._call is None:
            self._send()

    def take_published(self) -> list[Published]:
        """What was published since the last call."""
        taken, self._published = self._published, []
        return taken

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        taken, self._counts = self._counts.values, Counts()
        return taken

    def reset(self) -> None:
        """Salts have changed: what waits looks again."""
        for request_id in [name for name, one in self._tables.items() if not one.used]:
            self.free(request_id)

    def _grow(self, table: Table, pages: int) -> bool:
        """Have a running request grow, and wait for it. What has ended, and what waits, gives its pages back first."""
        if self._call is not None and not self._receive(wait=True):
            return False
        while not table.broken and self._up and len(table.pages) < pages:
            gives_back = bool(self._ended) or self._drop_waiting()
            table.wanted, table.retry_at = pages, 0.0
            self._send()
            if not self._receive(wait=True) or (len(table.pages) < pages and not gives_back):
                break
        return len(table.pages) >= pages and not table.broken
