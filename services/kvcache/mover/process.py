"""The daemon's side of the mover: a child process that is started, watched, killed, reaped and replaced.

Nothing here blocks the loop: orders are written as the socket takes them, and bounded by the number of jobs. A mover
that is silent or late is killed, and its jobs are lost once the kernel has proven that it is gone: until then it may
still be writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from services.kvcache.mover.child import Child
from services.kvcache.mover.frames import InvalidFrame, encode
from services.kvcache.mover.jobs import Jobs
from services.kvcache.mover.orders import (
    Attached,
    AttachFile,
    AttachGpu,
    Detach,
    Detached,
    Forget,
    Order,
    OuterTier,
    Ping,
    Pong,
    Reply,
    Setup,
)

log = structlog.get_logger()

#: Jobs in flight, and bytes of orders that the socket has not taken yet, beyond which no job is taken.
MOST_JOBS: Final = 1024
MOST_WAITING_BYTES: Final = 8 << 20

#: Orders in a frame: the longest that there are fit.
ORDERS_OF_A_FRAME: Final = 32

#: A mover that has said nothing for so long, though it was asked to, is killed.
SILENCE_S = 10.0
#: While it starts, or maps a memory: registering host memory for a GPU touches all of it.
MAPPING_S = 300.0
#: A job that waits so long for the outer tier is given up by the mover, which still answers.
JOB_S = 10.0
#: The wait before a replacement, doubling up to the longest; again the first once a mover has lasted `LASTED_S`.
FIRST_WAIT_S, LONGEST_WAIT_S, LASTED_S = 0.1, 30.0, 60.0
#: What a mover has for leaving by itself.
LEAVE_S = 2.0


class Mover:
    """Belongs to the loop it is started on; all calls and callbacks are on that loop.

    ``on_reply`` is called with each reply, ``on_lost`` at every end of a mover, once it is reaped, with the jobs that
    it has not ended: none of them touches any memory any more. Neither may raise. ``clock`` is monotonic; time during
    which the loop did not run should not pass on it.
    """

    def __init__(
        self,
        outer: OuterTier | None,
        staging_bytes: int,
        on_reply: Callable[[Reply], None],
        on_lost: Callable[[Sequence[int]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
        job_s: float = JOB_S,
    ) -> None:
        self._setup = Setup(outer, staging_bytes, job_s)
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._clock = clock
        self._silence_s = silence_s
        self._jobs = Jobs(clock)
        self._attached: dict[int, AttachFile | AttachGpu] = {}
        self._detaching: set[int] = set()
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[Order] = []
        self._unanswered: set[int] = set()
        self._heard = clock()
        self._greeted = False
        self._pinged: float | None = None
        self.restarts = 0

    @property
    def running(self) -> bool:
        """Whether a mover takes orders."""
        return self._child is not None and self._child.usable

    @property
    def pid(self) -> int | None:
        """The process id of the mover; None while there is none."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the first mover. Raises OSError if no process can be started."""
        await self._begin()
        self._task = asyncio.create_task(self._supervise(), name="mover")

    async def close(self) -> None:
        """End the mover and reap it; afterwards nothing of it touches any memory."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._child is not None:
            await self._end(self._child, LEAVE_S)

    def send(self, order: Order) -> bool:
        """Hand an order to the mover. False if it was not taken: nothing will be answered then.

        A job is not taken while there is no mover, or too much is waiting; ``Commit`` and ``Abandon`` only if their job
        was lost.
        """
        child = self._child
        if child is None or not child.usable:
            return False
        crowded = len(self._jobs) >= MOST_JOBS or child.waiting_bytes > MOST_WAITING_BYTES
        if isinstance(order, Forget):
            if crowded:
                return False
        elif not self._jobs.take(order, crowded=crowded):
            return False
        self._write(order)
        return True

    def attach(self, order: AttachFile | AttachGpu) -> None:
        """Have a memory mapped, by this mover and by each that replaces it; each says ``Attached``."""
        self._attached[order.memory] = order
        if self.running:
            self._unanswered.add(order.memory)
            self._write(order)

    def detach(self, memory: int) -> None:
        """Have a memory unmapped; ``Detached`` is said when no mover can touch it any more."""
        self._attached.pop(memory, None)
        if self._child is None:
            asyncio.get_running_loop().call_soon(self._on_reply, Detached(memory))
            return
        self._detaching.add(memory)
        if self._child.usable:
            self._write(Detach(memory))

    def _write(self, order: Order) -> None:
        """With the others of this turn of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(order)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._child is not None and self._child.usable:
            self._child.write(_framed(waiting))

    async def _begin(self) -> None:
        self._waiting.clear()
        self._heard, self._pinged, self._greeted = self._clock(), None, False
        self._child = child = Child(self._greeting, self._received)
        await child.connect()
        log.info("mover_started", mover_pid=child.pid)

    def _greeting(self) -> bytes:
        self._unanswered = set(self._attached)
        return _framed([self._setup, *self._attached.values()])

    def _received(self, found: list[Reply]) -> None:
        """Raises InvalidFrame for a reply to nothing."""
        self._heard, self._greeted = self._clock(), True
        for reply in found:
            if isinstance(reply, Pong):
                self._pinged = None
                continue
            if isinstance(reply, Detached):
                if reply.memory not in self._detaching:
                    raise InvalidFrame(f"memory {reply.memory} is detached, which nobody wanted")
                self._detaching.discard(reply.memory)
            elif isinstance(reply, Attached):
                self._unanswered.discard(reply.memory)
            elif not self._jobs.end(reply):
                raise InvalidFrame(f"a reply to no job: {reply!r:.200}")
            self._on_reply(reply)

    async def _supervise(self) -> None:
        wait = FIRST_WAIT_S
        while True:
            if self._child is not None:
                begun = time.monotonic()
                await self._watch(self._child)
                await self._end(self._child, 0)
                if time.monotonic() - begun > LASTED_S:
                    wait = FIRST_WAIT_S
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
            self.restarts += 1
            try:
                await self._begin()
            except OSError as error:
                log.error("mover_not_started", detail=error.strerror or str(error))

    async def _watch(self, child: Child) -> None:
        """Returns when the mover is to be replaced."""
        while not child.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.ended.wait(), self._silence_s / 8)
                break
            now = self._clock()
            limit = self._silence_s if self._greeted and not self._unanswered else MAPPING_S
            if self._pinged is None:
                self._pinged = now
                self._write(Ping(0))
            elif now - max(self._pinged, self._heard) > limit:
                log.error("mover_silent", mover_pid=child.pid, seconds=now - self._heard)
                return
            late = self._jobs.oldest()
            if late is not None and now - late[1] > self._setup.job_seconds + 2 * limit:
                log.error("mover_late", mover_pid=child.pid, job=late[0], seconds=now - late[1])
                return

    async def _end(self, child: Child, leave_s: float) -> None:
        """Returns once the mover is reaped, and what it had not ended is lost."""
        try:
            await child.end(leave_s)
        finally:
            # Cancelled while it waits for the proof: then there is none, and nothing is said to be lost.
            if child.status is not None:
                self._child = None
                lost, detached = self._jobs.lose(), sorted(self._detaching)
                self._detaching.clear()
                log.info("mover_ended", mover_pid=child.pid, status=child.status, jobs=len(lost))
                for memory in detached:
                    self._on_reply(Detached(memory))
                self._on_lost(lost)


def _framed(orders: Sequence[Order]) -> bytes:
    return b"".join(encode(orders[at : at + ORDERS_OF_A_FRAME]) for at in range(0, len(orders), ORDERS_OF_A_FRAME))
