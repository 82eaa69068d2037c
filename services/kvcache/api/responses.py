"""Domain values to proto messages: what the calls answer."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from operator import attrgetter

from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from services.kvcache.api.requests import DTYPES, READ_AT_ONCE, TOKEN_SLICE
from services.kvcache.cache.explain import PageAnswer
from services.kvcache.cache.grant import Grant, check_live
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.quarantine import Record
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.layout import Layout, OpaqueLayout
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.sequence import Sequence as CachedSequence
from services.kvcache.slices import ENTRIES, Work

DOMAIN = "rocmforge.kvcache"

_TOKENS = attrgetter("tokens")
_DATA_TYPES = {name: value for value, name in DTYPES.items()}


def pool_stats_message(pool: Pool, sessions: int) -> pb.PoolStats:
    """A pool in GetStats."""
    table, totals = pool.table, pool.totals
    return pb.PoolStats(
        pool_id=pool.id,
        layout=layout_message(pool.layout),
        page_bytes=pool.layout.page_bytes,
        total_pages=table.total,
        free_pages=table.free_count,
        held_pages=table.held_count,
        cached_pages=table.cached_count,
        quarantined_pages=table.quarantined_count,
        never_used_pages=table.never_used_count,
        recycled_pages=table.recycled_count,
        sessions=sessions,
        active_sequences=len(pool.sequences),
        total_tokens=sum(map(len, map(_TOKENS, pool.sequences))),  # of very many, in one look
        lookup_tokens=totals.lookup_tokens,
        hit_tokens=totals.hit_tokens,
        granted_pages=totals.granted_pages,
        published_pages=totals.published_pages,
        evicted_pages=totals.evicted_pages,
        expired_pages=totals.expired_pages,
        refused_demands=totals.refused_demands,
        device_ordinal=pool.arena.device.ordinal if pool.arena.device else None,
        retained_pages=table.cached.retained_count,
        verified_pages=pool.checksums.verified_pages if pool.checksums else 0,
        corrupted_pages=pool.checksums.corrupted_pages if pool.checksums else 0,
        withdrawn_pages=totals.withdrawn_pages,
        zeroed_pages=table.unclean.zeroed_pages if table.unclean is not None else 0,
        filling_pages=table.filling_count,
        filled_pages=totals.filled_pages,
    )


def session_message(session: Session, now: float) -> pb.SessionStats:
    """A live session in GetStats."""
    return pb.SessionStats(
        session_handle=session.handle,
        client_name=session.client_name,
        engine_name=session.engine_name,
        model=session.model,
        pool_id=session.pool_id,
        owner=session.owner,
        attached=session.attached,
        sequences=len(session.sequences),
        held_pages=session.held_pages,
        lease=duration_message(max(0.0, session.deadline - now)),
        ttl=duration_message(session.ttl_s),
        pid=session.pid,
    )


def lost_session_message(record: Record, now: float) -> pb.LostSession:
    """A lost session in GetStats."""
    session = record.session
    return pb.LostSession(
        session_handle=session.handle,
        client_name=session.client_name,
        pool_id=record.pool.id,
        quarantined_pages=record.page_count,
        lost_for=duration_message(max(0.0, now - record.lost_at)) if record.lost_at is not None else None,
        pid=session.pid,
        fence=getattr(pb, f"FENCE_{record.fence.name}"),
    )


def arena_message(pool: Pool, canary_slot: int) -> pb.Arena:
    """Where a pool's memory is, to the session with that canary."""
    arena = pool.arena
    message = pb.Arena(
        size_bytes=arena.size_bytes,
        page_bytes=pool.layout.page_bytes,
        total_pages=pool.table.total,
        canary_offset=arena.canary_offset(canary_slot),
    )
    if arena.device is None:
        message.file_path = arena.file_path
    else:
        message.device_ipc_handle = arena.device.handle
        message.device_ordinal, message.device_id = arena.device.ordinal, arena.device.id
    return message


