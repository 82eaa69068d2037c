"""Slabs of the host tier as they come and go: made away from the loop, mapped by the mover, then used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.kvcache.mover.orders import AttachFile
from services.kvcache.pool.host_memory import HostMemory
from services.kvcache.pool.lower_tiers import StoredLink
from services.kvcache.tiers.host.host_tier import HostTier, Slab, Slot
from services.kvcache.tiers.memories import Memories

#: Pages of a slab that are forgotten in one go.
_AT_ONCE = 512


class SlabFiles(Protocol):
    """Where slabs are made. Both return at once; ``made`` or ``failed`` of ``Slabs`` follow the first."""

    def make(self, memory: int, page_bytes: int, slots: int) -> None:
        """Make the file of a slab."""

    def drop(self, memory: int) -> None:
        """Free the file of a slab, which nothing maps."""


class Owner(Protocol):
    """Whose pages are written: the tiers of a pool."""

    page_bytes: int
    gpu: int | None
    page_size: int
    pool_id: str


class Slabs:
    """Grows the host tier slab by slab. ``memory`` is charged for what the daemon keeps of the slots."""

    def __init__(
        self, host: HostTier | None, memories: Memories, memory: HostMemory, files: SlabFiles, wake: Callable[[], None]
    ) -> None:
        self.host = host
        self.failure = ""
        #: The sizes of pages that pools have, with the GPU that they are on.
        self.live: set[tuple[int, int | None]] = set()
        self._memories = memories
        self._memory = memory
        self._files = files
        self._wake = wake
        self._making: Slab | None = None
        self._leaving: Slab | None = None

    def charged(self) -> int:
        """What is charged for its slots."""
        if self.host is None:
            return 0
        return sum(slab.price for slab in self.host.slabs) + (self._making.price if self._making is not None else 0)

    def growing(self, page_bytes: int, gpu: int | None) -> bool:
        """Whether another slab for pages of this size is on its way."""
        making = self._making
        if making is not None and (making.page_bytes, making.gpu) == (page_bytes, gpu):
            return True
        there = [] if self.host is None else self.host.slabs
        return any(
            self._memories.is_awaited(slab.memory)
            for slab in there
            if (slab.page_bytes, slab.gpu, slab.leaving) == (page_bytes, gpu, False)
        )

    def write(self, digest: bytes, owner: Owner, content: StoredLink) -> Slot | None:
        """A slot to write a page to; a slab is made when there is none and room for one."""
        host = self.host
        if host is None:
            return None
        size, gpu = owner.page_bytes, owner.gpu
        if not host.has_free(size, gpu) and self._making is None and not self.failure:
            slots = host.wanted_slots(size)
            if slots:
                self._make(size, owner.page_size, slots, gpu)
            elif not host.has_slabs(size, gpu) and self._leaving is None and size <= host.capacity:
                self._leaving = host.spare_slab(self.live)
                self._wake()
        if not host.has_slot(size, gpu) and self.growing(size, gpu):
            return None  # nothing is evicted while there is room
        return host.write(digest, size, gpu, owner.pool_id, content)

    def _make(self, page_bytes: int, page_size: int, slots: int, gpu: int | None) -> None:
        slab = Slab(self._memories.next_number(), page_bytes, page_size, slots, gpu)
        if self._memory.used + slab.price > self._memory.limit:
            return
        self._memory.used += slab.price
        self._making = slab
        self._files.make(slab.memory, page_bytes, slots)

    def made(self, memory: int, path: str) -> None:
        """The file of a slab is there."""
        slab, self._making = self._making, None
        if slab is None or slab.memory != memory or self.host is None:
            raise ValueError(f"slab {memory} was not to be made")
        self.host.add(slab)
        self._memories.add(AttachFile(memory, path, slab.page_bytes, slab.slots, slab.gpu))
        self._wake()

    def failed(self, memory: int, detail: str) -> None:
        """There is no memory for a slab: the host tier does not grow any more."""
        slab, self._making = self._making, None
        if slab is None or slab.memory != memory:
            raise ValueError(f"slab {memory} was not to be made")
        self._memory.used -= slab.price
        self.failure = detail
        self._wake()

    def mapped(self) -> None:
        """The mover has mapped memories, or has lost them."""
        if self.host is not None:
            for slab in self.host.slabs:
                slab.usable = self._memories.is_mapped(slab.memory)

    def retire(self) -> bool:
        """Go on with a slab that gives way to pages of another size; whether there is more to do at once."""
        slab = self._leaving
        if slab is None or self.host is None:
            return False
        if not self.host.leave(slab, _AT_ONCE):
            return not slab.pinned
        if self._memories.is_known(slab.memory):
            self._memories.remove(slab.memory)
            return False
        self.host.remove(slab)
        self._memory.used -= slab.price
        self._files.drop(slab.memory)
        self._leaving = None
        self._wake()
        return False
