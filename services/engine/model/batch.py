"""One step's rows, laid out flat for the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.common.errors import ForwardFailed

I64: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """Runs ``tokens`` at the positions from ``start`` on of a sequence whose block table is ``pages``.

    K and V of the positions before ``start`` are in the pages already. ``want_logits`` is of how many of the last
    tokens the logits are wanted. No two rows of a batch write to the same slot.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    want_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows one after another: ``n`` tokens in all, every array int64."""

    tokens: I64  # [n]
    positions: I64  # [n]
    page: I64  # [n]: the page each token's K and V go to
    slot: I64  # [n]: and the slot in it
    starts: I64  # [rows]: position of each row's first token
    lengths: I64  # [rows]: tokens of each row
    block_tables: I64  # [rows, longest]: page ids, 0 after a row's last
    asking: I64  # [rows that want logits]: which rows those are
    asked: I64  # [rows that want logits]: of how many of their last tokens
    wanted: I64  # [their sum]: flat index of those tokens, row after row

    @classmethod
    def build(cls, rows: Sequence[Row], page_size: int, total_pages: int, vocab_size: int, max_context: int) -> Batch:
        """Lay out ``rows``, at least one.

        Raises ``ForwardFailed`` naming the row when it is empty, has too few pages for its tokens, or has a token, a
        page or a position out of range.
        """
        if [row.want_logits for row in rows].count(1) == [len(row.tokens) for row in rows].count(1) == len(rows):
            found = cls._decoding(rows, page_size, total_pages, vocab_size, max_context)
            if found is not None:
                return found
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        held = np.array([len(row.pages) for row in rows], np.int64)
        ends = starts + lengths
        _check(lengths < 1, "has no tokens")
        _check(np.logical_or(starts < 0, ends > max_context), f"has a position outside 0 to {max_context - 1}")
        _check(held * page_size < ends, "has too few pages for its tokens")

        pages = _joined(rows)
        _check((pages < 0) | (pages >= total_pages), f"has a page outside 0 to {total_pages - 1}", held)
        block_tables = _tables(pages, held, int(held.max()))

        row_of = np.repeat(np.arange(len(rows)), lengths)
        last = np.cumsum(lengths) - 1
        tokens = np.fromiter(chain.from_iterable([row.tokens for row in rows]), np.int64, int(lengths.sum()))
        _check((tokens < 0) | (tokens >= vocab_size), f"has a token outside 0 to {vocab_size - 1}", lengths)

        wants = np.array([row.want_logits for row in rows], np.int64)
        _check(np.logical_or(wants < 0, wants > lengths), "wants the logits of more tokens than it has")
        asking = np.flatnonzero(wants)
        asked = wants[asking]
        # The last of each row, as often as the row wants, less how many of its wanted tokens come behind.
        behind = np.repeat(np.cumsum(asked), asked) - 1 - np.arange(asked.sum())
        positions = np.arange(len(tokens)) - np.repeat(last + 1 - lengths, lengths) + starts[row_of]
        return cls(
            tokens=tokens,
            positions=positions,
            page=block_tables[row_of, positions // page_size],
            slot=positions % page_size,
            starts=starts,
            lengths=lengths,
            block_tables=block_tables,
            asking=asking,
            asked=asked,
            wanted=np.repeat(last[asking], asked) - behind,
        )

    @classmethod
    def _decoding(
        cls, rows: Sequence[Row], page_size: int, total_pages: int, vocab_size: int, max_context: int
    ) -> Batch | None:
        """What `build` returns for rows of one token, each of which wants its logits; None if one of them is wrong.

        These are most steps, and of few rows: what counts is how often NumPy is called.
        """
        tokens, starts = [row.tokens[0] for row in rows], [row.start for row in rows]
        held = [len(row.pages) for row in rows]
        outside = min(tokens) < 0 or max(tokens) >= vocab_size or min(starts) < 0 or max(starts) >= max_context
        if outside or not min(held):
            return None
        pages = _joined(rows)
        each, positions = np.arange(len(rows)), np.array(starts, np.int64)
        column, of_row = positions // page_size, np.array(held, np.int64)
        if pages.min() < 0 or pages.max() >= total_pages or (column >= of_row).any():
            return None
        block_tables = _tables(pages, of_row, max(held))
        ones = np.ones(len(rows), np.int64)
        return cls(
            tokens=np.array(tokens, np.int64),
            positions=positions,
            page=block_tables[each, column],
            slot=positions - column * page_size,
            starts=positions,
            lengths=ones,
            block_tables=block_tables,
            asking=each,
            asked=ones,
            wanted=each,
        )


def _joined(rows: Sequence[Row]) -> I64:
    """All rows' block tables, one after another."""
    return np.frombuffer(b"".join([_table(row.pages) for row in rows]), np.int64)


def _tables(pages: I64, held: I64, widest: int) -> I64:
    """Joined block tables of ``held`` pages each, ``widest`` at most: ``[rows, widest]``, made up with zeros."""
    if len(pages) == len(held) * widest:
        return pages.reshape(len(held), widest)
    tables = np.zeros((len(held), widest), np.int64)
    tables[np.arange(widest) < held[:, np.newaxis]] = pages
    return tables


def _table(pages: Sequence[int]) -> array[int]:
    """A block table as 64-bit integers: itself, if it is."""
    return pages if isinstance(pages, array) and pages.typecode == "q" else array("q", pages)


def _check(wrong: NDArray[np.bool_], what: str, lengths: I64 | None = None) -> None:
    """Raise naming the first row that is ``wrong``, or has something that is, of as many as its length."""
    if wrong.any():
        at = int(np.argmax(wrong))
        row = at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise ForwardFailed(f"row {row} of the batch {what}")