def fill_grant(message: pb.SequenceGrant, grant: Grant) -> None:
    """Write what was granted into the message of its sequence."""
    # Setting a field costs more than looking whether there is anything to set.
    if grant.first_index:
        message.first_index = grant.first_index
    if grant.cached_tokens:
        message.cached_tokens = grant.cached_tokens
    if grant.pages:
        message.page_ids.extend([page_id for page_id, _ in grant.pages])
        message.generations.extend([generation for _, generation in grant.pages])
    for copy in grant.copies:
        source, target = page_message(copy.source), page_message(copy.target)
        message.copies.add(index=copy.index, source=source, target=target)


def fill_sequence(
    message: pb.Sequence, pool: Pool, session: Session, sequence: CachedSequence, *, tokens: bool
) -> Work[None]:
    """Fill in the block table of a sequence, and its tokens, as they are now; in slices. Raises SequenceRemoved or
    SequenceUnknown if it ends meanwhile: its pages have other generations then.
    """
    pages, text = sequence.pages.copy(), sequence.tokens[:] if tokens else array("I")
    for at in range(0, len(pages), 2 * ENTRIES):
        some = pages[at : at + 2 * ENTRIES]
        message.page_ids.extend(some)
        message.generations.extend(pool.table.generations(some))
        if at + 2 * ENTRIES < len(pages):
            yield None
            check_live(session, sequence)
    for at in range(0, len(text), TOKEN_SLICE):
        message.tokens.extend(text[at : at + TOKEN_SLICE])
        if at + TOKEN_SLICE < len(text):
            yield None


def fill_long_grant(message: pb.SequenceGrant, grant: Grant) -> Work[None]:
    """As ``fill_grant``, in slices. The grant has no pages then: to free a million at once takes long, too."""
    fill_grant(message, grant._replace(pages=[]))
    left = grant.pages
    left.reverse()
    while left:
        some = left[: -2 * ENTRIES - 1 : -1]
        del left[-2 * ENTRIES :]
        message.page_ids.extend([page_id for page_id, _ in some])
        message.generations.extend([generation for _, generation in some])
        yield None


def fill_grants(response: pb.AllocatePagesResponse, served: list[tuple[str, Grant | ServiceError]]) -> Work[None]:
    """Write the answers to a step call into its response, in slices."""
    for at, (sequence_id, answer) in enumerate(served):
        message = response.grants.add()
        message.sequence_id = sequence_id  # given to `add` it takes longer
        if isinstance(answer, ServiceError):
            message.error.CopyFrom(rpc.status_of(answer, DOMAIN))
        elif len(answer.pages) <= ENTRIES:
            fill_grant(message, answer)
        else:
            yield from fill_long_grant(message, answer)
        if at % READ_AT_ONCE == READ_AT_ONCE - 1:
            yield None


def page_answer_message(answer: PageAnswer) -> pb.PageExplanation:
    """One page of an explanation."""
    return pb.PageExplanation(
        outcome=getattr(pb, f"PAGE_OUTCOME_{answer.outcome.name}"),
        page=page_message(answer.page) if answer.page is not None else None,
        diverged_at=answer.diverged_at,
    )


def fill_explanation(response: pb.ExplainPrefixResponse, answers: list[PageAnswer]) -> Generator[None, None, None]:
    """Write an explanation into its message, in slices."""
    for at in range(0, len(answers), 1024):
        response.pages.extend(page_answer_message(answer) for answer in answers[at : at + 1024])
        yield


def page_message(reference: tuple[int, int]) -> pb.PageRef:
    """A page by id and generation."""
    return pb.PageRef(page_id=reference[0], generation=reference[1])


def retention_message(retention: Retention | None) -> pb.Retention | None:
    """A sequence's retention."""
    if retention is None:
        return None
    return pb.Retention(ttl=duration_message(retention.ttl_s), priority=retention.priority)


def layout_message(layout: Layout) -> pb.PageLayout:
    """A layout as the proto has it."""
    if isinstance(layout, OpaqueLayout):
        opaque = pb.OpaquePage(label=layout.label, page_bytes=layout.page_bytes)
        return pb.PageLayout(page_size=layout.page_size, opaque=opaque)
    return pb.PageLayout(
        page_size=layout.page_size,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        data_type=_DATA_TYPES[layout.dtype],
    )


def duration_message(seconds: float) -> duration_pb2.Duration:
    """Seconds as a Duration."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
