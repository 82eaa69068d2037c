"""What the mover maps: the arenas of pools and the slabs of the host tier, each a memory with a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.kvcache.mover.orders import AttachFile, AttachGpu, Order, Reply


class MoverLink(Protocol):
    """The daemon's side of its mover, of whichever process that is now.

    What is sent is answered by a reply, or by the end of its mover, once that is proven gone.
    """

    @property
    def running(self) -> bool:
        """Whether there is a mover that takes orders."""

    @property
    def restarts(self) -> int:
        """How many movers were started after the first."""

    def send(self, order: Order) -> bool:
        """Whether the mover gets the order; if not, nothing has happened."""

    def attach(self, order: AttachFile | AttachGpu) -> None:
        """Have this mover and each later one map a memory."""

    def detach(self, memory: int) -> None:
        """Have no mover map a memory; answered with ``Detached`` when none does."""


class Listener(Protocol):
    """Who hears from the mover, on the daemon's loop."""

    def replied(self, reply: Reply) -> None:
        """The mover has answered."""

    def lost(self, jobs: Sequence[int]) -> None:
        """A mover is proven gone, and these jobs with it."""


class Memories:
    """Memories that the mover is to map, and those that it has mapped."""

    def __init__(self, link: MoverLink) -> None:
        self._link = link
        # Every memory that a mover maps, or may: whether it has, or None before it has answered.
        self._mapped: dict[int, bool | None] = {}
        self._leaving: set[int] = set()
        self._number = 0

    def next_number(self) -> int:
        """A number that no memory has had."""
        self._number += 1
        return self._number

    def add(self, order: AttachFile | AttachGpu) -> None:
        """Have the mover map a memory."""
        self._mapped[order.memory] = None
        self._link.attach(order)

    def remove(self, memory: int) -> None:
        """Have the mover unmap a memory, of which no job is in flight. Until it has, the memory is known."""
        if memory in self._mapped and memory not in self._leaving:
            self._leaving.add(memory)
            self._mapped[memory] = False
            self._link.detach(memory)

    def is_mapped(self, memory: int) -> bool:
        """Whether jobs can use a memory."""
        return self._mapped.get(memory) is True

    def is_awaited(self, memory: int) -> bool:
        """Whether the mover is about to map a memory."""
        return memory in self._mapped and self._mapped[memory] is None

    def is_known(self, memory: int) -> bool:
        """Whether a mover maps a memory, or may."""
        return memory in self._mapped

    def attached(self, memory: int, *, ok: bool) -> None:
        """The mover has mapped a memory, or cannot."""
        if memory in self._mapped and memory not in self._leaving:
            self._mapped[memory] = ok

    def detached(self, memory: int) -> None:
        """The mover has unmapped a memory."""
        self._mapped.pop(memory, None)
        self._leaving.discard(memory)

    def lost(self) -> None:
        """The mover is gone, and every mapping with it."""
        for memory in self._mapped:
            self._mapped[memory] = False if memory in self._leaving else None
