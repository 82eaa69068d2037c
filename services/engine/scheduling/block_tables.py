"""The block tables of live requests, with a reference count for each page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from services.engine.pages.source import Grant, PageCopy
from services.engine.scheduling.sequence import Sequence


class BlockTables:
    """All block table changes go through here. A page is held by every sequence whose table has it."""

    def __init__(self) -> None:
        self._tables: Counter[int] = Counter()  # page -> number of holders

    def __len__(self) -> int:
        return len(self._tables)

    def without(self, leaving: Iterable[Items[int]]) -> int:
        """Returns how many distinct pages stay held once these block tables are released."""
        returning = Counter[int]()
        for pages in leaving:
            returning.update(pages)
        return len(self._tables) - sum(self._tables[page] == count for page, count in returning.items())

    def take(self, sequence: Sequence, grant: Grant) -> list[PageCopy]:
        """Apply a grant to a sequence's block table. Returns the page copies still to be made."""
        known = len(sequence.pages)
        new = grant.pages[known - grant.first_index :]
        if new:  # most grants answer a report and bring no pages
            sequence.pages.extend(new)
            self._tables.update(new)
        copies = []
        for copy in grant.copies:
            if copy.index < known:
                if sequence.pages[copy.index] != copy.source:
                    continue  # a repeated copy that was already made
                self._let_go((copy.source,))
                self._tables[copy.target] += 1
                sequence.pages[copy.index] = copy.target
            copies.append(copy)
        return copies

    def drop(self, sequence: Sequence) -> None:
        """Empty a sequence's table."""
        self._let_go(sequence.pages)
        del sequence.pages[:]

    def _let_go(self, pages: Iterable[int]) -> None:
        tables = self._tables
        for page in pages:
            if (holders := tables[page]) > 1:
                tables[page] = holders - 1
            else:
                tables.pop(page)  # a Counter's `del` is a call of Python's, a page of a long prompt each
