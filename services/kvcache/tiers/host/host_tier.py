"""The host tier: pages by digest in slots of the daemon's own memory, least recently used first to go.

Its memory is divided into slabs, files of slots of one size, made when they are needed. A slot that the mover writes or
reads is pinned: it goes to nobody else before the mover has answered, or is proven gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.kvcache.pool.lower_tiers import StoredLink

#: Bytes that the daemon keeps of a slot, its page's tokens apart.
SLOT = 704

#: Bytes of a slab, unless a page or a sixteenth of the whole is more.
_SLAB_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Slab:
    """``slots`` slots of ``page_bytes`` each, in the mover's ``memory``; ``gpu`` is the one it is pinned for.

    One that is ``leaving`` gets no more pages, and goes once no slot of it is pinned.
    """

    memory: int
    page_bytes: int
    page_size: int
    slots: int
    gpu: int | None
    free: list[int] = field(default_factory=list)
    pinned: int = 0
    usable: bool = False  # the mover has mapped it
    leaving: bool = False

    @property
    def bytes(self) -> int:
        """What it takes of --host-cache."""
        return self.slots * self.page_bytes

    @property
    def price(self) -> int:
        """What it takes of the daemon's own memory."""
        return self.slots * (SLOT + 4 * self.page_size)


@dataclass(slots=True, eq=False)
class Slot:
    """A page in the host tier, or on its way there.

    ``checksum`` is that of its bytes, known once they are there. ``outer`` says that the outer tier has it as well.
    """

    slab: Slab
    number: int
    digest: bytes
    pool_id: str
    content: StoredLink
    checksum: int | None = None
    outer: bool = False
    pins: int = 0


#: ``(kind, slot)`` for what lookups start or stop finding.
OnChange = Callable[[bool, Slot], None]


