"""Proto messages to domain values and back, and the limits on what a message may hold."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import islice
from typing import Any

from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.errors import FieldInvalid
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.demand import Demand, Grant
from services.kvcache.cache.explain import PageAnswer
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.sessions import Process
from services.kvcache.pool.events import MAX_LINKS, Event, EventKind, Link
from services.kvcache.pool.layout import PageLayout
from services.kvcache.pool.pool import Pool

MAX_ITEMS = 4096
MAX_NAME = 128
MAX_LIST = 1000

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
        total_tokens=sum(len(sequence.tokens) for sequence in pool.sequences),
        lookup_tokens=totals.lookup_tokens,
        hit_tokens=totals.hit_tokens,
        granted_pages=totals.granted_pages,
        published_pages=totals.published_pages,
        evicted_pages=totals.evicted_pages,
        expired_pages=totals.expired_pages,
        refused_demands=totals.refused_demands,
        device_ordinal=pool.arena.device.ordinal if pool.arena.device else None,
        retained_pages=table.cached.retained_count,
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


def fill_grant(message: pb.SequenceGrant, grant: Grant, *, columns: bool = False) -> None:
    """Write what was granted into the message of its sequence, its pages in ``columns`` or one by one."""
    first_index, pages, cached_tokens, copies = grant
    # Setting a field costs more than looking whether there is anything to set.
    if first_index:
        message.first_index = first_index
    if cached_tokens:
        message.cached_tokens = cached_tokens
    if columns and pages:
        ids, generations = zip(*pages, strict=True)
        message.page_ids.extend(ids)
        message.generations.extend(generations)
    else:
        for page_id, generation in pages:
            message.pages.add(page_id=page_id, generation=generation)
    for copy in copies:
        source, target = page_message(copy.source), page_message(copy.target)
        message.copies.add(index=copy.index, source=source, target=target)


def page_answer_message(answer: PageAnswer) -> pb.PageExplanation:
    """One page of an explanation."""
    return pb.PageExplanation(
        outcome=getattr(pb, f"PAGE_OUTCOME_{answer.outcome.name}"),
        page=page_message(answer.page) if answer.page is not None else None,
        diverged_at=answer.diverged_at,
    )


def page_message(reference: tuple[int, int]) -> pb.PageRef:
    """A page by id and generation."""
    return pb.PageRef(page_id=reference[0], generation=reference[1])


def event_message(event: Event, epoch: int) -> pb.WatchEventsResponse:
    """One event of WatchEvents."""
    answer = pb.WatchEventsResponse(epoch=epoch, sequence_number=event.number)
    getattr(answer, _EVENT_FIELDS[event.kind]).CopyFrom(links_message(event.pool_id, event.links))
    return answer


def links_message(pool_id: str, links: list[Link]) -> pb.CacheLinks:
    """Links of one pool."""
    return pb.CacheLinks(
        pool_id=pool_id, hashes=[link.hash for link in links], parent_hashes=[link.parent for link in links]
    )


def snapshot_messages(cache: KvCache, pool_id: str) -> Iterator[pb.CacheLinks]:
    """Everything cached in one pool, or in all when ``pool_id`` is empty."""
    for pool in cache.pools:
        if not pool_id or pool.id == pool_id:
            links = pool.index.links()
            while chunk := list(islice(links, MAX_LINKS)):
                yield links_message(pool.id, chunk)


def read_demands(items: Any) -> list[Demand]:
    """The demands of AllocatePages. Raises FieldInvalid."""
    check_items(len(items), "demands")
    demands: list[Demand] = []
    for item in items:
        sequence_id = item.sequence_id
        if not 1 <= len(sequence_id) <= MAX_NAME:
            check_name(sequence_id, f"demands[{len(demands)}].sequence_id")
        prompt: Items[int] | None = None
        salt, retention = "", None
        if item.HasField("opening"):
            opening = item.opening
            prompt, salt = _read_prompt(opening, len(demands)), opening.salt
            check_name(salt, f"demands[{len(demands)}].opening.salt", least=0)
            if opening.HasField("retention"):
                retention = read_retention(opening.retention)
        parent = item.parent_sequence_id
        if len(parent) > MAX_NAME:
            check_name(parent, f"demands[{len(demands)}].parent_sequence_id")
        tokens, total, known = item.tokens[:], item.total_pages, item.known_pages
        demands.append(Demand(sequence_id, prompt, salt, item.start, tokens, total, known, retention, parent))
    return demands


def _read_prompt(opening: pb.SequenceOpening, at: int) -> Items[int]:
    """The tokens of ``demands[at].opening``, in whichever of its fields they are. Raises FieldInvalid."""
    packed = opening.prompt_tokens
    if not packed:
        listed: list[int] = opening.prompt[:]
        return listed
    field = f"demands[{at}].opening.prompt_tokens"
    if len(packed) % 4:
        raise FieldInvalid(f"{field} has {len(packed)} bytes; each token has 4", field=field)
    if opening.prompt:
        raise FieldInvalid(f"{field}: the prompt is in opening.prompt, too; give one of them", field=field)
    return array("I", packed)


def read_appends(items: Any) -> list[tuple[str, int, list[int]]]:
    """(sequence id, start, tokens) of each item of AppendTokens. Raises FieldInvalid."""
    check_items(len(items), "appends")
    appends: list[tuple[str, int, list[int]]] = []
    for item in items:
        sequence_id = item.sequence_id
        if not 1 <= len(sequence_id) <= MAX_NAME:
            check_name(sequence_id, f"appends[{len(appends)}].sequence_id")
        appends.append((sequence_id, item.start, item.tokens[:]))
    return appends


def read_steps(steps: pb.SequenceSteps, *, growing: bool) -> Steps:
    """The columns of a step, with those that tell of pages when it is ``growing``. Raises FieldInvalid."""
    ids = steps.sequence_ids[:]
    count = len(ids)
    check_items(count, "steps.sequence_ids")
    _check_names(ids, "steps.sequence_ids")
    starts, tokens, counts = steps.starts[:], steps.tokens[:], steps.token_counts[:]
    total, known = steps.total_pages[:], steps.known_pages[:]
    wanted = {"starts": count, "token_counts": count if counts else 0, "tokens": sum(counts) if counts else count}
    wanted["total_pages"] = wanted["known_pages"] = count if growing else 0
    for field, length in wanted.items():
        if len(getattr(steps, field)) != length:
            raise FieldInvalid(
                f"steps.{field} has {len(getattr(steps, field))} entries; for {count} sequences it must have {length}",
                field=f"steps.{field}",
                limit=length,
            )
    return Steps(ids, starts, tokens, counts, total, known)


def read_retention(message: pb.Retention) -> Retention:
    """What an opening asks for, right or wrong."""
    return Retention(message.ttl.ToNanoseconds() / 1e9, message.priority)


def retention_message(retention: Retention | None) -> pb.Retention | None:
    """A sequence's retention."""
    if retention is None:
        return None
    return pb.Retention(ttl=duration_message(retention.ttl_s), priority=retention.priority)


def read_layout(message: pb.PageLayout) -> PageLayout:
    """Raises InvalidConfiguration."""
    return PageLayout(
        page_size=message.page_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        dtype=_DTYPES.get(message.data_type, ""),
    )


def layout_message(layout: PageLayout) -> pb.PageLayout:
    """A layout as the proto has it."""
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
