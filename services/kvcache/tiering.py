"""The tiers of a daemon at work: the mover's process, the files of the host tier, and the task that drives them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.common.errors import ServiceError
from services.kvcache.cache.cache import KvCache
from services.kvcache.mover.orders import Reply
from services.kvcache.mover.process import Mover
from services.kvcache.outer.settings import OuterTier
from services.kvcache.tiers.tiers import Tiers, TierSettings

log = structlog.get_logger()

#: Bytes that the mover keeps of pages on their way to the outer tier and from it.
STAGING_BYTES = 256 << 20

#: Seconds between two looks at what is due by time, while something moves.
TICK_S = 0.01


class SlabFile(Protocol):
    """The memory of a slab, in a file that the mover maps."""

    @property
    def file_path(self) -> str:
        """The file."""

    def close(self) -> None:
        """Remove it."""


#: ``(page_bytes, slots)``; runs on any thread. Raises OSError, ExceedsBudget.
SlabMaker = Callable[[int, int], SlabFile]


class Tiering:
    """Belongs to the daemon's loop. Raises InvalidConfiguration if the daemon's own memory is too small for it."""

    def __init__(self, cache: KvCache, settings: TierSettings, outer: OuterTier | None, make_slab: SlabMaker) -> None:
        self._work = asyncio.Event()
        self._make_slab = make_slab
        self._slabs: dict[int, SlabFile] = {}
        self._making: set[asyncio.Task[None]] = set()
        self.mover = Mover(outer, STAGING_BYTES, self._replied, self._lost, clock=cache.now)
        self.tiers = Tiers(settings, self.mover, self, cache.memory, cache.events, cache.now, self._work.set)
        cache.put_below(self.tiers)

    async def start(self) -> None:
        """Start the mover. Raises OSError."""
        await self.mover.start()

    async def run(self) -> None:
        """Store and fetch what is due. Ends when it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), TICK_S if self.tiers.is_busy else None)
            self._work.clear()
            try:
                while self.tiers.work():
                    await asyncio.sleep(0)
                self.tiers.tick()
            except Exception:
                # One pool's trouble must not end the work for the others.
                log.exception("tiers_failed")

    async def drain(self, grace_s: float) -> None:
        """Store what is worth it for the daemons that come after this one, as far as the time goes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        self.tiers.drain()
        while not self.tiers.spills.is_idle and loop.time() < until and self.mover.running:
            await asyncio.sleep(TICK_S)
        if left := self.tiers.spills.queued:
            log.warning("pages_not_stored", pages=left)

    async def stop(self) -> None:
        """End the mover, and free the memory of the host tier."""
        for task in list(self._making):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.mover.close()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    def _replied(self, reply: Reply) -> None:
        try:
            self.tiers.replied(reply)
        except Exception:
            log.exception("reply_failed", reply=type(reply).__name__)
        self._work.set()

    def _lost(self, jobs: Sequence[int]) -> None:
        self.tiers.lost(jobs)
        self._work.set()

    # --- slabs ---

    def make(self, memory: int, page_bytes: int, slots: int) -> None:
        """Make the file of a slab on a thread: its blocks are reserved, which takes as long as it is large."""
        task = asyncio.get_running_loop().create_task(self._make(memory, page_bytes, slots))
        self._making.add(task)
        task.add_done_callback(self._making.discard)

    async def _make(self, memory: int, page_bytes: int, slots: int) -> None:
        try:
            slab = await asyncio.to_thread(self._make_slab, page_bytes, slots)
        except (OSError, ServiceError) as error:
            log.error("host_cache_not_grown", bytes=page_bytes * slots, detail=str(error))
            self.tiers.slabs.failed(memory, str(error))
            return
        self._slabs[memory] = slab
        self.tiers.slabs.made(memory, slab.file_path)
        log.info("host_cache_grown", bytes=page_bytes * slots, path=slab.file_path)

    def drop(self, memory: int) -> None:
        """Free the file of a slab, which nothing maps."""
        self._slabs.pop(memory).close()
