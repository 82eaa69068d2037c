"""What a pool tells the tiers below it, and asks of them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from services.common.errors import ServiceError
from services.kvcache.pool.index.events import Link
from services.kvcache.slices import Work


class StoredLink(NamedTuple):
    """A page that the host tier has: its link, its tokens, and its salt if it is a first link."""

    link: Link
    tokens: bytes
    salt: str | None


class LowerTiers(Protocol):
    """The tiers below one pool, if there are any."""

    @property
    def filling(self) -> Collection[int]:
        """The pages in state FILLING: a mover writes them, or they wait for the pages before them."""

    def published(self, page: int, parent: int | None, tokens: bytes, salt: str) -> None:
        """A page was published behind its parent (None: the salt's root)."""

    def came_back(self, pages: list[int]) -> None:
        """Published pages were matched by an opening."""

    def cached(self, page: int) -> None:
        """A page is cached: its last holder has gone."""

    def withdrawn(self, page: int) -> None:
        """A page is not what was published, or is behind one that is not; it is published still."""

    def look(
        self, session_id: str, sequence_id: str, prompt: array[int], salt: str, wait_s: float | None, speed: float
    ) -> Work[ServiceError | None]:
        """PagesFilling, as long as it is better to wait for pages of this prompt than to compute them; otherwise None.

        ``speed`` is how many tokens a second the engine prefills, 0 if that is not known. In slices.
        """

    def give_way(self) -> None:
        """Give up all fills: somebody lacks the pages that they hold."""

    def closing(self) -> Work[None]:
        """Move nothing more to or from the pool's memory: nothing maps it afterwards."""

    def charged(self) -> int:
        """What is charged to the daemon's own memory for fills."""

    def walk(self) -> Iterator[str]:
        """Every violated invariant."""
