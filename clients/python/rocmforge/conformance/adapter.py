"""A client under test, as the suite drives it: one JSON object a line, answered by one. This one is `rocmforge.client`.

    python -m rocmforge.conformance.adapter

docs/clients.md has the commands. A client in another language implements the same.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from rocmforge.client import Demand, DevicePages, Grant, KvCache, OpaqueLayout
from rocmforge.client.errors import FieldInvalid, PagesFilling, ServiceError, SessionExpired


class NotGranted(ServiceError):
    """The bytes at a position are not this sequence's to write."""

    reason = "NOT_GRANTED"


@dataclass(slots=True)
class Sequence:
    """A block table, and how many tokens are resident: those are shared, and not written again."""

    table: list[int]
    resident: int


class Adapter:
    """The commands, each a method that takes the other values of its line and returns the answer's.

    Raises ServiceError for what the client or the daemon refuses.
    """

    def __init__(self) -> None:
        self._cache: KvCache | None = None
        self._sequences: dict[str, Sequence] = {}

    @property
    def cache(self) -> KvCache:
        """The client. Raises SessionExpired before ``open``."""
        if self._cache is None:
            raise SessionExpired("no session is open")
        return self._cache

    @property
    def raw(self) -> Any:
        """The pages, uint8 ``[page, page_bytes]``; of NumPy, or of CuPy on a GPU."""
        return self.cache.pages.array

    def open(
        self,
        address: str,
        pool_id: str,
        page_size: int,
        label: str,
        page_bytes: int,
        pool_pages: int,
        ttl_s: float,
        gpu: int | None = None,
    ) -> dict[str, Any]:
        """Open a session."""
        layout = OpaqueLayout(page_size, label, page_bytes)
        self._cache = KvCache(address, pool_id, layout, pool_pages=pool_pages, ttl_s=ttl_s, gpu=gpu)
        self._cache.reopen()
        return {"total_pages": self._cache.total_pages}

    def begin(self, sequence: str, prompt: list[int], pages: int, fill_wait_s: float | None = None) -> dict[str, Any]:
        """Begin a sequence by its prompt. It may wait for pages that are being filled, if it is told for how long."""
        while True:
            try:
                return self._begin(Demand.of_prompt(sequence, prompt, pages, fill_wait_s=fill_wait_s))
            except PagesFilling as error:
                self.wait(error)

    def wait(self, error: PagesFilling) -> None:
        """Wait until the pages may be there. An engine computes for others meanwhile."""
        time.sleep(error.retry_after_s or 0.0)

    def fork(self, sequence: str, parent: str, pages: int) -> dict[str, Any]:
        """Begin a sequence as a fork, and make the copies that its grant lists."""
        return self._begin(Demand.of_fork(sequence, parent, pages))

    def step(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """Report tokens that are written, of several sequences in one call, and grow."""
        demands = [self._demand(**one) for one in steps]
        grants = self.cache.step(demands)
        return {"results": [self._stepped(demand, grant) for demand, grant in zip(demands, grants, strict=True)]}

    def write(self, sequence: str, position: int, byte: int) -> dict[str, Any]:
        """Fill the bytes of a token's K and V, as the step that computes it would."""
        known = self._known(sequence)
        self.check_write(known, position)
        page, begin, end = self._slot(known, position)
        self.raw[page, begin:end] = byte
        self.synchronize()
        return {}

    def read(self, sequence: str, position: int) -> dict[str, Any]:
        """The bytes of a token's K and V."""
        page, begin, end = self._slot(self._known(sequence), position)
        return {"bytes": self.raw[page, begin:end].tobytes().hex()}

    def remove(self, sequence: str) -> dict[str, Any]:
        """End a sequence."""
        self.cache.step([], removed=[sequence])
        del self._sequences[sequence]
        return {}

    def may_write(self) -> dict[str, Any]:
        """Whether the lease is certain to last."""
        return {"may_write": self.cache.may_write()}

    def recover(self) -> dict[str, Any]:
        """Open another session after a loss; nothing writes any more."""
        self._sequences.clear()
        self.cache.reopen()
        return {}

    def close(self) -> dict[str, Any]:
        """End the session."""
        self.cache.close()
        return {}

    def check_write(self, known: Sequence, position: int) -> None:
        """Raises SessionExpired when the lease may be over, NotGranted for a position that may not be written."""
        if not self.cache.may_write():
            raise SessionExpired("the lease may be over")
        if not known.resident <= position < len(known.table) * self.cache.layout.page_size:
            raise NotGranted(f"position {position} is not granted, or resident")

    def _demand(self, sequence: str, tokens: list[int], pages: int) -> Demand:
        known = self._known(sequence)
        return Demand.of_step(sequence, known.resident, tokens, pages, len(known.table))

    def take(self, known: Sequence, grant: Grant) -> None:
        """Put a grant's pages into the block table, and make the copies that were not made yet."""
        raw, before = self.raw, len(known.table)
        known.table.extend(grant.pages[before - grant.first_index :])
        for copy in grant.copies:
            if copy.index >= before or known.table[copy.index] == copy.source:
                raw[copy.target] = raw[copy.source]
                known.table[copy.index] = copy.target
        self.synchronize()

    def synchronize(self) -> None:
        """End the step: what it wrote is in the pages."""
        pages = self.cache.pages
        if isinstance(pages, DevicePages):
            pages.gpu.synchronize()

    def _begin(self, demand: Demand) -> dict[str, Any]:
        [grant] = self.cache.step([demand])
        if grant.error is not None:
            raise grant.error
        known = self._sequences[demand.sequence_id] = Sequence([], grant.cached_tokens)
        self.take(known, grant)
        return {"table": known.table, "cached_tokens": grant.cached_tokens}

    def _stepped(self, demand: Demand, grant: Grant) -> dict[str, Any]:
        if grant.error is not None:
            return {"error": grant.error.reason, "message": grant.error.message}
        known = self._known(demand.sequence_id)
        known.resident += len(demand.tokens)
        self.take(known, grant)
        return {"table": known.table}

    def _known(self, sequence: str) -> Sequence:
        if sequence not in self._sequences:
            raise FieldInvalid(f"sequence {sequence!r} was not begun", field="sequence")
        return self._sequences[sequence]

    def _slot(self, known: Sequence, position: int) -> tuple[int, int, int]:
        layout = self.cache.layout
        index, slot = divmod(position, layout.page_size)
        if not 0 <= index < len(known.table):
            raise NotGranted(f"position {position} is not granted")
        size = layout.page_bytes // layout.page_size
        return known.table[index], slot * size, (slot + 1) * size


def serve(adapter: Adapter, lines: TextIO, answers: TextIO) -> None:
    """Answer each line until there are no more."""
    commands = {name: getattr(adapter, name) for name in COMMANDS}
    for line in lines:
        command = json.loads(line)
        try:
            answer = commands[command.pop("do")](**command)
        except ServiceError as error:
            answer = {"error": error.reason, "message": error.message}
        print(json.dumps(answer), file=answers, flush=True)


COMMANDS = ("open", "begin", "fork", "step", "write", "read", "remove", "may_write", "recover", "close")


if __name__ == "__main__":
    serve(Adapter(), sys.stdin, sys.stdout)
