"""The step call on the wire: demands as messages, and replies as grants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from rocmforge.client.demands import STEP_SEQUENCES, STEP_TOKENS, Demand, Grant, PageCopy
from rocmforge.client.errors import ExceedsPool, InvalidConfiguration
from rocmforge.client.layout import Layout, OpaqueLayout
from rocmforge.client.process import process_identity
from rocmforge.client.statuses import error_from_status
from rocmforge.kvcache.v1 import kvcache_pb2 as pb

Message = TypeVar("Message")

_DATA_TYPES = {"f32": pb.DATA_TYPE_F32, "f16": pb.DATA_TYPE_F16, "bf16": pb.DATA_TYPE_BF16, "int8": pb.DATA_TYPE_INT8}


def opening_request(
    pool_id: str,
    layout: Layout,
    *,
    client_name: str,
    engine_name: str,
    model: str,
    pool_pages: int | None,
    max_pages: int | None,
    ttl_s: float | None,
    device_ordinal: int | None,
) -> pb.OpenSessionRequest:
    """The request for a session of this process."""
    request = pb.OpenSessionRequest(
        client_name=client_name,
        engine_name=engine_name,
        model=model,
        pool_id=pool_id,
        layout=_layout(layout),
        pool_pages=pool_pages,
        max_pages=max_pages,
        device_ordinal=device_ordinal,
    )
    found = process_identity()
    if found is not None:
        pid, start_time, namespace = found
        request.process.CopyFrom(pb.ProcessIdentity(pid=pid, start_time=start_time, pid_namespace=namespace))
    if ttl_s is not None:
        request.ttl.FromNanoseconds(int(ttl_s * 1e9))
    return request


def _layout(layout: Layout) -> pb.PageLayout:
    """Raises InvalidConfiguration for a number that no message can carry."""
    shape, size = ("page_size", "layers", "kv_heads", "head_dim"), ("page_size", "page_bytes")
    for name in size if isinstance(layout, OpaqueLayout) else shape:
        value, most = getattr(layout, name), (1 << (64 if name == "page_bytes" else 32)) - 1
        if not 0 <= value <= most:
            field = f"layout.opaque.{name}" if name == "page_bytes" else f"layout.{name}"
            raise InvalidConfiguration(f"{field} is {value}; it must be 0 to {most}", field=field, limit=most)
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


def in_parts(demands: Items[Demand], removed: Items[str] = ()) -> list[tuple[Items[str], Items[Demand]]]:
    """The ids to remove and the demands in order, in as many calls as they need; nearly always in one."""
    tokens = sum(map(_token_count, demands))
    if tokens <= STEP_TOKENS and len(demands) <= STEP_SEQUENCES and len(removed) <= STEP_SEQUENCES:
        return [(removed, demands)]
    parts, room = [list[Demand]()], STEP_TOKENS
    for demand in demands:
        count = _token_count(demand)
        if parts[-1] and (count > room or len(parts[-1]) == STEP_SEQUENCES):
            parts.append([])
            room = STEP_TOKENS
        parts[-1].append(demand)
        room -= count
    ended = [removed[at : at + STEP_SEQUENCES] for at in range(0, len(removed), STEP_SEQUENCES)] or [()]
    return [*((some, ()) for some in ended[:-1]), (ended[-1], parts[0]), *(((), part) for part in parts[1:])]


def _token_count(demand: Demand) -> int:
    return len(demand.tokens) if demand.opening is None else len(demand.opening.prompt)


def _is_too_long(demand: Demand) -> bool:
    """Whether no call can open it; such a demand is refused here, since a refused call would refuse them all."""
    return demand.opening is not None and len(demand.opening.prompt) > STEP_TOKENS


def demand_messages(demands: Items[Demand]) -> Iterator[pb.Demand]:
    """In order: one message for each sequence to open, and one for each run of steps."""
    for opens, group in groupby(demands, attrgetter("opens")):
        if opens:
            yield from (pb.Demand(opening=_named(_opening, demand)) for demand in group if not _is_too_long(demand))
            continue
        steps = list(group)
        try:
            yield pb.Demand(steps=_steps(steps))
        except (ValueError, TypeError):
            for demand in steps:
                _named(lambda one: _steps([one]), demand)
            raise


def _named(message_of: Callable[[Demand], Message], demand: Demand) -> Message:
    """The message of a demand. Raises ValueError, which names the sequence, for a value that no message can carry."""
    try:
        return message_of(demand)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"sequence {demand.sequence_id!r}: {error}") from error


def _opening(demand: Demand) -> pb.SequenceOpening:
    message = pb.SequenceOpening(sequence_id=demand.sequence_id, total_pages=demand.total_pages)
    opening = demand.opening
    if opening is None:
        message.parent_sequence_id = demand.parent
        return message
    message.prompt.tokens.extend(opening.prompt)
    message.prompt.salt = opening.salt
    if opening.retention is not None:
        message.prompt.retention.ttl.FromNanoseconds(round(opening.retention.ttl_s * 1e9))
        message.prompt.retention.priority = opening.retention.priority
    if (hint := opening.reuse_hint) is not None:
        said = message.prompt.reuse_hint
        said.category, said.turn, said.tool_call_pending = hint.category, hint.turn, hint.tool_call_pending
        said.SetInParent()
        if hint.expected_return_s is not None:
            said.expected_return.FromNanoseconds(round(hint.expected_return_s * 1e9))
    if opening.fill_wait_s is not None:
        message.fill_wait.FromNanoseconds(round(opening.fill_wait_s * 1e9))
    return message


def _steps(demands: list[Demand]) -> pb.SequenceSteps:
    return pb.SequenceSteps(
        sequence_ids=[demand.sequence_id for demand in demands],
        starts=[demand.start for demand in demands],
        token_counts=[len(demand.tokens) for demand in demands],
        tokens=[token for demand in demands for token in demand.tokens],
        total_pages=[demand.total_pages for demand in demands],
        known_pages=[demand.known_pages for demand in demands],
    )


def grants(reply: pb.AllocatePagesResponse, demands: Items[Demand]) -> list[Grant]:
    """One grant for each of the demands that the reply answers, in order."""
    answers, granted = deque(reply.grants), list[Grant]()
    for demand in demands:
        if answers and answers[0].sequence_id == demand.sequence_id:
            granted.append(_grant(answers.popleft()))
        elif _is_too_long(demand):
            error = ExceedsPool(
                f"the prompt has {_token_count(demand)} tokens; a KV-cache daemon takes at most {STEP_TOKENS}",
                field="prompt",
                limit=STEP_TOKENS,
            )
            granted.append(Grant(demand.sequence_id, error=error))
        else:
            granted.append(Grant(demand.sequence_id, demand.known_pages))  # no news: it has what it demanded
    return granted


def _grant(grant: pb.SequenceGrant) -> Grant:
    if grant.HasField("error"):
        return Grant(grant.sequence_id, error=error_from_status(grant.error))
    pages = tuple(grant.page_ids[:])
    copies = tuple(PageCopy(copy.index, copy.source.page_id, copy.target.page_id) for copy in grant.copies)
    return Grant(grant.sequence_id, grant.first_index, pages, grant.cached_tokens, copies=copies)
