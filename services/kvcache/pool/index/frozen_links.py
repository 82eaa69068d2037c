"""The links of a prefix cache at one moment, for readers that take longer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from services.kvcache.pool.index.key_table import KeyTable


class FrozenLinks:
    """Which link followed which at one moment."""

    def __init__(self, of_key: KeyTable, parents: array[int], standby: frozenset[int]) -> None:
        self._of_key = of_key
        self._parents = parents
        self._standby = standby

    def key(self, page: int) -> int:
        """The hash of the link of a page that was published."""
        return self._of_key.key(page)

    def parent(self, page: int) -> int | None:
        """The primary page of its parent link; None for a first link. A salt's root is the hash of no link."""
        return self._of_key.get(self._parents[page])

    def has(self, key: int) -> bool:
        """Whether a link had this hash."""
        return self._of_key.get(key) is not None

    def has_standby(self, page: int) -> bool:
        """Whether others stood by for the link of a page that was published."""
        return self.key(page) in self._standby

    def columns(self, most: int) -> Iterator[tuple[array[int], array[int]] | None]:
        """The hash of every link, and the hash of its parent, at most so many at a time; None now and then. In no
        particular order.
        """
        hashes, parents = array("Q"), array("Q")
        for pages in self._of_key.stretches():
            for page in pages:
                hashes.append(self._of_key.key(page))
                parents.append(self._parents[page])
                if len(hashes) == most:
                    yield hashes, parents
                    hashes, parents = array("Q"), array("Q")
            yield None
        if hashes:
            yield hashes, parents