class HostTier:
    """At most ``capacity`` bytes of slabs. Every operation is O(1), but for those of a whole slab."""

    def __init__(self, capacity: int, on_change: OnChange = lambda stored, slot: None) -> None:
        self.capacity = capacity
        self.slabs: list[Slab] = []
        self._on_change = on_change
        self._by_digest: dict[bytes, Slot] = {}
        self._of_slab: dict[Slab, dict[Slot, None]] = {}
        # Those of one size, least recently used first.
        self._by_use: dict[tuple[int, int | None], dict[Slot, None]] = {}
        self._by_link: dict[tuple[str, int], Slot] = {}  # as events name them
        self._writing: dict[Slot, None] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def used_bytes(self) -> int:
        """Of pages that lookups find."""
        return sum(slab.page_bytes * len(self._of_slab[slab]) for slab in self.slabs)

    @property
    def slab_bytes(self) -> int:
        """What its slabs take together."""
        return sum(slab.bytes for slab in self.slabs)

    def wanted_slots(self, page_bytes: int) -> int:
        """How many slots another slab for pages of this size has; 0 if there is no room for one."""
        size = max(page_bytes, min(self.capacity, max(_SLAB_BYTES, self.capacity // 16)))
        return min(size, self.capacity - self.slab_bytes) // page_bytes

    def has_free(self, page_bytes: int, gpu: int | None) -> bool:
        """Whether a slot for pages of this size is free, or will be once its slab is mapped."""
        return any(slab.free for slab in self._slabs_of(page_bytes, gpu))

    def has_slot(self, page_bytes: int, gpu: int | None) -> bool:
        """Whether a slot for pages of this size is free now."""
        return any(slab.free and slab.usable for slab in self._slabs_of(page_bytes, gpu))

    def has_slabs(self, page_bytes: int, gpu: int | None) -> bool:
        """Whether there are slots for pages of this size, free or not."""
        return bool(self._slabs_of(page_bytes, gpu))

    def spare_slab(self, live: set[tuple[int, int | None]]) -> Slab | None:
        """A slab that can give way to pages of another size: of a size that no pool has, or of one that has several."""
        spare = [
            (key not in live, count, slab)
            for slab in self.slabs
            if (count := len(self._slabs_of(*(key := (slab.page_bytes, slab.gpu))))) > 1 or key not in live
        ]
        return max(spare, key=lambda one: one[:2])[2] if spare else None

    def _slabs_of(self, page_bytes: int, gpu: int | None) -> list[Slab]:
        return [s for s in self.slabs if s.page_bytes == page_bytes and s.gpu == gpu and not s.leaving]

    def add(self, slab: Slab) -> None:
        """Use a slab from now on."""
        slab.free = list(range(slab.slots - 1, -1, -1))
        self.slabs.append(slab)
        self._of_slab[slab] = {}

    def remove(self, slab: Slab) -> None:
        """Use a slab no more. Nothing of it is pinned or found."""
        if slab.pinned or self._of_slab[slab]:
            raise ValueError(f"slab {slab.memory} is in use")
        self.slabs.remove(slab)
        del self._of_slab[slab]

    def find(self, digest: bytes) -> Slot | None:
        """The slot with this page, which the mover can read; None if there is none."""
        slot = self._by_digest.get(digest)
        return slot if slot is not None and slot.slab.usable else None

    def holds(self, digest: bytes) -> bool:
        """Whether the page is stored."""
        return digest in self._by_digest

    def write(self, digest: bytes, page_bytes: int, gpu: int | None, pool_id: str, content: StoredLink) -> Slot | None:
        """A slot to write this page to, pinned: a free one, or that of the page used longest ago. None if all slots
        of this size are pinned, or there are none.
        """
        slab = next((one for one in self._slabs_of(page_bytes, gpu) if one.free and one.usable), None)
        if slab is None:
            slab = self._evict(page_bytes, gpu)
        if slab is None:
            return None
        slot = Slot(slab, slab.free.pop(), digest, pool_id, content)
        self._writing[slot] = None
        self.pin(slot)
        return slot

    def _evict(self, page_bytes: int, gpu: int | None) -> Slab | None:
        for slot in self._by_use.get((page_bytes, gpu), ()):
            if slot.slab.usable and not slot.slab.leaving and not slot.pins:
                self.forget(slot)
                self.evicted += 1
                return slot.slab
        return None

    def commit(self, slot: Slot, checksum: int | None) -> None:
        """The page is written, and lookups find it; the slot is not pinned for that any more."""
        slot.checksum = checksum
        del self._writing[slot]
        if slot.slab.leaving or slot.digest in self._by_digest:
            self.unpin(slot)
            return
        self._by_digest[slot.digest] = slot
        self._of_slab[slot.slab][slot] = None
        self._by_use.setdefault(_size(slot), {})[slot] = None
        self._by_link[slot.pool_id, slot.content.link.hash] = slot
        self._on_change(True, slot)
        self.unpin(slot)

    def abandon(self, slot: Slot) -> None:
        """What was written is not to be found; nobody writes it any more."""
        del self._writing[slot]
        self.unpin(slot)

    def pin(self, slot: Slot) -> None:
        """The mover uses the slot."""
        slot.pins += 1
        slot.slab.pinned += 1

    def unpin(self, slot: Slot) -> None:
        """The mover does not use it any more."""
        slot.pins -= 1
        slot.slab.pinned -= 1
        if not slot.pins and self._by_digest.get(slot.digest) is not slot:
            slot.slab.free.append(slot.number)

    def touch(self, slot: Slot) -> None:
        """The page was used: it goes last."""
        if self._by_digest.get(slot.digest) is slot:
            by_use = self._by_use[_size(slot)]
            del by_use[slot]
            by_use[slot] = None

    def forget(self, slot: Slot) -> None:
        """Lookups do not find this page any more. Its slot is free once it is not pinned."""
        if self._by_digest.get(slot.digest) is not slot:
            return
        del self._by_digest[slot.digest], self._of_slab[slot.slab][slot], self._by_use[_size(slot)][slot]
        key = slot.pool_id, slot.content.link.hash
        if self._by_link.get(key) is slot:
            del self._by_link[key]
        self._on_change(False, slot)
        if not slot.pins:
            slot.slab.free.append(slot.number)

    def forget_digest(self, digest: bytes) -> None:
        """As ``forget``, if the page is stored."""
        if (slot := self._by_digest.get(digest)) is not None:
            self.forget(slot)

    def leave(self, slab: Slab, most: int) -> bool:
        """Forget at most so many pages of a slab, which gets no more; whether none is found or pinned now."""
        slab.leaving = True
        for slot in list(self._of_slab[slab])[:most]:
            self.forget(slot)
        return not slab.pinned and not self._of_slab[slab]

    def of_link(self, pool_id: str, key: int) -> Slot | None:
        """The page of a pool with the link of this hash; None if it is not stored."""
        return self._by_link.get((pool_id, key))

    def stored(self) -> list[Slot]:
        """Every page that lookups find."""
        return list(self._by_digest.values())

    def walk(self) -> Iterator[str]:
        """Every violated invariant."""
        if self.slab_bytes > self.capacity:
            yield f"slabs have {self.slab_bytes} bytes, --host-cache is {self.capacity}"
        for digest, slot in self._by_digest.items():
            listed = slot in self._of_slab.get(slot.slab, ()) and slot in self._by_use[_size(slot)]
            if slot.digest != digest or not listed:
                yield f"slot {slot.number} of slab {slot.slab.memory} is found by another digest, or in no slab"
        for slab in self.slabs:
            slots = [*self._of_slab[slab], *(slot for slot in self._writing if slot.slab is slab)]
            numbers = [slot.number for slot in slots] + slab.free
            if len(set(numbers)) != len(numbers) or len(numbers) + slab.pinned < slab.slots:
                yield f"slab {slab.memory} of {slab.slots} slots has {len(slots)} used and {len(slab.free)} free"
            if sum(slot.pins for slot in slots) > slab.pinned:
                yield f"slab {slab.memory} counts {slab.pinned} pins, its slots have more"


def _size(slot: Slot) -> tuple[int, int | None]:
    return slot.slab.page_bytes, slot.slab.gpu
