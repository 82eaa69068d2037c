"""Steps of sequences that are open: they report the tokens that became resident, and grow.

Of nearly every sequence of a decode step there is nothing to decide: it has one more token, which does not fill its
page, and asks for no other. `advance` records those at once (`Pool.append_within_page`) and looks closer at the rest.
"""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import NamedTuple

from services.common.errors import CapacityExceeded, FieldInvalid, HostMemoryExceeded, ServiceError, SessionExpired
from services.kvcache import slices
from services.kvcache.cache.grant import Grant, answering, check_live, check_quota, grow, growing
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.headroom import Promised
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence
from services.kvcache.slices import Work


class Steps(NamedTuple):
    """See SequenceSteps in the proto: columns of one length, but for ``tokens``, whose length is the counts' sum.

    ``total_pages`` and ``known_pages`` are empty where nothing grows.
    """

    sequence_ids: list[str]
    starts: list[int]
    token_counts: list[int]
    tokens: array[int]
    total_pages: list[int]
    known_pages: list[int]


def advance(session: Session, pool: Pool, steps: Steps, now: float) -> Work[list[tuple[str, Grant | ServiceError]]]:
    """Report and grow; in order, the sequences with a page, a copy or an error to hear of. An error changed nothing.

    In slices, when it takes or publishes many pages.
    """
    answers: list[tuple[str, Grant | ServiceError]] = []
    live, tokens, at, spent = session.sequences.get, steps.tokens, 0, 0
    totals, knowns = steps.total_pages or repeat(0), steps.known_pages or repeat(None)
    for name, start, count, wanted, known in zip(
        steps.sequence_ids, steps.starts, steps.token_counts, totals, knowns, strict=False
    ):
        first, at = at, at + count
        sequence = live(name)
        if (
            sequence is not None
            and (known is None or wanted <= known == len(sequence.pages))
            and pool.append_within_page(sequence, start, tokens, first, at, now)
        ):
            continue
        if spent >= slices.ENTRIES:
            spent, now = 0, (yield None)
            live = session.sequences.get
        spent += 2
        while True:
            try:
                sequence = session.sequence(name)
                new = tokens[first:at]
                known_pages = len(sequence.pages) if known is None else known
                grant = step(session, pool, sequence, start, new, wanted, known_pages, now)
                if not isinstance(grant, Grant):
                    grant = yield from grant
            except SessionExpired:
                raise
            except ServiceError as error:
                if may_be_owed(pool, error):
                    pool.debts.pay(now)
                    now = yield None
                    live = session.sequences.get
                    continue
                answers.append((name, error.bare()))
            else:
                spent += count // pool.page_size + len(grant.pages)
                if grant.pages or grant.copies:
                    answers.append((name, grant))
            break
    return answers


def may_be_owed(pool: Pool, error: ServiceError) -> bool:
    """Whether what is refused may be served once what ended sequences hold is given up, and what fills hold."""
    if not isinstance(error, CapacityExceeded | HostMemoryExceeded):
        return False
    if pool.fills and pool.lower is not None:
        pool.lower.give_way()
    return len(pool.debts) > 0


def step(
    session: Session,
    pool: Pool,
    sequence: Sequence,
    start: int,
    tokens: array[int],
    wanted: int,
    known: int,
    now: float,
) -> Grant | Work[Grant]:
    """One sequence reports ``tokens`` at ``start`` and grows to ``wanted`` pages, of which its engine knows ``known``.

    Checked as a whole, then committed as a whole; of many pages as work, which has to begin at once. Raises
    FieldInvalid, PositionMismatch, CapacityExceeded, QuotaExceeded, ExceedsPool, HostMemoryExceeded.
    """
    new = pool.check_tokens(sequence, start, tokens)
    held = len(sequence.pages)
    total = wanted if wanted > held else held
    if known > total:
        raise FieldInvalid(f"known_pages is {known} and the sequence has {total} pages", field="known_pages")
    # Room for more than is resident means that the tail is going to be written: not while others hold it too. New
    # tokens were found to go into a tail of its own.
    unshares = (
        sequence.forked and not new and wanted * pool.page_size > len(sequence.tokens) and pool.tail_is_shared(sequence)
    )
    more = total - held + unshares
    counted = sequence.page_count
    salt = pool.salt_bytes(sequence, len(new)) if new and not sequence.published else 0
    if more:
        # A token after what was copied releases the copy's source, before anything is taken.
        headroom, source = pool.headroom, sequence.copy[1] if sequence.copy is not None and new else None
        check_quota(session, more - (source is not None), total)
        headroom.check_growth(sequence.id, total, more - (source is not None and pool.table.holder_count(source) == 1))
        memory = pool.memory
        # Only to see that there is room, a call would show.
        if memory.used + more * headroom.entry_bytes + salt > memory.limit:
            headroom.check_memory(sequence.id, more - (source is not None), salt)
    elif salt:
        pool.headroom.check_memory(sequence.id, 0, salt)

    if len(new) // pool.page_size + total - min(held, known) > slices.ENTRIES:
        return _step_in_slices(session, pool, sequence, new, unshares, total, known, now)
    if new:
        pool.append(sequence, new)
    if unshares:
        pool.unshare_tail(sequence)
    return grow(session, pool, sequence, total, known, now, counted)


def _step_in_slices(
    session: Session,
    pool: Pool,
    sequence: Sequence,
    new: array[int],
    unshares: bool,
    total: int,
    known: int,
    now: float,
) -> Work[Grant]:
    """As the end of `step`: what was checked is promised to it, and after each slice the sequence is one that has
    reported or grown a part of it.
    """
    more = total - len(sequence.pages) + unshares
    with Promised(pool.headroom, more, more) as promised:
        width = slices.ENTRIES * pool.page_size
        for at in range(0, len(new), width):
            if at:
                yield None
                check_live(session, sequence)
            counted = sequence.page_count
            pool.append(sequence, new[at : at + width])
            session.hold(sequence.page_count - counted)
        if unshares:
            promised.take(1)
            pool.unshare_tail(sequence)
            session.hold(1)
        yield from growing(session, pool, sequence, total, promised)
    return (yield from answering(session, pool, sequence, known))
