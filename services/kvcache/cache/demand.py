"""One sequence's part of a step: checked as a whole, then committed as a whole.

Each function either raises a ServiceError and has changed nothing, or does all it says. ``cache`` alone calls them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import (
    ExceedsPool,
    FieldInvalid,
    QuotaExceeded,
    SequenceExists,
    SequenceMismatch,
    TooManySequences,
)
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence, digest_fork, digest_opening, token_array


class Demand(NamedTuple):
    """See SequenceDemand in the proto. ``prompt`` is None when nothing is opened by one, and then ``retention`` is;
    ``parent`` is empty when nothing is forked.
    """

    sequence_id: str
    prompt: Items[int] | None
    salt: str
    start: int
    tokens: list[int]
    total_pages: int
    known_pages: int
    retention: Retention | None = None
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """The engine copies page ``source`` to ``target``, then has ``target`` at ``index`` of its block table."""

    index: int
    source: tuple[int, int]
    target: tuple[int, int]


class Grant(NamedTuple):
    """The pages behind those the engine knew, as (id, generation)."""

    first_index: int
    pages: list[tuple[int, int]]
    cached_tokens: int
    copies: list[Copy]


def serve(session: Session, pool: Pool, demand: Demand, now: float) -> Grant:
    """Open, report and grow. Raises the item reasons of AllocatePages."""
    sequence_id, prompt, salt, start, tokens, wanted, known, retention, parent = demand
    sequence = session.find(sequence_id)
    if sequence is None:
        return _fork(session, pool, demand, now) if parent else _open(session, pool, demand, now)
    if parent and digest_fork(parent) != sequence.opening_digest:
        raise SequenceMismatch(
            f"sequence {sequence_id!r} is open and is no fork of {parent!r}", field="parent_sequence_id"
        )
    if prompt is not None and (
        retention != sequence.retention or digest_opening(prompt_array(prompt), salt) != sequence.opening_digest
    ):
        raise SequenceMismatch(
            f"sequence {sequence_id!r} is open with another prompt, salt or retention", field="opening"
        )
    new = pool.check_tokens(sequence, start, tokens)
    held = len(sequence.pages)
    total = wanted if wanted > held else held
    if known > total:
        raise _unknown_pages(known, total)
    # Room for more than is resident means that the tail is going to be written: not while others hold it too. New
    # tokens were found to go into a tail of its own.
    unshares = (
        sequence.forked and not new and wanted * pool.page_size > len(sequence.tokens) and pool.tail_is_shared(sequence)
    )
    more = total - held + unshares
    counted = sequence.page_count
    if more:
        # A token behind what was copied lets go of the copy's source, before anything is taken.
        source = sequence.copy[1] if sequence.copy is not None and new else None
        _check_quota(session, more - (source is not None), total)
        pool.check_growth(sequence.id, total, more - (source is not None and pool.table.holder_count(source) == 1))

    if new:
        pool.append(sequence, new)
    if unshares:
        pool.unshare_tail(sequence)
    if known == total and not more and sequence.page_count == counted and sequence.copy is None:
        pool.touch(sequence, now)
        return Grant(known, [], sequence.cached_tokens, [])
    return _grow(session, pool, sequence, total, known, now, counted)


def _open(session: Session, pool: Pool, demand: Demand, now: float) -> Grant:
    if demand.prompt is None:
        raise session.unknown(demand.sequence_id)
    if demand.start or demand.tokens:
        raise FieldInvalid("tokens: nothing can be resident before a sequence is opened", field="tokens")
    _check_room_for_sequence(session)
    prompt = prompt_array(demand.prompt)
    if demand.retention is not None:
        demand.retention.check()
    matched = pool.match(prompt, demand.salt)
    total = max(len(matched), demand.total_pages)
    if demand.known_pages > total:
        raise _unknown_pages(demand.known_pages, total)
    _check_quota(session, total, total)
    pool.check_growth(demand.sequence_id, total, total - len(matched), spoken_for=pool.cached_among(matched))

    digest = digest_opening(prompt, demand.salt)
    sequence = Sequence(session.id, demand.sequence_id, demand.salt, digest, now)
    sequence.retention = demand.retention
    session.add(sequence)
    pool.open(sequence, prompt, matched)
    return _grow(session, pool, sequence, total, demand.known_pages, now)


def _fork(session: Session, pool: Pool, demand: Demand, now: float) -> Grant:
    """Share every page of the parent's resident tokens with a new sequence, which then grows."""
    parent = session.sequence(demand.parent)
    if demand.prompt is not None:
        raise FieldInvalid("parent_sequence_id: a sequence is opened or forked, not both", field="parent_sequence_id")
    if demand.start or demand.tokens:
        raise FieldInvalid("tokens: nothing of a sequence's own can be resident before it is forked", field="tokens")
    _check_room_for_sequence(session)
    shared, resident = pool.pages_for(len(parent.tokens)), len(parent.tokens)
    total = max(shared, demand.total_pages)
    if demand.known_pages > total:
        raise _unknown_pages(demand.known_pages, total)
    # As in ``serve``; and whoever the parent is, it holds the page that the fork would write in.
    unshares = resident % pool.page_size > 0 and demand.total_pages * pool.page_size > resident
    _check_quota(session, total + unshares, demand.total_pages)
    pool.check_growth(demand.sequence_id, demand.total_pages, total - shared + unshares)

    child = Sequence(session.id, demand.sequence_id, parent.salt, digest_fork(parent.id), now)
    session.add(child)
    pool.fork(parent, child)
    if unshares:
        pool.unshare_tail(child)
    pool.touch(parent, now)
    return _grow(session, pool, child, total, demand.known_pages, now)


