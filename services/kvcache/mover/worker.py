"""The mover itself: it does what is ordered, one frame after another, until the daemon closes the socket.

The thread that reads the orders copies between memories; copies of a GPU are begun one after another, and awaited once
everything that was received is begun, before anything is said of them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.kvcache.mover.copies import BufferEnd, Copies
from services.kvcache.mover.frames import MOST_MESSAGES, Frames, InvalidFrame, encode, orders
from services.kvcache.mover.memory import MemoryFault
from services.kvcache.mover.orders import (
    FAILED,
    FILLED,
    REFUSED,
    Abandon,
    Attached,
    AttachFile,
    AttachGpu,
    Chain,
    Commit,
    Detach,
    Detached,
    Filled,
    FillFromHost,
    FillFromOuter,
    Forget,
    Found,
    Lookup,
    Order,
    Ping,
    Pong,
    Read,
    ReadDone,
    Reply,
    Setup,
    Stored,
)
from services.kvcache.mover.outer_jobs import OuterJobs, outer_jobs, short
from services.kvcache.mover.staging import Staging

log = structlog.get_logger()

_RECEIVE_BYTES = 1 << 18


@dataclass(slots=True)
class _Kept:
    """The private copy of a page that was read for the outer tier; no buffer if there was no memory for it."""

    chain: Chain
    body: bytearray | None


class Worker:
    """`run` returns when the daemon closes its end."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = connection
        self._clock = clock
        self._sending = threading.Lock()
        self._copies = Copies()
        self._staging = Staging(1)
        self._outer: OuterJobs | None = None
        self._kept: dict[int, _Kept] = {}
        # What follows once the copies that were begun are over, and makes the replies.
        self._then: list[Callable[[], Reply]] = []

    def run(self) -> None:
        """Raises InvalidFrame for what is no order, and OSError if the socket fails."""
        frames = Frames()
        while data := self._socket.recv(_RECEIVE_BYTES):
            for body in frames.feed(data):
                for order in orders(body):
                    self._obey(order)
            self._finish()

    def _obey(self, order: Order) -> None:
        match order:
            case Read():
                self._read(order)
            case FillFromHost():
                self._fill_from_host(order)
            case FillFromOuter():
                self._fill_from_outer(order)
            case Commit():
                self._commit(order)
            case Abandon():
                self._drop(order.job)
            case Lookup():
                if self._outer is None:
                    self._say(Found(order.job, 0, 0.0, "there is no outer tier"))
                else:
                    self._outer.lookup(order)
            case Forget():
                if self._outer is not None:
                    self._outer.forget(order)
            case AttachFile() | AttachGpu():
                self._attach(order)
            case Detach():
                self._finish()
                self._copies.detach(order.memory, lambda: self._say(Detached(order.memory)))
            case Ping():
                self._finish()
                self._say(Pong(order.number))
            case Setup():
                self._set_up(order)

    def _set_up(self, setup: Setup) -> None:
        if self._outer is not None:
            raise InvalidFrame("a second setup")
        self._staging = Staging(setup.staging_bytes)
        if setup.outer is not None:
            self._outer = outer_jobs(
                setup.outer, setup.job_seconds, self._staging, self._copies, self._say, self._clock
            )

    def _attach(self, order: AttachFile | AttachGpu) -> None:
        try:
            detail = self._copies.attach(order)
        except MemoryFault as error:
            log.warning("memory_not_attached", memory=order.memory, detail=str(error))
            self._say(Attached(order.memory, False, short(error)))
        else:
            if detail:
                log.warning("memory_not_pinned", memory=order.memory, detail=detail)
            self._say(Attached(order.memory, True, detail[:500]))

    def _read(self, order: Read) -> None:
        begun, slot, body = self._clock(), None, None
        try:
            page = self._copies.page(order.memory, order.page)
            if order.outer is not None:
                body = self._keep(order.job, order.outer, page.size)
            if order.slot_memory is not None:
                slot = self._copies.page(order.slot_memory, order.slot)
                self._copies.begin(slot, page)
            elif body is not None:
                self._copies.begin(BufferEnd(body, page.size), page)
            elif order.outer is None:
                raise MemoryFault("the page is to be copied nowhere")
            if order.checksum and slot is None:
                raise MemoryFault("checksums are of slots")
        except MemoryFault as error:
            self._drop(order.job)
            self._reply(ReadDone(order.job, False, self._clock() - begun, detail=short(error)))
            return
        size = page.size

        def done() -> Reply:
            if slot is not None and body is not None:
                self._copies.copy(BufferEnd(body, size), slot)
            checksum = _crc32c(slot.view()) if order.checksum and slot is not None else None
            return ReadDone(order.job, True, self._clock() - begun, checksum)

        self._then.append(done)

    def _keep(self, job: int, chain: Chain, page_bytes: int) -> bytearray | None:
        if self._outer is None:
            raise MemoryFault("there is no outer tier")
        body = self._staging.take(self._outer.body_bytes(page_bytes, chain))
        self._kept[job] = _Kept(chain, body)
        return body

    def _drop(self, job: int) -> None:
        kept = self._kept.pop(job, None)
        if kept is not None and kept.body is not None:
            self._staging.give(kept.body)

    def _commit(self, order: Commit) -> None:
        kept = self._kept.pop(order.job, None)
        if kept is None or self._outer is None:
            self._say(Stored(order.job, False, 0, 0.0, "nothing was read for this job"))
        elif kept.body is None:
            self._say(Stored(order.job, False, 0, 0.0, "no private memory was left"))
        else:
            self._outer.store(order.job, kept.chain, kept.body)

    def _fill_from_host(self, order: FillFromHost) -> None:
        begun = self._clock()
        try:
            target = self._copies.page(order.memory, order.page)
            slot = self._copies.page(order.slot_memory, order.slot)
            if order.checksum is not None and _crc32c(slot.view()) != order.checksum:
                self._reply(Filled(order.job, REFUSED, 0, self._clock() - begun, "the checksum of the slot differs"))
                return
            self._copies.begin(target, slot)
        except MemoryFault as error:
            self._reply(Filled(order.job, FAILED, 0, self._clock() - begun, short(error)))
            return
        self._then.append(lambda: Filled(order.job, FILLED, target.size, self._clock() - begun))

    def _fill_from_outer(self, order: FillFromOuter) -> None:
        try:
            target = self._copies.page(order.memory, order.page)
            if self._outer is None:
                raise MemoryFault("there is no outer tier")
        except MemoryFault as error:
            self._reply(Filled(order.job, FAILED, 0, 0.0, short(error)))
            return
        self._outer.fill(order, target)

    def _reply(self, reply: Reply) -> None:
        """Say it with the others."""
        self._then.append(lambda: reply)

    def _finish(self) -> None:
        """Wait for the copies that were begun, and say what came of them."""
        self._copies.finish()
        then, self._then = self._then, []
        replies = [each() for each in then]
        for at in range(0, len(replies), MOST_MESSAGES):
            self._say(*replies[at : at + MOST_MESSAGES])

    def _say(self, *replies: Reply) -> None:
        frame = encode(replies)
        with self._sending:
            self._socket.sendall(frame)


def _crc32c(data: memoryview) -> int:
    from crc32c import crc32c

    with data:
        return crc32c(data)
