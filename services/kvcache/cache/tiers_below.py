"""What the state of the daemon needs of the tiers below its pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from services.kvcache.pool.pool import Pool


class TiersBelow(Protocol):
    """The tiers below all pools."""

    page_bytes: int  # what the daemon keeps more of each page of a pool

    def adopt(self, pool: Pool) -> None:
        """A pool was made: it has these tiers below it."""

    def charged(self) -> int:
        """What is charged to the daemon's own memory for what is stored, reserved parts apart."""

    def walk(self) -> Iterator[str]:
        """Every violated invariant that is none of a single pool."""