def append(session: Session, pool: Pool, sequence_id: str, start: int, tokens: list[int], now: float) -> Sequence:
    """Report without growing. Raises the item reasons of AppendTokens."""
    sequence = session.sequence(sequence_id)
    new = pool.check_tokens(sequence, start, tokens)

    counted = sequence.page_count
    if new:
        pool.append(sequence, new)
    session.held_pages += sequence.page_count - counted
    pool.touch(sequence, now)
    return sequence


def fork(session: Session, pool: Pool, parent_id: str, child_id: str, now: float) -> tuple[Grant, Sequence]:
    """Share every page of the parent's resident tokens with a new sequence. Raises the reasons of ForkSequence."""
    child = session.find(child_id)
    if child is None:
        grant = _fork(session, pool, Demand(child_id, None, "", 0, [], 0, 0, parent=parent_id), now)
        return grant, session.sequence(child_id)
    if child.opening_digest != digest_fork(parent_id):
        raise SequenceExists(f"sequence {child_id!r} exists and is no fork of {parent_id!r}", field="child_sequence_id")
    return _grow(session, pool, child, len(child.pages), 0, now, child.page_count), child


def _grow(
    session: Session, pool: Pool, sequence: Sequence, total: int, known: int, now: float, counted: int = 0
) -> Grant:
    """Grow and answer; ``counted`` is what the session's quota counts of the sequence so far."""
    table = sequence.pages
    if len(table) < total:
        pool.grow(sequence, total)
    pool.touch(sequence, now)
    session.held_pages += sequence.page_count - counted
    pages = pool.references(table[known:]) if known < total else []
    if sequence.copy is None:
        return Grant(known, pages, sequence.cached_tokens, [])
    at, source = sequence.copy
    copy = Copy(at, pool.reference(source), pool.reference(sequence.pages[at]))
    return Grant(known, pages, sequence.cached_tokens, [copy])


def _check_room_for_sequence(session: Session) -> None:
    if len(session.sequences) >= session.max_sequences:
        raise TooManySequences(
            f"the session has {len(session.sequences)} sequences, the limit", limit=session.max_sequences
        )


def _check_quota(session: Session, more: int, total: int = 0) -> None:
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


def prompt_array(prompt: Items[int], field: str = "opening.prompt") -> array[int]:
    """A prompt's tokens. Raises FieldInvalid when there are none, or one is not a uint32."""
    if not prompt:
        raise FieldInvalid(f"{field} is empty; it needs at least one token", field=field)
    if isinstance(prompt, array):
        return prompt
    try:
        return token_array(prompt)
    except OverflowError as error:
        raise FieldInvalid(f"{field}: a token is not a uint32", field=field) from error


def _unknown_pages(known: int, total: int) -> FieldInvalid:
    return FieldInvalid(f"known_pages is {known} and the sequence has {total} pages", field="known_pages")
