"""Rows laid out for the kernels: a step that only decodes, and the same rows beside a prompt."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ForwardFailed
from services.engine.model.batch import Batch, Row

PAGE, PAGES, VOCAB, CONTEXT = 4, 50, 100, 64


def build(rows: list[Row]) -> Batch:
    return Batch.build(rows, PAGE, PAGES, VOCAB, CONTEXT)


@st.composite
def decoding(draw: st.DrawFn) -> Row:
    start = draw(st.integers(0, CONTEXT - 1))
    pages = st.lists(st.integers(0, PAGES - 1), min_size=start // PAGE + 1, max_size=CONTEXT // PAGE)
    return Row([draw(st.integers(0, VOCAB - 1))], start, draw(pages), 1)


@given(st.lists(decoding(), min_size=1, max_size=8))
def test_rows_that_decode_are_laid_out_as_beside_a_prompt(rows: list[Row]) -> None:
    found, among = build(rows), build([*rows, Row([1, 2, 3], 0, [7] * (CONTEXT // PAGE), 1)])
    for field in fields(Batch):
        mine, theirs = getattr(found, field.name), getattr(among, field.name)
        assert mine.dtype == theirs.dtype == np.int64
        if field.name == "block_tables":
            widest = max(len(row.pages) for row in rows)
            assert mine.shape == (len(rows), widest)
            theirs = theirs[:, :widest]
        assert np.array_equal(mine, theirs[: len(rows)]), field.name


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (Row([-1], 3, [0], 1), "token outside 0 to 99"),
        (Row([100], 3, [0], 1), "token outside 0 to 99"),
        (Row([1], -1, [0], 1), "position outside 0 to 63"),
        (Row([1], 64, [0] * 17, 1), "position outside 0 to 63"),
        (Row([1], 4, [0], 1), "too few pages"),
        (Row([1], 0, [], 1), "too few pages"),
        (Row([1], 3, [-1], 1), "page outside 0 to 49"),
        (Row([1], 3, [0, 50], 1), "page outside 0 to 49"),
    ],
)
def test_a_row_that_is_wrong_is_named_among_rows_that_decode(row: Row, text: str) -> None:
    right = Row([1], 5, [3, 4], 1)
    build([right, right])
    with pytest.raises(ForwardFailed, match=f"row 1 of the batch has (a )?{text}"):
        build([right, row, right])
