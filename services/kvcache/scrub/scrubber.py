"""Work on the bytes of pages, away from the daemon's loop: taking checksums, verifying them, and what follows.

One thread reads pages; everything else runs on the loop, between its transactions and a slice at a time. The thread is
handed pages as (id, generation), and what it found of a page that has been given up meanwhile is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from services.common.errors import GpuError
from services.kvcache.cache.cache import KvCache
from services.kvcache.pool.pages.checksums import Checksums, Reference
from services.kvcache.pool.pages.unclean import UncleanPages
from services.kvcache.pool.pool import Pool
from services.kvcache.scrub.purge import purge

log = structlog.get_logger()

#: What the thread is handed at once, of host memory and of a GPU's: some milliseconds each, and whoever needs it now
#: waits for no more.
BATCH_BYTES, DEVICE_BATCH_BYTES = 8 << 20, 256 << 20
BATCH_PAGES = 512

#: Corrupted pages that an answer names one by one.
MOST_NAMED = 1000


@dataclass(slots=True)
class Report:
    """What a deep check has found. At most ``MOST_NAMED`` violations, the last of them counts the others."""

    verified_pages: int = 0
    violations: list[str] = field(default_factory=list)


class Scrubber:
    """Belongs to the loop that owns the cache. ``work`` is set by the cache when there is something to do."""

    def __init__(self, cache: KvCache, work: asyncio.Event) -> None:
        self._cache = cache
        self._work = work
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrubber")
        self._taking, self._purging, self._zeroing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()

    async def run(self) -> None:
        """Take checksums of what is published, and remove what was found corrupted. Ends when it is cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            for pool in list(self._cache.pools):
                try:
                    await self._take_checksums(pool)
                    await self._purge(pool)
                    await self.zero_waiting(pool)
                except Exception:
                    # Nor may one pool's trouble end the work for the others.
                    log.exception("scrub_failed", pool=pool.id)

    def close(self) -> None:
        """Wait for the thread, which finishes what it was handed."""
        self._thread.shutdown()

    async def verify_hits(self, hits: list[tuple[Pool, list[int]]]) -> None:
        """Verify pages that a prompt is about to share: those found corrupted are found by no lookup from now on."""
        for pool, pages in hits:
            if pool.checksums is not None:
                async for _ in self._verify(pool, pool.checksums, pages, "hit"):
                    pass

    async def zero_granted(self, pool: Pool) -> None:
        """Returns when every page that the pool has granted so far is zero, or was. Raises GpuError."""
        if (unclean := pool.table.unclean) is not None:
            granted = set(unclean.granted)
            while self._is_there(pool) and not unclean.granted.keys().isdisjoint(granted):
                await self._zero(pool, unclean)

    async def zero_waiting(self, pool: Pool) -> None:
        """Zero the pages that wait for it."""
        unclean = pool.table.unclean
        while unclean is not None and unclean.is_due and self._is_there(pool):
            try:
                await self._zero(pool, unclean)
            except GpuError as error:
                log.error("zeroing_failed", pool=pool.id, detail=error.message)
                return

    async def _zero(self, pool: Pool, unclean: UncleanPages) -> None:
        async with self._zeroing:
            pages = pool.table.zeroing(_batch(pool))
            numbers = [page for page, _ in pages]
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, pool.arena.zero, numbers)
            except BaseException as error:
                # One that was cancelled here may still be zeroed by the thread, before any that it is handed next.
                unclean.defer(numbers)
                if isinstance(error, ValueError) and not self._is_there(pool):
                    return
                raise
            pool.table.zeroed(pages)

    async def verify_all(self) -> Report:
        """Verify every published page. It takes no more memory in a larger pool, and others are served meanwhile."""
        report, left_out = Report(), 0
        for pool in list(self._cache.pools):
            known = pool.checksums
            if known is None:
                continue
            await self._take_checksums(pool)
            before = known.verified_pages
            for start in range(0, pool.table.total, BATCH_PAGES):
                pages = range(start, min(start + BATCH_PAGES, pool.table.total))
                async for page in self._verify(pool, known, pages, "fsck"):
                    if len(report.violations) < MOST_NAMED:
                        report.violations.append(
                            f"pool {pool.id}: page {page}, link {pool.index.key(page):016x}: its bytes have changed "
                            "since it was published; it is withdrawn, and what is cached behind it"
                        )
                    else:
                        left_out += 1
                await asyncio.sleep(0)
            await self._purge(pool)
            report.verified_pages += known.verified_pages - before
            if known.failure:
                report.violations.append(f"pool {pool.id}: its pages cannot be verified: {known.failure}")
        if left_out:
            report.violations.append(f"{left_out} more pages have changed since they were published")
        return report

    async def _take_checksums(self, pool: Pool) -> None:
        """Afterwards everything that was published before has its checksum, or will never have it."""
        known = pool.checksums
        if known is None:
            return
        async with self._taking:
            # As many as wait now: others may be publishing as fast.
            for _ in range(-(-known.waiting // _batch(pool))):
                if not (pages := known.due(_batch(pool))):
                    break
                try:
                    found = await self._read(pool, known, pages)
                except asyncio.CancelledError:
                    known.defer(pages)
                    raise
                if found is not None:
                    known.learn(pages, found)
            if known.waiting and not known.failure:
                self._work.set()

    async def _verify(self, pool: Pool, known: Checksums, pages: Iterable[int], by: str) -> AsyncIterator[int]:
        for batch in _batches(known.verifiable(pages), _batch(pool)):
            found = await self._read(pool, known, batch)
            if found is None:
                return
            for page in known.verify(batch, found):
                self._work.set()
                log.error(
                    "page_corrupted",
                    pool=pool.id,
                    page=page,
                    generation=pool.table.generation(page),
                    link=f"{pool.index.key(page):016x}",
                    holders=pool.table.holder_count(page),
                    found_by=by,
                )
                yield page

    async def _read(self, pool: Pool, known: Checksums, pages: list[Reference]) -> list[int] | None:
        """Checksums of pages as they are now; None if they cannot be had."""
        numbers = [page for page, _ in pages]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, pool.arena.checksums, numbers)
        except GpuError as error:
            known.failure = error.message
            log.error("checksums_failed", pool=pool.id, detail=error.message)
        except ValueError:
            if self._is_there(pool):
                raise
        return None

    async def _purge(self, pool: Pool) -> None:
        async with self._purging:
            if not pool.index.condemned_count or not self._is_there(pool):
                return
            before = pool.totals.withdrawn_pages
            for _ in purge(pool):
                await asyncio.sleep(0)
                if not self._is_there(pool):
                    return
            log.warning("pages_withdrawn", pool=pool.id, pages=pool.totals.withdrawn_pages - before)
            if pool.index.condemned_count:
                self._work.set()

    def _is_there(self, pool: Pool) -> bool:
        return any(one is pool for one in self._cache.pools)


def _batch(pool: Pool) -> int:
    size = BATCH_BYTES if pool.arena.device is None else DEVICE_BATCH_BYTES
    return max(1, min(BATCH_PAGES, size // pool.layout.page_bytes))


def _batches(pages: list[Reference], size: int) -> Iterator[list[Reference]]:
    return (pages[at : at + size] for at in range(0, len(pages), size))
