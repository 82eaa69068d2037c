"""An engine's process, and what the daemon holds of it to know whether it lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Process:
    """An engine's process; ``start_time``, in clock ticks since boot, distinguishes it from a reuse of its pid."""

    pid: int
    start_time: int
    pid_namespace: str


class Witness(Protocol):
    """Of one process, for as long as it is held: neither it nor its answers ever mean another that has the same pid."""

    @property
    def uid(self) -> int:
        """The user that the process runs as."""

    @property
    def own(self) -> bool:
        """Whether that is the daemon's own user."""

    def gone(self) -> bool:
        """Whether the process is proven gone, its threads and its memory with it. Never true of one that lives."""

    def kill(self) -> bool:
        """Kill the process; False if the daemon may not, or it is the daemon itself. ``gone`` says when it is done."""

    def close(self) -> None:
        """Let go of it."""


#: The witness of a process; None for one that cannot be seen from here, of which nothing is known.
Observe = Callable[[Process], Witness | None]
