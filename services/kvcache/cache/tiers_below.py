"""What the state of the daemon needs of the tiers below its pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from services.kvcache.pool.lower_tiers import StoredLink
from services.kvcache.pool.pool import Pool


class TiersBelow(Protocol):
    """The tiers below all pools."""

    page_bytes: int  # what the daemon keeps more of each page of a pool

    def adopt(self, pool: Pool) -> None:
        """A pool was made: it has these tiers below it."""

    def stored_links(self, pool_id: str) -> list[StoredLink]:
        """What the host tier has of a pool, all of it as it is now."""

    def stored_link(self, pool_id: str, key: int) -> StoredLink | None:
        """What the host tier has of a pool under the hash of a link; None if it has nothing."""

    def charged(self) -> int:
        """What is charged to the daemon's own memory for what is stored, reserved parts apart."""

    def walk(self) -> Iterator[str]:
        """Every violated invariant that is none of a single pool."""
