"""Proto messages to domain values and back, and the limits on what a message may hold."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Sequence
from operator import attrgetter
from typing import Any

from google.protobuf import duration_pb2

from rocmforge.client.demands import STEP_TOKENS
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import FieldInvalid, InvalidConfiguration, ServiceError
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.explain import PageAnswer
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.quarantine import Record
from services.kvcache.lease.sessions import Session
from services.kvcache.lease.witness import Process
from services.kvcache.pool.index.events import MAX_LINKS, Event, EventKind
from services.kvcache.pool.index.frozen_links import FrozenLinks
from services.kvcache.pool.layout import Layout, OpaqueLayout, PageLayout
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import ENTRIES, Work

DOMAIN = "rocmforge.kvcache"
MAX_ITEMS = 4096
#: Demands that are read in one go, and answers that are written.
READ_AT_ONCE = 128
#: Tokens that are read in one go.
TOKEN_SLICE = 1 << 14
#: Pages that an explanation may have.
MAX_EXPLAINED = 1 << 16
MAX_NAME = 128
MAX_LIST = 1000

_TOKENS = attrgetter("tokens")
_DTYPES = {pb.DATA_TYPE_F32: "f32", pb.DATA_TYPE_F16: "f16", pb.DATA_TYPE_BF16: "bf16", pb.DATA_TYPE_INT8: "int8"}
_EVENT_FIELDS = {
    EventKind.STORED: "stored",
    EventKind.EVICTED: "evicted",
    EventKind.EXPIRED: "expired",
    EventKind.DROPPED: "dropped",
}
_DATA_TYPES = {name: value for value, name in _DTYPES.items()}


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


def fill_long_grant(message: pb.SequenceGrant, grant: Grant) -> Work[None]:
    """As ``fill_grant``, in slices."""
    fill_grant(message, grant._replace(pages=[]))
    for at in range(0, len(grant.pages), 2 * ENTRIES):
        some = grant.pages[at : at + 2 * ENTRIES]
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


def event_messages(cache: KvCache, event: Event, *, tokens: bool) -> Iterator[pb.WatchEventsResponse]:
    """One event of WatchEvents; with its ``tokens`` in as many messages as they take, all but the last with the number
    of the event before.
    """
    pool = next((pool for pool in cache.pools if pool.id == event.pool_id), None)
    columns = [link.hash for link in event.links], [link.parent for link in event.links]
    with_tokens = tokens and event.kind is EventKind.STORED
    pieces = _links_messages(event.pool_id, pool, *columns, tokens=with_tokens)
    for links, last in pieces:
        answer = pb.WatchEventsResponse(epoch=cache.epoch, sequence_number=event.number - (not last))
        getattr(answer, _EVENT_FIELDS[event.kind]).CopyFrom(links)
        yield answer


def snapshot_messages(cache: KvCache, pool_id: str, *, tokens: bool = False) -> Iterator[pb.CacheLinks | None]:
    """Everything cached now in one pool, or in all when ``pool_id`` is empty; None now and then.

    It is copied at once, as whole arrays; the messages are made one by one, whatever has changed since.
    """
    taken = [(pool, pool.index.frozen()) for pool in cache.pools if not pool_id or pool.id == pool_id]
    return _column_messages(taken, tokens=tokens)


def _column_messages(taken: list[tuple[Pool, FrozenLinks]], *, tokens: bool) -> Iterator[pb.CacheLinks | None]:
    for pool, links in taken:
        for columns in links.columns(MAX_LINKS):
            if columns is None:
                yield None
                continue
            yield from (message for message, _ in _links_messages(pool.id, pool, *columns, tokens=tokens))


def _links_messages(
    pool_id: str, pool: Pool | None, hashes: Sequence[int], parents: Sequence[int], *, tokens: bool
) -> Iterator[tuple[pb.CacheLinks, bool]]:
    """Links of one pool, and whether it is the last message of them."""
    size = 0 if pool is None else pool.page_size
    most = max(1, TOKEN_SLICE // size) if tokens and size else MAX_LINKS
    for at in range(0, len(hashes), most):
        message = pb.CacheLinks(
            pool_id=pool_id, hashes=hashes[at : at + most], parent_hashes=parents[at : at + most], page_size=size
        )
        for position, link in enumerate(message.hashes if tokens else ()):
            content = None if pool is None else pool.index.content(link)
            if content is None:
                message.gone.append(position)
            else:
                message.tokens.extend(array("I", content[0]))
        yield message, at + most >= len(hashes)


def read_tokens(tokens: Any) -> Generator[None, None, array[int]]:
    """Tokens as they are kept. Many of them are read in slices."""
    if len(tokens) <= TOKEN_SLICE:
        return array("I", tokens[:])
    read = array("I")
    for at in range(0, len(tokens), TOKEN_SLICE):
        read.extend(tokens[at : at + TOKEN_SLICE])
        yield
    return read


def read_demands(items: Any) -> Generator[None, None, list[Steps | Opening]]:
    """The demands of AllocatePages, in slices when they have many tokens. Raises FieldInvalid."""
    demands: list[Steps | Opening] = []
    _check_sequences(len(items))  # none but an empty step is of no sequence
    count = tokens = 0
    for at, item in enumerate(items):
        match item.WhichOneof("demand"):
            case "steps":
                tokens += check_tokens(len(item.steps.tokens), tokens, f"demands[{at}].steps.tokens")
                demands.append((yield from read_steps(item.steps, f"demands[{at}].steps", growing=True)))
                count += len(item.steps.sequence_ids)
            case "opening":
                tokens += check_tokens(len(item.opening.prompt.tokens), tokens, f"demands[{at}].opening.prompt.tokens")
                demands.append((yield from _read_opening(item.opening, f"demands[{at}].opening")))
                count += 1
            case _:
                raise FieldInvalid(f"demands[{at}] has neither steps nor an opening", field=f"demands[{at}]")
        if at % READ_AT_ONCE == READ_AT_ONCE - 1:
            yield
    _check_sequences(count)
    return demands


def _check_sequences(count: int) -> None:
    """Raises FieldInvalid when demands are of too many sequences."""
    if count > MAX_ITEMS:
        raise FieldInvalid(
            f"demands are of {count} sequences; they may be of {MAX_ITEMS}", field="demands", limit=MAX_ITEMS
        )


def _read_opening(opening: pb.SequenceOpening, field: str) -> Generator[None, None, Opening]:
    """One sequence to open. Raises FieldInvalid."""
    check_name(opening.sequence_id, f"{field}.sequence_id")
    origin: Prompt | str
    match opening.WhichOneof("origin"):
        case "prompt":
            prompt = opening.prompt
            check_name(prompt.salt, f"{field}.prompt.salt", least=0)
            retention = read_retention(prompt.retention) if prompt.HasField("retention") else None
            origin = Prompt((yield from read_tokens(prompt.tokens)), prompt.salt, retention)
        case "parent_sequence_id":
            origin = opening.parent_sequence_id
            check_name(origin, f"{field}.parent_sequence_id")
        case _:
            raise FieldInvalid(f"{field} has neither a prompt nor a parent_sequence_id", field=field)
    return Opening(opening.sequence_id, origin, opening.total_pages)


def read_steps(steps: pb.SequenceSteps, field: str, *, growing: bool) -> Generator[None, None, Steps]:
    """The columns of a step, with those that tell of pages when it is ``growing``. Raises FieldInvalid."""
    count = len(steps.sequence_ids)
    check_items(count, f"{field}.sequence_ids")
    pages = count if growing else 0
    # Before any of them is copied: each may be as long as a message.
    _check_column(steps, "starts", count, count, field)
    _check_column(steps, "token_counts", count, count, field)
    counts = steps.token_counts[:]
    _check_column(steps, "tokens", sum(counts), count, field)
    _check_column(steps, "total_pages", pages, count, field)
    _check_column(steps, "known_pages", pages, count, field)
    ids = steps.sequence_ids[:]
    _check_names(ids, f"{field}.sequence_ids")
    tokens = yield from read_tokens(steps.tokens)
    return Steps(ids, steps.starts[:], counts, tokens, steps.total_pages[:], steps.known_pages[:])


def _check_column(steps: pb.SequenceSteps, name: str, length: int, count: int, field: str) -> None:
    """Raises FieldInvalid when a column is not as long as its ``count`` sequences need it to be."""
    has = len(getattr(steps, name))
    if has != length:
        raise FieldInvalid(
            f"{field}.{name} has {has} entries; for {count} sequences it must have {length}",
            field=f"{field}.{name}",
            limit=length,
        )


def read_retention(message: pb.Retention) -> Retention:
    """What an opening asks for, right or wrong."""
    return Retention(message.ttl.ToNanoseconds() / 1e9, message.priority)


def retention_message(retention: Retention | None) -> pb.Retention | None:
    """A sequence's retention."""
    if retention is None:
        return None
    return pb.Retention(ttl=duration_message(retention.ttl_s), priority=retention.priority)


