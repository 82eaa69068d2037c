"""Which pages the block tables of live requests have, and how many of these each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from services.engine.pages.source import Grant, PageCopy
from services.engine.scheduling.sequence import Sequence


class BlockTables:
    """Every change of a block table goes through here. A page is held by each sequence that has it in its table."""

    def __init__(self) -> None:
        self._tables: Counter[int] = Counter()  # page -> sequences that have it

    def __len__(self) -> int:
        return len(self._tables)

    def without(self, leaving: Iterable[Items[int]]) -> int:
        """How many pages are still held when these block tables are given back."""
        returning = Counter[int]()
        for pages in leaving:
            returning.update(pages)
        return len(self._tables) - sum(self._tables[page] == count for page, count in returning.items())

    def take(self, sequence: Sequence, grant: Grant) -> list[PageCopy]:
        """Have a sequence's table be what it was granted; returns the copies that have yet to be made."""
        known = len(sequence.pages)
        new = grant.pages[known - grant.first_index :]
        if new:  # most grants are of reports alone
            sequence.pages.extend(new)
            self._tables.update(new)
        copies = []
        for copy in grant.copies:
            if copy.index < known:
                if sequence.pages[copy.index] != copy.source:
                    continue  # it was told before, and made
                self._let_go(copy.source)
                self._tables[copy.target] += 1
                sequence.pages[copy.index] = copy.target
            copies.append(copy)
        return copies

    def drop(self, sequence: Sequence) -> None:
        """Empty a sequence's table."""
        for page in sequence.pages:
            self._let_go(page)
        del sequence.pages[:]

    def _let_go(self, page: int) -> None:
        self._tables[page] -= 1
        if not self._tables[page]:
            del self._tables[page]
