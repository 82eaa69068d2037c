"""The jobs that a mover has in flight, as the daemon sees them."""

from __future__ import annotations

from collections.abc import Callable

from services.kvcache.mover.orders import (
    Abandon,
    AttachFile,
    AttachGpu,
    Commit,
    Detach,
    Filled,
    FillFromHost,
    FillFromOuter,
    Forget,
    Found,
    Lookup,
    Order,
    Ping,
    Read,
    ReadDone,
    Reply,
    Setup,
    Stored,
)

_ANSWERS: dict[type, type] = {
    Read: ReadDone,
    Commit: Stored,
    Lookup: Found,
    FillFromHost: Filled,
    FillFromOuter: Filled,
}


class Jobs:
    """By number: those that wait for the mover, oldest first, and those whose private copy waits for the daemon."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._awaited: dict[int, tuple[Order, float]] = {}
        self._kept: set[int] = set()

    def __len__(self) -> int:
        return len(self._awaited) + len(self._kept)

    def take(self, order: Order, *, crowded: bool) -> bool:
        """An order that is sent; False if it must not be: the job is unknown, or known, or there are too many."""
        match order:
            case Abandon():
                if order.job not in self._kept:
                    return False
                self._kept.discard(order.job)
                return True
            case Commit():
                if order.job not in self._kept:
                    return False
                self._kept.discard(order.job)
            case Read() | Lookup() | FillFromHost() | FillFromOuter():
                if crowded or order.job in self._awaited or order.job in self._kept:
                    return False
            case Setup() | AttachFile() | AttachGpu() | Detach() | Forget() | Ping():
                raise ValueError(f"{type(order).__name__} is no job")
        self._awaited[order.job] = (order, self._clock())
        return True

    def end(self, reply: Reply) -> bool:
        """A reply that came; False if no job waits for it."""
        if not isinstance(reply, ReadDone | Stored | Found | Filled):
            return True
        order, _ = self._awaited.get(reply.job, (None, 0.0))
        if order is None or _ANSWERS[type(order)] is not type(reply):
            return False
        del self._awaited[reply.job]
        if isinstance(order, Read) and isinstance(reply, ReadDone) and order.outer is not None and reply.ok:
            self._kept.add(reply.job)
        return True

    def oldest(self) -> tuple[int, float] | None:
        """The job that has waited longest for the mover, and since when."""
        return next(((job, since) for job, (_, since) in self._awaited.items()), None)

    def lose(self) -> list[int]:
        """Forget all of them; their numbers."""
        lost = sorted([*self._awaited, *self._kept])
        self._awaited.clear()
        self._kept.clear()
        return lost
