"""The links of a prefix cache at one moment, for readers that take longer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from services.kvcache.pool.index.key_table import KeyTable


class FrozenLinks:
    """Which link followed which at one moment."""

    def __init__(self, of_key: KeyTable, parents: array[int]) -> None:
        self._of_key = of_key
        self._parents = parents

    def has(self, key: int) -> bool:
        """Whether a link had this hash."""
        return self._of_key.get(key) is not None

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
