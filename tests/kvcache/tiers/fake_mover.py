"""A mover whose every move is in the test's hands, and its memories: pages of two halves, copied one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.kvcache.mover.orders import (
    FAILED,
    FILLED,
    MISSING,
    REFUSED,
    Abandon,
    Attached,
    AttachFile,
    AttachGpu,
    Chain,
    Commit,
    Detached,
    Filled,
    FillFromHost,
    FillFromOuter,
    Forget,
    Found,
    Health,
    Lookup,
    Order,
    Read,
    ReadDone,
    Reply,
    Stored,
)
from services.kvcache.tiers.memories import Listener

Half = Any
Page = tuple[Half, Half]

EMPTY: Page = (None, None)
GARBAGE: Half = "garbage"


def checksum(page: Page) -> int:
    return hash(page) & 0xFFFFFFFF


@dataclass(eq=False)
class Doing:
    """A job in the mover: how many halves it has copied, and what of."""

    order: Read | Lookup | FillFromHost | FillFromOuter
    halves: list[Half] = field(default_factory=list)
    read: bool = False  # answered with ReadDone, and waits for Commit or Abandon


class FakeMover:
    """``memories`` by number, ``outer`` by digest. Nothing happens before it is said to."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.memories: dict[int, list[Page]] = {}
        self.attached: dict[int, bool] = {}  # whether it was answered
        self.detaching: list[int] = []
        self.doing: dict[int, Doing] = {}
        self.outer: dict[bytes, tuple[Chain, Page]] = {}
        self.corrupt: set[bytes] = set()
        self.committed: list[int] = []
        self.outer_up = False
        self.alive = True
        self.full = False
        self.restarts = 0

    # --- the daemon's side ---

    @property
    def running(self) -> bool:
        return self.alive

    def send(self, order: Order) -> bool:
        if not self.alive:
            return False
        if isinstance(order, Commit):
            assert self.doing[order.job].read
            self.committed.append(order.job)
            return True
        if isinstance(order, Abandon):
            assert self.doing.pop(order.job).read
            return True
        if isinstance(order, Forget):
            for digest in order.digests:
                self.outer.pop(digest, None)
            return True
        if self.full:
            return False
        assert isinstance(order, Read | Lookup | FillFromHost | FillFromOuter), order
        if not isinstance(order, Lookup):
            assert self.attached.get(order.memory), f"{order} is of a memory that is not mapped"
        if isinstance(order, FillFromHost) or (isinstance(order, Read) and order.slot_memory is not None):
            assert order.slot_memory is not None and self.attached.get(order.slot_memory)
        assert order.job not in self.doing
        self.doing[order.job] = Doing(order)
        return True

    def attach(self, order: AttachFile | AttachGpu) -> None:
        self.memories.setdefault(order.memory, [EMPTY] * order.pages)
        self.attached[order.memory] = False

    def detach(self, memory: int) -> None:
        assert not self.uses(memory), f"memory {memory} is detached and used"
        self.detaching.append(memory)

    def uses(self, memory: int) -> list[Order]:
        return [d.order for d in self.doing.values() if memory in (_memory(d.order), _slot_memory(d.order))]

    # --- the test's side ---

    def say(self, reply: Reply) -> None:
        assert self.listener is not None
        self.listener.replied(reply)

    def answer_memories(self) -> None:
        """Map and unmap what is to be."""
        if not self.alive:
            return
        for memory in [memory for memory, said in self.attached.items() if not said]:
            if memory not in self.detaching:
                self.attached[memory] = True
                self.say(Attached(memory, ok=True))
        for memory in self.detaching:
            self.attached.pop(memory, None)
        leaving, self.detaching = self.detaching, []
        for memory in leaving:
            self.say(Detached(memory))

    def set_outer(self, *, up: bool) -> None:
        self.outer_up = up
        if self.alive:
            self.say(Health(outer_up=up))

    def copy_half(self, at: int) -> None:
        """One of the jobs copies one half more."""
        copying = [d for d in self.doing.values() if not d.read and len(d.halves) < 2 and self._source(d) is not None]
        if copying:
            self._copy_half(copying[at % len(copying)])

    def _copy_half(self, doing: Doing) -> None:
        source, half = self._source(doing), len(doing.halves)
        assert source is not None
        doing.halves.append(source[half])
        target = self._target(doing)
        if target is not None:
            memory, page = target
            halves = list(self.memories[memory][page])
            halves[half] = source[half]
            self.memories[memory][page] = (halves[0], halves[1])

    def _source(self, doing: Doing) -> Page | None:
        order = doing.order
        if isinstance(order, Read):
            return self.memories[order.memory][order.page]
        if isinstance(order, FillFromHost):
            return self.memories[order.slot_memory][order.slot]
        if isinstance(order, FillFromOuter) and order.chain.digest in self.outer and self.outer_up:
            return None if order.chain.digest in self.corrupt else self.outer[order.chain.digest][1]
        return None

    def _target(self, doing: Doing) -> tuple[int, int] | None:
        order = doing.order
        if isinstance(order, Read):
            return None if order.slot_memory is None else (order.slot_memory, order.slot)
        return None if isinstance(order, Lookup) else (order.memory, order.page)

    def finish(self, at: int, *, fail: bool = False) -> None:
        """One of the jobs ends, or gets as far as it can without the daemon."""
        ready = [n for n, d in self.doing.items() if not d.read] + self.committed
        if not ready or not self.alive:
            return
        number = ready[at % len(ready)]
        doing = self.doing[number]
        if doing.read:
            self.committed.remove(number)
            del self.doing[number]
            order = doing.order
            assert isinstance(order, Read) and order.outer is not None
            ok = self.outer_up and not fail
            if ok:
                self.outer[order.outer.digest] = (order.outer, (doing.halves[0], doing.halves[1]))
                self.corrupt.discard(order.outer.digest)
            self.say(Stored(number, ok=ok, bytes=100 if ok else 0, seconds=0.001))
            return
        while not fail and len(doing.halves) < 2 and self._source(doing) is not None:
            self._copy_half(doing)
        self._end(number, doing, fail=fail)

    def _end(self, number: int, doing: Doing, *, fail: bool) -> None:
        order = doing.order
        whole = len(doing.halves) == 2
        if isinstance(order, Read):
            doing.read = not fail and order.outer is not None
            if not doing.read:
                del self.doing[number]
            made = checksum((doing.halves[0], doing.halves[1])) if whole and order.checksum else None
            self.say(ReadDone(number, ok=not fail, seconds=0.001, checksum=made))
            return
        del self.doing[number]
        if isinstance(order, Lookup):
            there = 0
            while self.outer_up and not fail and there < len(order.keys) and order.keys[there] in self.outer:
                there += 1
            self.say(Found(number, there, 0.001))
            return
        if fail:
            outcome = FAILED
        elif isinstance(order, FillFromHost):
            same = checksum((doing.halves[0], doing.halves[1])) == order.checksum
            outcome = FILLED if same else REFUSED
        elif not self.outer_up:
            outcome = FAILED
        elif order.chain.digest in self.corrupt:
            outcome = REFUSED
            self.outer.pop(order.chain.digest, None)
            self.corrupt.discard(order.chain.digest)
        else:
            outcome = FILLED if whole else MISSING
        self.say(Filled(number, outcome, 100 if outcome == FILLED else 0, 0.001))

    def kill(self) -> None:
        """It is gone, in the middle of everything, and nobody knows yet."""
        self.alive = False

    def reap(self) -> None:
        """It is proven gone, and another one begins."""
        if self.alive:
            return
        lost, self.doing, self.committed = list(self.doing), {}, []
        self.outer_up = False
        self.attached = dict.fromkeys(self.attached, False)
        assert self.listener is not None
        self.listener.lost(lost)
        leaving, self.detaching = self.detaching, []
        for memory in leaving:
            self.attached.pop(memory, None)
            self.say(Detached(memory))
        self.alive = True


def _memory(order: Order) -> int | None:
    return None if isinstance(order, Lookup) else getattr(order, "memory", None)


def _slot_memory(order: Order) -> int | None:
    return getattr(order, "slot_memory", None)


class FakeFiles:
    """Slabs are made when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.dropped: list[int] = []
        self.on_drop: Callable[[int], None] = lambda memory: None

    def make(self, memory: int, page_bytes: int, slots: int) -> None:
        self.asked.append((memory, page_bytes, slots))

    def drop(self, memory: int) -> None:
        self.on_drop(memory)
        self.dropped.append(memory)
