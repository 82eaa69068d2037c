"""Sequences that begin: by a prompt, whose cached prefix is shared into them, or as a fork of one that is open."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from services.common.errors import FieldInvalid, SequenceMismatch, ServiceError, SessionExpired, TooManySequences
from services.kvcache import slices
from services.kvcache.cache.grant import Grant, answering, check_live, check_quota, grow, growing
from services.kvcache.cache.steps import may_be_owed, step
from services.kvcache.eviction.hints import Claim, ReuseHint
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.headroom import Promised
from services.kvcache.pool.host_memory import sequence_bytes
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence, digest_fork, digest_prompt
from services.kvcache.slices import Work


class Prompt(NamedTuple):
    """See Prompt in the proto."""

    tokens: array[int]
    salt: str = ""
    retention: Retention | None = None
    reuse_hint: ReuseHint | None = None


class Opening(NamedTuple):
    """See SequenceOpening in the proto. ``origin`` is a prompt, or the id of the parent of a fork."""

    sequence_id: str
    origin: Prompt | str
    total_pages: int = 0
    fill_wait_s: float | None = None


def open_sequence(session: Session, pool: Pool, demand: Opening, now: float) -> Work[Grant | ServiceError]:
    """Open a sequence; the grant, or why there is none, when nothing has changed. In slices, if it has many pages."""
    again = True
    while True:
        try:
            grant = _open(session, pool, demand, now)
        except ServiceError as error:
            if not may_be_owed(pool, error):
                return error.bare()
            pool.debts.pay(now)
            now = yield None
            continue
        if isinstance(grant, Grant):
            return grant
        try:
            return (yield from grant)
        except SessionExpired:
            raise
        except ServiceError as error:
            # What it had taken is owed as well now.
            if not (again and may_be_owed(pool, error)):
                return error.bare()
        again = False
        yield from pool.debts.paying()
        now = yield None


def _open(session: Session, pool: Pool, opening: Opening, now: float) -> Grant | Work[Grant]:
    """Open a sequence and grow it; for one that is open, the same opening again is a step that reports nothing.

    Checked as a whole, then committed as a whole; of many pages as work, which has to begin at once. Raises
    FieldInvalid, SequenceUnknown (of the parent), SequenceRemoved, SequenceMismatch, TooManySequences,
    CapacityExceeded, QuotaExceeded, ExceedsPool, HostMemoryExceeded.
    """
    sequence_id, origin, total_pages, _ = opening
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


def _begin(
    session: Session, pool: Pool, sequence_id: str, prompt: Prompt, total_pages: int, now: float
) -> Grant | Work[Grant]:
    _check_count(session)
    tokens, salt, retention, reuse_hint = prompt
    check_prompt(tokens, "prompt.tokens")
    if retention is not None:
        retention.check()
    if reuse_hint is not None:
        reuse_hint.check()
    matched = pool.match(tokens, salt, slices.ENTRIES)
    if len(matched) < slices.ENTRIES:
        cached = pool.cached_among(matched)
        total = _check_begin(session, pool, sequence_id, prompt, total_pages, len(matched), cached)
        if total < slices.ENTRIES:
            sequence = _begun(session, pool, sequence_id, prompt, matched, now)
            pool.count_lookup(sequence, tokens)
            return grow(session, pool, sequence, total, 0, now, 0)
    return _begin_in_slices(session, pool, sequence_id, prompt, total_pages, now)


def _check_begin(
    session: Session, pool: Pool, sequence_id: str, prompt: Prompt, total_pages: int, matched: int, cached: int
) -> int:
    """Whether a sequence can begin with so many pages of the prefix cache, some of them with no holder; how many it
    will have.
    """
    total = max(matched, total_pages)
    check_quota(session, total, total)
    pool.headroom.check_growth(sequence_id, total, total - matched, spoken_for=cached)
    pool.headroom.check_memory(sequence_id, total, sequence_bytes(sequence_id, prompt.salt), shared=matched - cached)
    return total


def _begun(session: Session, pool: Pool, sequence_id: str, prompt: Prompt, matched: list[int], now: float) -> Sequence:
    sequence = Sequence(session.id, sequence_id, prompt.salt, digest_prompt(prompt.tokens, prompt.salt), now)
    sequence.retention = prompt.retention
    if prompt.reuse_hint is not None:
        sequence.claim = Claim(session.owner, prompt.reuse_hint)
    session.add(sequence)
    pool.open(sequence, prompt.tokens, matched)
    return sequence


def _begin_in_slices(
    session: Session, pool: Pool, sequence_id: str, prompt: Prompt, total_pages: int, now: float
) -> Work[Grant]:
    """Look up the cached prefix, share it, and take the pages after it: after each slice the sequence is one that has
    found a part of its prefix, or has grown a part. It was never there if it fails.
    """
    found, cached = yield from pool.matching(prompt.tokens, prompt.salt)
    _check_begin(session, pool, sequence_id, prompt, total_pages, len(found), cached)
    matched, total = pool.match(prompt.tokens, prompt.salt, slices.ENTRIES), total_pages
    sequence = _begun(session, pool, sequence_id, prompt, matched, now)
    session.hold(len(matched))
    with _beginning(session, pool, sequence):
        while len(matched) == slices.ENTRIES and not sequence.chain_broken:
            now = yield None
            check_live(session, sequence)
            held = len(sequence.pages)
            matched = pool.match(prompt.tokens, prompt.salt, slices.ENTRIES, behind=sequence.pages)
            cached = pool.cached_among(matched)
            check_quota(session, len(matched), max(total, held + len(matched)))
            pool.headroom.check_growth(sequence.id, total, 0, spoken_for=cached)
            pool.headroom.check_memory(sequence.id, len(matched), shared=len(matched) - cached)
            pool.share(sequence, prompt.tokens, matched)
            session.hold(len(matched))
        total = max(total, len(sequence.pages))
        more = total - len(sequence.pages)
        check_quota(session, more, total)
        pool.headroom.check_growth(sequence.id, total, more)
        pool.headroom.check_memory(sequence.id, more)
        with Promised(pool.headroom, more, more) as promised:
            yield from growing(session, pool, sequence, total, promised)
        grant = yield from answering(session, pool, sequence, 0)
        pool.count_lookup(sequence, prompt.tokens)
        return grant


@contextlib.contextmanager
def _beginning(session: Session, pool: Pool, sequence: Sequence) -> Iterator[None]:
    """A sequence that is being opened: if that fails, or its caller gives up, it never existed."""
    try:
        yield
    except BaseException:
        if session.sequences.get(sequence.id) is sequence:
            session.take_back(sequence)
            sequence.retention = sequence.claim = None  # nothing was asked for these pages, or said of them
            pool.endings.end_later([sequence], sequence.page_count)
        raise


def _fork(
    session: Session, pool: Pool, sequence_id: str, parent_id: str, total_pages: int, now: float
) -> Grant | Work[Grant]:
    """Share the pages of all the parent's resident tokens with a new sequence, which then grows."""
    parent = session.sequence(parent_id)
    _check_count(session)
    shared, resident = pool.pages_for(len(parent.tokens)), len(parent.tokens)
    total = max(shared, total_pages)
    # As in ``step``; and whichever the parent is, it holds the page that the fork would write in.
    unshares = resident % pool.page_size > 0 and total_pages * pool.page_size > resident
    check_quota(session, total + unshares, total_pages)
    pool.headroom.check_growth(sequence_id, total_pages, total - shared + unshares)
    pool.headroom.check_memory(sequence_id, total + unshares, sequence_bytes(sequence_id, parent.salt), shared=shared)

    child = Sequence(session.id, sequence_id, parent.salt, digest_fork(parent.id), now)
    session.add(child)
    if total > slices.ENTRIES:
        return _fork_in_slices(session, pool, parent, child, total, unshares, now)
    pool.fork(parent, child)
    if unshares:
        pool.unshare_tail(child)
    pool.touch(parent, now)
    return grow(session, pool, child, total, 0, now, 0)


