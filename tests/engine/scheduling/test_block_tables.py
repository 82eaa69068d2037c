"""Which pages live requests have: each counted once, and only those that nobody else has come back."""

from __future__ import annotations

from services.engine.pages.source import Grant, PageCopy
from services.engine.scheduling.block_tables import BlockTables
from services.engine.scheduling.sequence import Sequence
from tests.engine.fakes import make_request


def holding(holds: BlockTables, *pages: int, copies: tuple[PageCopy, ...] = ()) -> Sequence:
    sequence = Sequence(make_request(), 1)
    assert holds.take(sequence, Grant("a", pages=pages, copies=copies)) == list(copies)
    return sequence


def test_a_page_is_gone_when_the_last_that_has_it_leaves() -> None:
    holds = BlockTables()
    first, second, third = holding(holds, 1, 2, 3), holding(holds, 1, 2, 4), holding(holds, 1)
    assert len(holds) == 4
    assert holds.without([first.pages]) == 3, "pages 1 and 2 stay with others"
    assert holds.without([first.pages, second.pages]) == 1
    assert holds.without([first.pages, second.pages, third.pages]) == 0
    assert len(holds) == 4, "they have not left"
    for sequence, left in ((second, 3), (first, 1), (third, 0)):
        holds.drop(sequence)
        assert (len(holds), list(sequence.pages)) == (left, [])


def test_a_page_that_a_copy_stands_for_is_let_go_of() -> None:
    holds = BlockTables()
    first, second = holding(holds, 1, 2), holding(holds, 1, 2)
    copy = PageCopy(1, 2, 3)
    assert holds.take(second, Grant("b", 2, copies=(copy,))) == [copy]
    assert (list(first.pages), list(second.pages), len(holds)) == ([1, 2], [1, 3], 3)
    assert holds.take(second, Grant("b", 2, (4,), copies=(copy,))) == [], "told again, and made"
    assert (list(second.pages), len(holds)) == ([1, 3, 4], 4)
    assert holds.without([first.pages]) == 3


def test_a_new_sequence_has_its_copy_in_its_table_from_the_start() -> None:
    holds, copy = BlockTables(), PageCopy(1, 2, 3)
    assert list(holding(holds, 1, 3, copies=(copy,)).pages) == [1, 3]
    assert len(holds) == 2
