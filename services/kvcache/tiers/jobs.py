"""What the mover is doing: jobs by number, from their order to their last reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from services.kvcache.mover.orders import Order
from services.kvcache.tiers.fetch.fill import Fill
from services.kvcache.tiers.host.host_tier import Slot
from services.kvcache.tiers.memories import MoverLink
from services.kvcache.tiers.pool_tiers import PoolTiers


@dataclass(slots=True, eq=False)
class Store:
    """A page on its way to the ``slot``, to the ``outer`` tier, or to both."""

    lower: PoolTiers
    page: int
    generation: int
    digest: bytes
    slot: Slot | None
    outer: bool
    size: int


@dataclass(slots=True, eq=False)
class Fetch:
    """Page ``index`` of a fill on its way into ``page``, from the ``slot`` or from the outer tier."""

    fill: Fill
    index: int
    page: int
    slot: Slot | None
    begun: float


@dataclass(slots=True, eq=False)
class Search:
    """A lookup in the outer tier; ``found`` gets the number of keys that are there, and the seconds it took, or None if
    the tier did not answer.
    """

    keys: int
    found: Callable[[int, float | None], None]


Job: TypeAlias = Store | Fetch | Search


class MoverJobs:
    """The jobs in flight. Each is ended by a reply, or with its mover."""

    def __init__(self, link: MoverLink) -> None:
        self._link = link
        self._jobs: dict[int, Job] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, job: Job, order: Callable[[int], Order]) -> bool:
        """Send the order of a new job, made from its number; False if the mover takes none now."""
        if not self._link.send(order(self._last + 1)):
            return False
        self._last += 1
        self._jobs[self._last] = job
        return True

    def send(self, order: Order) -> bool:
        """Send an order that is no job of its own; False if the mover takes none now."""
        return self._link.send(order)

    def find(self, number: int) -> Job | None:
        """The job with this number, if it is in flight."""
        return self._jobs.get(number)

    def end(self, number: int) -> Job | None:
        """The job with this number, which is in flight no more."""
        return self._jobs.pop(number, None)

    def all(self) -> Iterable[Job]:
        """The jobs in flight, oldest first."""
        return self._jobs.values()
