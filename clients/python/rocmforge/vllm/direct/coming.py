"""Pages that are being computed, by vLLM's hashes: who asks for one meanwhile waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rocmforge.vllm.direct.table import Table


class Coming:
    """The pages that will be published. ``place`` gives a request's place in vLLM's queue."""

    def __init__(self, page_size: int, place: Callable[[Table], float]) -> None:
        self._page_size, self._place = page_size, place
        self._by_hash: dict[Any, list[Table]] = {}

    def clear(self) -> None:
        """None comes any more."""
        self._by_hash.clear()

    def comes(self, table: Table) -> bool:
        """Whether a page of its prefix is being computed for another request, that runs or is ahead of it."""
        usable = (table.request.num_tokens - 1) // self._page_size
        hashes = table.request.block_hashes[:usable] if table.shares else ()
        place = self._place(table)
        return any(one.used or self._place(one) <= place for each in hashes for one in self._by_hash.get(each, ()))

    def announce(self, table: Table) -> None:
        """It will publish the whole pages of its tokens."""
        if table.shares:
            table.hashes, table.announced = list(table.request.block_hashes), 0
            for each in table.hashes:
                self._by_hash.setdefault(each, []).append(table)

    def arrived(self, table: Table, stop: int) -> None:
        """Its pages up to ``stop`` tokens are published."""
        last = min(stop // self._page_size, len(table.hashes))
        for each in table.hashes[table.announced : last]:
            found = self._by_hash.get(each, [])
            if table in found:
                found.remove(table)
            if not found:
                self._by_hash.pop(each, None)
        table.announced = max(table.announced, last)

    def forget(self, table: Table) -> None:
        """It publishes nothing more that others should wait for."""
        self.arrived(table, len(table.hashes) * self._page_size)
        table.hashes, table.announced = (), 0