def _fork_in_slices(
    session: Session, pool: Pool, parent: Sequence, child: Sequence, total: int, unshares: bool, now: float
) -> Work[Grant]:
    """As the end of `_fork`: after each slice it is a fork of a part of its parent. As it was before, if it fails."""
    shared = pool.pages_for(len(parent.tokens))
    pool.sequences[child] = None
    own = total - shared + unshares
    with _beginning(session, pool, child), Promised(pool.headroom, own, shared + own, shared) as promised:
        while (has := len(child.pages)) < shared:
            some = min(slices.ENTRIES, shared - has)
            promised.share(some)
            pool.share_fork(parent, child, has + some)
            session.hold(some)
            now = yield None
            check_live(session, child)
            check_live(session, parent)
        if unshares:
            promised.take(1)
            pool.unshare_tail(child)
            session.hold(1)
        pool.touch(parent, now)
        yield from growing(session, pool, child, total, promised)
        return (yield from answering(session, pool, child, 0))


def _check_count(session: Session) -> None:
    if len(session.sequences) + session.expired >= session.max_sequences:
        expired = f", and {session.expired} that expired and were not removed" if session.expired else ""
        raise TooManySequences(
            f"the session has {len(session.sequences)} sequences{expired}; the limit is {session.max_sequences}",
            limit=session.max_sequences,
        )