def read_layout(message: pb.PageLayout) -> Layout:
    """Raises InvalidConfiguration, and FieldInvalid for a label of the wrong length."""
    if message.HasField("opaque"):
        for field in ("layers", "kv_heads", "head_dim", "data_type"):
            if getattr(message, field):
                raise InvalidConfiguration(
                    f"layout.{field} is {getattr(message, field)}; with layout.opaque it must be unset",
                    field=f"layout.{field}",
                )
        opaque = message.opaque
        check_name(opaque.label, "layout.opaque.label")
        return OpaqueLayout(page_size=message.page_size, label=opaque.label, page_bytes=opaque.page_bytes)
    return PageLayout(
        page_size=message.page_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        dtype=_DTYPES.get(message.data_type, ""),
    )


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


def read_process(message: pb.ProcessIdentity) -> Process | None:
    """None when the engine did not say."""
    if not message.HasField("pid") or not message.HasField("start_time"):
        return None
    return Process(message.pid, message.start_time, message.pid_namespace)


def duration_message(seconds: float) -> duration_pb2.Duration:
    """Seconds as a Duration."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def check_one_session(by_id: bool, by_handle: bool) -> None:
    """Raises FieldInvalid for a session that is named by its id and by a handle."""
    if by_id and by_handle:
        raise FieldInvalid("session_handle and session_id are both set", field="session_handle")


def check_name(name: str, field: str, *, least: int = 1) -> None:
    """Raises FieldInvalid when a name is too short or too long."""
    if not least <= len(name) <= MAX_NAME:
        raise FieldInvalid(
            f"{field} has {len(name)} characters; it must have {least} to {MAX_NAME}", field=field, limit=MAX_NAME
        )


def check_items(count: int, field: str) -> None:
    """Raises FieldInvalid when a batch is too large."""
    if count > MAX_ITEMS:
        raise FieldInvalid(f"{field} has {count} items; it may have {MAX_ITEMS}", field=field, limit=MAX_ITEMS)


def check_tokens(count: int, before: int, field: str) -> int:
    """``count``, unless it is too many tokens for a call that has so many ``before``. Raises FieldInvalid."""
    if before + count > STEP_TOKENS:
        raise FieldInvalid(
            f"{field} has {count} tokens, after {before} in the call; it may have {STEP_TOKENS} together",
            field=field,
            limit=STEP_TOKENS,
        )
    return count


def read_ids(ids: Any, field: str) -> list[str]:
    """A batch of ids. Raises FieldInvalid."""
    check_items(len(ids), field)
    names: list[str] = ids[:]
    _check_names(names, field)
    return names


def _check_names(names: list[str], field: str) -> None:
    """Raises FieldInvalid naming the first name that is too short or too long."""
    if names and (not all(names) or max(map(len, names)) > MAX_NAME):
        for at, name in enumerate(names):
            check_name(name, f"{field}[{at}]")


def read_cursor(text: str) -> int:
    """The position that a cursor stands for. Raises FieldInvalid."""
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise FieldInvalid(f"cursor {text[:MAX_NAME]!r} is not one that ListSequences gave", field="cursor")
    return int(text)
