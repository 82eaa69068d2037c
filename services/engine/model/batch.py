"""Packs the rows of a step into flat arrays for the kernels."""

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
    """Computes ``tokens`` from position ``start`` on, for a sequence with block table ``pages``. A token
    ``-1 - row`` is the one that the sampler drew for that row of the step before, which the host need not know.

    K and V of the positions before ``start`` are already in the pages. Logits are returned for the last ``want_logits``
    tokens. No two rows of a batch write to the same slot.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    want_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows concatenated: ``n`` tokens in total. Every array is int64."""

    tokens: I64  # [n]; -1 - row: what was drawn for that row of the step before
    positions: I64  # [n]
    page: I64  # [n]: the page each token's K and V go to
    slot: I64  # [n]: and the slot in it
    starts: I64  # [rows]: position of each row's first token
    lengths: I64  # [rows]: tokens of each row
    block_tables: I64  # [rows, longest]: page ids, 0 after a row's last
    asking: I64  # [rows that want logits]: their row numbers
    asked: I64  # [rows that want logits]: how many of their last tokens
    wanted: I64  # [sum of asked]: flat indices of those tokens, row by row

    @classmethod
    def build(
        cls,
        rows: Sequence[Row],
        page_size: int,
        total_pages: int,
        vocab_size: int,
        max_context: int,
        drawn: int = 0,
    ) -> Batch:
        """Pack ``rows``, at least one; ``drawn`` is how many rows the step before drew.

        Raises ``ForwardFailed`` naming the row when it is empty, has too few pages for its tokens, or has a token, page
        or position out of range.
        """
        if [row.want_logits for row in rows].count(1) == [len(row.tokens) for row in rows].count(1) == len(rows):
            found = cls._decoding(rows, page_size, total_pages, vocab_size, max_context, drawn)
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
        _check((tokens < -drawn) | (tokens >= vocab_size), f"has a token outside 0 to {vocab_size - 1}", lengths)

        wants = np.array([row.want_logits for row in rows], np.int64)
        _check(np.logical_or(wants < 0, wants > lengths), "wants the logits of more tokens than it has")
        asking = np.flatnonzero(wants)
        asked = wants[asking]
        # For each wanted token: the index of its row's last token, minus how many of the row's tokens follow it.
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
        cls, rows: Sequence[Row], page_size: int, total_pages: int, vocab_size: int, max_context: int, drawn: int
    ) -> Batch | None:
        """The fast path of `build` for rows of a single token with logits; None if a row is invalid.

        Most steps are decode steps with few rows, where the number of NumPy calls dominates.
        """
        tokens, starts = [row.tokens[0] for row in rows], [row.start for row in rows]
        held = [len(row.pages) for row in rows]
        outside = min(tokens) < -drawn or max(tokens) >= vocab_size or min(starts) < 0 or max(starts) >= max_context
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
    """Returns the rows' block tables concatenated."""
    return np.frombuffer(b"".join([_table(row.pages) for row in rows]), np.int64)


def _tables(pages: I64, held: I64, widest: int) -> I64:
    """Splits concatenated block tables of ``held`` pages each into ``[rows, widest]``, padded with zeros."""
    if len(pages) == len(held) * widest:
        return pages.reshape(len(held), widest)
    tables = np.zeros((len(held), widest), np.int64)
    tables[np.arange(widest) < held[:, np.newaxis]] = pages
    return tables


def _table(pages: Sequence[int]) -> array[int]:
    """Returns a block table as 64-bit integers, without a copy if it already is."""
    return pages if isinstance(pages, array) and pages.typecode == "q" else array("q", pages)


def _check(wrong: NDArray[np.bool_], what: str, lengths: I64 | None = None) -> None:
    """Raises ForwardFailed naming the first row that is ``wrong``. With ``lengths``, ``wrong`` has one entry per token
    or page, and ``lengths`` says how many belong to each row.
    """
    if wrong.any():
        at = int(np.argmax(wrong))
        row = at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise ForwardFailed(f"row {row} of the batch {what}")
