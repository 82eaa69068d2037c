"""Pages by 64-bit key: a hash table of 8 to 16 bytes per page, where a dict takes 100."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator

_NONE = -1
_PAUSE = 1024  # slots that are looked at in one go


class KeyTable:
    """A subset of ``len(keys)`` pages with distinct keys; ``keys[page]`` is a page's key, constant while it is stored.

    Open addressing with linear probing (Knuth, volume 3, 6.4, algorithms L and R), at most half full. Keys are hashes,
    so their low bits serve as the address. Every operation is O(1) expected.
    """

    def __init__(self, keys: array[int]) -> None:
        self._keys = keys
        self._mask = (1 << (2 * len(keys)).bit_length()) - 1
        self._pages = array("i", [_NONE]) * (self._mask + 1)

    def get(self, key: int) -> int | None:
        """The page with this key; None if there is none."""
        page = self._pages[self._find(key)]
        return None if page == _NONE else page

    def key(self, page: int) -> int:
        """The key of a page."""
        return self._keys[page]

    def __getitem__(self, key: int) -> int:
        """The page with this key. Raises KeyError if there is none."""
        page = self.get(key)
        if page is None:
            raise KeyError(key)
        return page

    def add(self, page: int) -> int:
        """Add a page unless its key is taken. Returns the page that now has the key."""
        at = self._find(self._keys[page])
        if self._pages[at] == _NONE:
            self._pages[at] = page
        return self._pages[at]

    def replace(self, page: int) -> None:
        """Replace the stored page with the same key by this one."""
        self._pages[self._find(self._keys[page])] = page

    def remove(self, key: int) -> None:
        """Remove the page with this key. Raises KeyError if there is none."""
        pages, mask, gap = self._pages, self._mask, self._find(key)
        if pages[gap] == _NONE:
            raise KeyError(key)
        # Entries displaced past the gap move into it, because a search stops at the first free slot.
        at = gap
        while (page := pages[at := (at + 1) & mask]) != _NONE:
            home = self._keys[page] & mask
            if (at - home) & mask >= (at - gap) & mask:
                pages[gap] = page
                gap = at
        pages[gap] = _NONE

    def frozen(self) -> KeyTable:
        """A copy of now."""
        frozen = copy.copy(self)
        frozen._keys, frozen._pages = self._keys[:], self._pages[:]
        return frozen

    def stretches(self) -> Iterator[list[int]]:
        """All pages in it, a stretch of the table at a time. Of a table that does not change meanwhile."""
        for at in range(0, len(self._pages), _PAUSE):
            yield [page for page in self._pages[at : at + _PAUSE] if page != _NONE]

    def walk(self, belongs: Callable[[int], bool]) -> Iterator[str | None]:
        """Violations: a page that a search does not find in its slot, or that does not belong there; None now and then.
        The table may change meanwhile: what is said of a page was seen in one look at it.
        """
        for at in range(self._mask + 1):
            page = self._pages[at]
            if page != _NONE and self._find(self._keys[page]) != at:
                yield f"page {page} is not found by its key {self._keys[page]:016x}"
            elif page != _NONE and not belongs(page):
                yield f"page {page} is found by its key {self._keys[page]:016x} and is not indexed"
            if at % _PAUSE == 0:
                yield None

    def _find(self, key: int) -> int:
        """The slot of the page with this key, or the free slot where it would go."""
        keys, pages, mask = self._keys, self._pages, self._mask
        at = key & mask
        while (page := pages[at]) != _NONE and keys[page] != key:
            at = (at + 1) & mask
        return at
