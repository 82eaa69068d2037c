"""Proto messages to domain values, checked: what a request may hold."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import Any

from rocmforge.client.demands import STEP_TOKENS
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.errors import FieldInvalid, InvalidConfiguration
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.hints import ReuseHint
from services.kvcache.eviction.retention import Retention
from services.kvcache.lease.witness import Process
from services.kvcache.pool.layout import Layout, OpaqueLayout, PageLayout

MAX_ITEMS = 4096
#: Demands that are read in one go, and answers that are written.
READ_AT_ONCE = 128
#: Tokens that are read in one go.
TOKEN_SLICE = 1 << 14
#: Pages that an explanation may have.
MAX_EXPLAINED = 1 << 16
#: Seconds that an opening may wait for pages of lower tiers, and tokens a second that an engine may claim to prefill.
MAX_FILL_WAIT_S = 600
MAX_SPEED = 10**9
MAX_NAME = 128
MAX_LIST = 1000

DTYPES = {pb.DATA_TYPE_F32: "f32", pb.DATA_TYPE_F16: "f16", pb.DATA_TYPE_BF16: "bf16", pb.DATA_TYPE_INT8: "int8"}


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
            hint = read_reuse_hint(prompt.reuse_hint) if prompt.HasField("reuse_hint") else None
            origin = Prompt((yield from read_tokens(prompt.tokens)), prompt.salt, retention, hint)
            wait_s = read_fill_wait(opening, f"{field}.fill_wait")
            return Opening(opening.sequence_id, origin, opening.total_pages, wait_s)
        case "parent_sequence_id":
            origin = opening.parent_sequence_id
            check_name(origin, f"{field}.parent_sequence_id")
            if opening.HasField("fill_wait"):
                raise FieldInvalid(
                    f"{field}.fill_wait is set, and a fork waits for no pages", field=f"{field}.fill_wait"
                )
        case _:
            raise FieldInvalid(f"{field} has neither a prompt nor a parent_sequence_id", field=field)
    return Opening(opening.sequence_id, origin, opening.total_pages)


def read_fill_wait(opening: pb.SequenceOpening, field: str) -> float | None:
    """Seconds that the caller waits for pages of lower tiers; None if it does not. Raises FieldInvalid."""
    if not opening.HasField("fill_wait"):
        return None
    seconds = opening.fill_wait.ToNanoseconds() / 1e9
    if not 0 <= seconds <= MAX_FILL_WAIT_S:
        raise FieldInvalid(
            f"{field} is {seconds:g} s; it must be from 0 s to {MAX_FILL_WAIT_S} s", field=field, limit=MAX_FILL_WAIT_S
        )
    return seconds


def read_speed(tokens_per_s: float) -> float:
    """How fast an engine prefills, 0 if it does not say. Raises FieldInvalid."""
    if not 0 <= tokens_per_s <= MAX_SPEED:
        raise FieldInvalid(
            f"prefill_tokens_per_s is {tokens_per_s}; it must be from 0 to {MAX_SPEED}",
            field="prefill_tokens_per_s",
            limit=MAX_SPEED,
        )
    return tokens_per_s


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


def read_reuse_hint(message: pb.ReuseHint) -> ReuseHint:
    """What an opening says of its return, right or wrong."""
    expected_s = message.expected_return.ToNanoseconds() / 1e9 if message.HasField("expected_return") else None
    return ReuseHint(message.category, message.turn, message.tool_call_pending, expected_s)


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
        dtype=DTYPES.get(message.data_type, ""),
    )


def read_process(message: pb.ProcessIdentity) -> Process | None:
    """None when the engine did not say."""
    if not message.HasField("pid") or not message.HasField("start_time"):
        return None
    return Process(message.pid, message.start_time, message.pid_namespace)


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
