"""WatchEvents with tokens: whose they are, what is left out, and how a reader resumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.kvcache.api import event_messages
from services.kvcache.pool.index.chain_hash import blake2b_chain, root_hash
from tests.kvcache.clients.messages import opening, step
from tests.kvcache.conftest import Running


def publish(running: Running, session: str, name: str, tokens: list[int]) -> None:
    pages = len(tokens) // 4 + 1
    for demand in (opening(name, [*tokens, 0], pages), step(name, 0, tokens, pages, pages)):
        running.stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=[demand]))
    running.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=session, sequence_ids=[name]))


def watch(running: Running, **fields: Any) -> Iterator[pb.WatchEventsResponse]:
    request = pb.WatchEventsRequest(include_tokens=True, **fields)
    stream: Iterator[pb.WatchEventsResponse] = running.stub.WatchEvents(request, timeout=30)
    return stream


def pages_of(links: pb.CacheLinks) -> dict[int, tuple[int, ...]]:
    """Tokens by hash; the hash is of them and of the parent's."""
    size, told, tokens = links.page_size, dict[int, tuple[int, ...]](), list(links.tokens)
    for at, (link, parent) in enumerate(zip(links.hashes, links.parent_hashes, strict=True)):
        if at in links.gone:
            continue
        page, tokens = tokens[:size], tokens[size:]
        assert link == blake2b_chain(parent, b"".join(token.to_bytes(4, "little") for token in page))
        told[link] = tuple(page)
    assert not tokens
    return told


def test_what_is_stored_comes_with_its_tokens(running: Running) -> None:
    session = running.session()
    publish(running, session, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    stream = watch(running)
    assert next(stream).HasField("reset")
    stored = next(stream).stored
    assert sorted(pages_of(stored).values()) == [(1, 2, 3, 4), (5, 6, 7, 8)] and stored.page_size == 4
    publish(running, session, "b", [9] * 4)
    answer = next(stream)
    assert list(pages_of(answer.stored).values()) == [(9, 9, 9, 9)]
    assert list(answer.stored.parent_hashes) == [root_hash("")]
    running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))
    evicted = next(stream).evicted
    assert len(evicted.hashes) == 3 and not evicted.tokens and not evicted.gone and evicted.page_size == 4


def test_a_page_that_has_left_has_no_tokens(running: Running) -> None:
    session = running.session()
    publish(running, session, "a", [1] * 4)
    running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))
    publish(running, session, "b", [2] * 4)
    stream = watch(running, after_sequence_number=0, epoch=running.daemon.epoch)
    assert (first := next(stream).stored).gone == [0] and not first.tokens
    assert next(stream).HasField("evicted")
    assert list(pages_of(next(stream).stored).values()) == [(2, 2, 2, 2)]


def test_one_event_in_several_messages_can_be_resumed_between_them(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_messages, "TOKEN_SLICE", 8)
    session = running.session()
    publish(running, session, "a", [*range(20)])
    stream = watch(running, after_sequence_number=0, epoch=running.daemon.epoch)
    parts = [next(stream) for _ in range(3)]
    assert [len(part.stored.hashes) for part in parts] == [2, 2, 1]
    assert [part.sequence_number for part in parts] == [0, 0, 1]
    again = watch(running, after_sequence_number=parts[1].sequence_number, epoch=running.daemon.epoch)
    assert [next(again).stored for _ in range(3)] == [part.stored for part in parts]


def test_without_asking_there_are_none(running: Running) -> None:
    publish(running, running.session(), "a", [1] * 4)
    stream = running.stub.WatchEvents(pb.WatchEventsRequest(), timeout=30)
    next(stream)
    stored = next(stream).stored
    assert len(stored.hashes) == 1 and stored.page_size == 4 and not stored.tokens and not stored.gone
