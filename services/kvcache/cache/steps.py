"""Sequences that only go on, many in a call: the decode steps of a large batch.

Nearly all of them have nothing to be decided: a few tokens behind those that are there, in a page that they do not
fill, and no page asked for. Those are recorded here; every other one is served as a demand of its own (see ``demand``),
and the outcome is the same as if all had been.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from services.common.errors import ServiceError
from services.kvcache.cache.demand import Demand, Grant, append, serve
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence, token_array


class Steps(NamedTuple):
    """See SequenceSteps in the proto: columns of one length, but for ``tokens``, whose length is the counts' sum.

    Without ``token_counts`` each sequence has one token. ``total_pages`` and ``known_pages`` are empty where nothing
    grows.
    """

    sequence_ids: list[str]
    starts: list[int]
    tokens: list[int]
    token_counts: list[int]
    total_pages: list[int]
    known_pages: list[int]


def grow_on(session: Session, pool: Pool, steps: Steps, now: float) -> list[tuple[str, Grant | ServiceError]]:
    """Report and grow; in order, the sequences with a page, a copy or an error to hear of. An error changed nothing."""
    told: list[tuple[str, Grant | ServiceError]] = []
    live = session.sequences.get
    record: Callable[[Sequence, int, Any, float], bool] = pool.record if steps.token_counts else pool.record_one
    columns = zip(steps.sequence_ids, steps.starts, _new(steps), steps.total_pages, steps.known_pages, strict=True)
    for name, start, new, wanted, known in columns:
        sequence = live(name)
        if sequence is not None and wanted <= known == len(sequence.pages) and record(sequence, start, new, now):
            continue
        tokens = [new] if isinstance(new, int) else new.tolist()
        try:
            grant = serve(session, pool, Demand(name, None, "", start, tokens, wanted, known), now)
        except ServiceError as error:
            told.append((name, error))
            continue
        if grant.pages or grant.copies:
            told.append((name, grant))
    return told


def append_on(session: Session, pool: Pool, steps: Steps, now: float) -> list[tuple[str, ServiceError]]:
    """Report without growing; in order, the sequences whose report was refused, which changed nothing."""
    told: list[tuple[str, ServiceError]] = []
    live = session.sequences.get
    record: Callable[[Sequence, int, Any, float], bool] = pool.record if steps.token_counts else pool.record_one
    for name, start, new in zip(steps.sequence_ids, steps.starts, _new(steps), strict=True):
        sequence = live(name)
        if sequence is not None and record(sequence, start, new, now):
            continue
        tokens = [new] if isinstance(new, int) else new.tolist()
        try:
            append(session, pool, name, start, tokens, now)
        except ServiceError as error:
            told.append((name, error))
    return told


def _new(steps: Steps) -> Iterable[Any]:
    """The token of each sequence, or an array of its tokens where counts are told."""
    return _arrays(token_array(steps.tokens), steps.token_counts) if steps.token_counts else steps.tokens


def _arrays(tokens: array[int], counts: list[int]) -> Iterator[array[int]]:
    at = 0
    for count in counts:
        yield tokens[at : at + count]
        at += count
