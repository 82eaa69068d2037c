"""What a pool can grant still: pages that are free or evictable, and room in the daemon's own memory."""

from __future__ import annotations

from services.common.errors import CapacityExceeded, ExceedsPool
from services.kvcache.pool.host_memory import SHARED, HostMemory, entry_bytes
from services.kvcache.pool.pages.page_table import PageTable


class Headroom:
    """What may be granted of one pool, less what is reserved for calls in progress."""

    def __init__(self, table: PageTable, memory: HostMemory, page_size: int) -> None:
        self.entry_bytes = entry_bytes(page_size)
        self.promised_pages = self.promised_bytes = 0
        self._table = table
        self._memory = memory

    @property
    def pages(self) -> int:
        """Pages that an allocation can get: free or evictable ones that are promised to no other."""
        return self._table.free_count + self._table.cached_count - self.promised_pages

    def check_growth(self, sequence_id: str, total_pages: int, more: int, *, spoken_for: int = 0) -> None:
        """Check that a sequence can get ``more`` pages, to reach ``total_pages``.

        ``spoken_for`` counts cached pages that it has matched, which are not evictable for it. Raises ExceedsPool or
        CapacityExceeded.
        """
        table = self._table
        if total_pages > table.total:
            raise ExceedsPool(
                f"sequence {sequence_id!r}: total_pages is {total_pages}, but the pool has {table.total}",
                field="total_pages",
                total_pages=table.total,
            )
        available = self.pages - spoken_for
        if more > available:
            raise CapacityExceeded(
                f"sequence {sequence_id!r} needs {more} more pages, but {available} are free or evictable: "
                f"of {table.total}, {table.free_count} free, {table.cached_count} cached, {table.held_count} held, "
                f"{table.quarantined_count} quarantined, {table.filling_count} filling",
                needed_pages=more,
                free_pages=table.free_count,
                cached_pages=table.cached_count,
                held_pages=table.held_count,
                quarantined_pages=table.quarantined_count,
                filling_pages=table.filling_count,
                total_pages=table.total,
            )

    def check_memory(self, sequence: str, entries: int, more: int = 0, *, shared: int = 0) -> None:
        """Whether the daemon's own memory has room for so many entries in a block table, ``shared`` of them of pages
        that others hold, and ``more`` bytes. Raises HostMemoryExceeded.
        """
        wanted = entries * self.entry_bytes + shared * SHARED + more
        self._memory.check(wanted, f"sequence {sequence!r}")

    def promise(self, pages: int, memory: int) -> None:
        """Promise so many pages more, and bytes of the daemon's own memory, that the caller has checked."""
        self.promised_pages += pages
        self.promised_bytes += memory
        self._memory.used += memory


class Promised:
    """Pages of a pool, and room in the daemon's own memory for block tables, that a call which was checked takes in
    slices: nobody else is granted them meanwhile. What it has not taken when it ends it gives back.
    """

    def __init__(self, headroom: Headroom, pages: int, entries: int, shared: int = 0) -> None:
        """``entries`` of block tables, ``shared`` of them of pages that others hold."""
        self._headroom = headroom
        self._pages = self._bytes = 0
        self._add(pages, entries, shared)

    def take(self, pages: int) -> None:
        """So many pages, with their entries, are taken at once."""
        self._add(-pages, -pages, 0)

    def share(self, pages: int) -> None:
        """So many pages that others hold are shared at once."""
        self._add(0, -pages, -pages)

    def _add(self, pages: int, entries: int, shared: int) -> None:
        memory = entries * self._headroom.entry_bytes + shared * SHARED
        self._pages += pages
        self._bytes += memory
        self._headroom.promise(pages, memory)

    def __enter__(self) -> Promised:
        return self

    def __exit__(self, *failure: object) -> None:
        self._headroom.promise(-self._pages, -self._bytes)
