"""Sequences that begin: by a prompt, whose cached prefix is shared into them, or as a fork of one that is open."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from services.common.errors import FieldInvalid, SequenceMismatch, TooManySequences
from services.kvcache.cache.grant import Grant, check_quota, grow
from services.kvcache.cache.steps import step
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.host_memory import sequence_bytes
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence, digest_fork, digest_prompt


class Prompt(NamedTuple):
    """See Prompt in the proto."""

    tokens: array[int]
    salt: str = ""
    retention: Retention | None = None


class Opening(NamedTuple):
    """See SequenceOpening in the proto. ``origin`` is a prompt, or the id of the parent of a fork."""

    sequence_id: str
    origin: Prompt | str
    total_pages: int = 0


def open_sequence(session: Session, pool: Pool, opening: Opening, now: float) -> Grant:
    """Open a sequence and grow it; for one that is open, the same opening again is a step that reports nothing.

    Checked as a whole, then committed as a whole. Raises FieldInvalid, SequenceUnknown (of the parent),
    SequenceRemoved, SequenceMismatch, TooManySequences, CapacityExceeded, QuotaExceeded, ExceedsPool,
    HostMemoryExceeded.
    """
    sequence_id, origin, total_pages = opening
    sequence = session.find(sequence_id)
    if sequence is not None:
        _check_same(sequence, origin)
        return step(session, pool, sequence, 0, array("I"), total_pages, 0, now)
    if isinstance(origin, str):
        return _fork(session, pool, sequence_id, origin, total_pages, now)
    return _begin(session, pool, sequence_id, origin, total_pages, now)


def check_prompt(tokens: array[int], field: str) -> None:
    """Raises FieldInvalid when there are no tokens."""
    if not tokens:
        raise FieldInvalid(f"{field} is empty; it needs at least one token", field=field)


def _check_same(sequence: Sequence, origin: Prompt | str) -> None:
    if isinstance(origin, str):
        if sequence.origin_digest != digest_fork(origin):
            raise SequenceMismatch(
                f"sequence {sequence.id!r} is open and is no fork of {origin!r}", field="parent_sequence_id"
            )
        return
    check_prompt(origin.tokens, "prompt.tokens")
    if sequence.origin_digest != digest_prompt(origin.tokens, origin.salt) or sequence.retention != origin.retention:
        raise SequenceMismatch(
            f"sequence {sequence.id!r} is open with another prompt, salt or retention", field="prompt"
        )


def _begin(session: Session, pool: Pool, sequence_id: str, prompt: Prompt, total_pages: int, now: float) -> Grant:
    _check_count(session)
    tokens, salt, retention = prompt
    check_prompt(tokens, "prompt.tokens")
    if retention is not None:
        retention.check()
    matched = pool.match(tokens, salt)
    total = max(len(matched), total_pages)
    check_quota(session, total, total)
    cached = pool.cached_among(matched)
    pool.check_growth(sequence_id, total, total - len(matched), spoken_for=cached)
    pool.check_memory(sequence_id, total, sequence_bytes(sequence_id, salt), shared=len(matched) - cached)

    sequence = Sequence(session.id, sequence_id, salt, digest_prompt(tokens, salt), now)
    sequence.retention = retention
    session.add(sequence)
    pool.open(sequence, tokens, matched)
    return grow(session, pool, sequence, total, 0, now, 0)


def _fork(session: Session, pool: Pool, sequence_id: str, parent_id: str, total_pages: int, now: float) -> Grant:
    """Share the pages of all the parent's resident tokens with a new sequence, which then grows."""
    parent = session.sequence(parent_id)
    _check_count(session)
    shared, resident = pool.pages_for(len(parent.tokens)), len(parent.tokens)
    total = max(shared, total_pages)
    # As in ``step``; and whoever the parent is, it holds the page that the fork would write in.
    unshares = resident % pool.page_size > 0 and total_pages * pool.page_size > resident
    check_quota(session, total + unshares, total_pages)
    pool.check_growth(sequence_id, total_pages, total - shared + unshares)
    pool.check_memory(sequence_id, total + unshares, sequence_bytes(sequence_id, parent.salt), shared=shared)

    child = Sequence(session.id, sequence_id, parent.salt, digest_fork(parent.id), now)
    session.add(child)
    pool.fork(parent, child)
    if unshares:
        pool.unshare_tail(child)
    pool.touch(parent, now)
    return grow(session, pool, child, total, 0, now, 0)


def _check_count(session: Session) -> None:
    if len(session.sequences) >= session.max_sequences:
        raise TooManySequences(
            f"the session has {len(session.sequences)} sequences, the limit", limit=session.max_sequences
        )
