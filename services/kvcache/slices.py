"""Long work in slices, between which the daemon's loop serves others.

Work is a generator that yields wherever it may pause: what it has done by then is whole, and others may see and change
it. It is sent the time when it goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")

#: A job is run by a thread before the work goes on that has yielded it.
Job = Callable[[], object]
Work = Generator[Job | None, Any, Result]

#: Pages that are taken, shared, published or given up between two places where work may pause: some microseconds each.
ENTRIES = 512

#: Seconds of a slice, which is all that long work gets in one pass of the loop.
SLICE_S = 0.002


def finish(work: Work[Result], clock: Callable[[], float]) -> Result:
    """The result of work, all of it at once."""
    try:
        job = next(work)
        while True:
            try:
                if job is not None:
                    job()
            except Exception as error:
                job = work.throw(error)
            else:
                job = work.send(clock())
    except StopIteration as end:
        result: Result = end.value
        return result


def found_in(walk: Iterator[Result | None]) -> Work[list[Result]]:
    """What a walk has found, which yields None wherever it may pause."""
    found: list[Result] = []
    for one in walk:
        if one is None:
            yield None
        else:
            found.append(one)
    return found


@dataclass(slots=True, eq=False)
class _Order:
    """Works of one name, of which one is in progress."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    count: int = 0


class Slices:
    """Runs the long works of one loop. However many there are, they have one slice together in each pass of the loop,
    in turn; so a call that needs no slice waits for one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is the time that works are sent."""
        self._clock = clock
        self._until: float | None = None  # the end of this pass's slice, if one has begun
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ticking = False
        self._orders: dict[str, _Order] = {}

    async def run(self, work: Work[Result], order: str = "") -> Result:
        """The result of work. What does not pause is done at once; works of one ``order`` run one after the other."""
        if order in self._orders:
            return await self._in_order(order, self.run(work))
        try:
            job = next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        rest = self._rest(work, job)
        return await (self._in_order(order, rest) if order else rest)

    async def _in_order(self, order: str, rest: Coroutine[Any, Any, Result]) -> Result:
        """The first of its order goes on at once; what waits for others has not begun, and never does if it is
        cancelled.
        """
        ahead = self._orders.setdefault(order, _Order())
        ahead.count += 1
        try:
            async with ahead.lock:
                return await rest
        finally:
            rest.close()
            ahead.count -= 1
            if not ahead.count:
                del self._orders[order]

    async def _rest(self, work: Work[Result], job: Job | None) -> Result:
        try:
            while True:
                if job is not None:
                    try:
                        await asyncio.get_running_loop().run_in_executor(None, job)
                    except Exception as error:
                        job = work.throw(error)
                        continue
                await self._pause()
                job = work.send(self._clock())
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            work.close()

    async def _pause(self) -> None:
        """Until there is something left of a slice."""
        if not self._waiting:
            now = time.monotonic()
            if self._until is None:
                self._until = now + SLICE_S
                self._tick_next()
                return
            if now < self._until:
                return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._tick_next()
        await turn
        if self._until is None:
            self._until = time.monotonic() + SLICE_S

    def _tick_next(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        """Another pass of the loop has begun; the work that has waited longest continues in the next."""
        self._ticking, self._until = False, None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._tick_next()
                break
