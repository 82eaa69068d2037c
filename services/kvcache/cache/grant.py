"""What a sequence is granted, and the checks that every grant goes through: the session's quota and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import ExceedsPool, QuotaExceeded
from services.kvcache import slices
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.headroom import Promised
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence
from services.kvcache.slices import Work


@dataclass(frozen=True, slots=True)
class Copy:
    """The engine copies page ``source`` to ``target``, then puts ``target`` at ``index`` of its block table."""

    index: int
    source: tuple[int, int]
    target: tuple[int, int]


class Grant(NamedTuple):
    """The pages after those the engine knew, as (id, generation)."""

    first_index: int
    pages: list[tuple[int, int]]
    cached_tokens: int
    copies: list[Copy]


def grow(session: Session, pool: Pool, sequence: Sequence, total: int, known: int, now: float, counted: int) -> Grant:
    """Grow to ``total`` pages, which was checked to be possible, and answer; commits.

    ``counted`` is what the session's quota counts of the sequence so far.
    """
    table = sequence.pages
    if len(table) < total:
        pool.grow(sequence, total)
    pool.touch(sequence, now)
    if more := sequence.page_count - counted:
        # As `Session.hold`: part of every step.
        session.held_pages += more
        session.memory.used += more * session.entry_bytes
    pages = pool.references(table[known:]) if known < total else []
    return _grant(pool, sequence, known, pages)


def _grant(pool: Pool, sequence: Sequence, known: int, pages: list[tuple[int, int]]) -> Grant:
    if sequence.copy is None:
        return Grant(known, pages, sequence.cached_tokens, [])
    at, source = sequence.copy
    copy = Copy(at, pool.reference(source), pool.reference(sequence.pages[at]))
    return Grant(known, pages, sequence.cached_tokens, [copy])


def growing(session: Session, pool: Pool, sequence: Sequence, total: int, promised: Promised) -> Work[None]:
    """Grow to ``total`` pages, which are promised, in slices."""
    while (has := len(sequence.pages)) < total:
        some = min(slices.ENTRIES, total - has)
        promised.take(some)
        pool.grow(sequence, has + some)
        session.hold(some)
        yield None
        check_live(session, sequence)


def answering(session: Session, pool: Pool, sequence: Sequence, known: int) -> Work[Grant]:
    """The grant of a sequence that has grown, in slices."""
    pages: list[tuple[int, int]] = []
    now = yield None
    check_live(session, sequence)
    while (at := known + len(pages)) < len(sequence.pages):
        pages += pool.references(sequence.pages[at : at + 2 * slices.ENTRIES])
        now = yield None
        check_live(session, sequence)
    pool.touch(sequence, now)
    return _grant(pool, sequence, known, pages)


def check_live(session: Session, sequence: Sequence) -> None:
    """Whether a sequence is live still, after others have run. Raises SequenceRemoved."""
    if session.sequences.get(sequence.id) is not sequence:
        session.find(sequence.id)
        raise session.unknown(sequence.id)


def check_quota(session: Session, more: int, total: int) -> None:
    """Whether a sequence of the session can have ``more`` pages, and ``total``. Raises ExceedsPool, QuotaExceeded."""
    if session.max_pages is not None and total > session.max_pages:
        raise ExceedsPool(
            f"total_pages is {total} and the session's quota is {session.max_pages}",
            field="total_pages",
            max_pages=session.max_pages,
        )
    if session.max_pages is not None and session.held_pages + more > session.max_pages:
        raise QuotaExceeded(
            f"the session's sequences hold {session.held_pages} pages, {more} more are wanted and its quota is "
            f"{session.max_pages}",
            held_pages=session.held_pages,
            max_pages=session.max_pages,
        )
    if session.share_pages is not None and session.held_pages + more > session.share_pages:
        raise QuotaExceeded(
            f"{session.owner} has its share of the pool, and another identity waits for pages: the session's sequences "
            f"hold {session.held_pages}, {more} more are wanted, and it may have {session.share_pages} for now",
            held_pages=session.held_pages,
            max_pages=session.share_pages,
            identity=session.owner,
        )
