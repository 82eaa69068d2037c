"""What happens when a client breaks a law of docs/clients.md, on a real daemon: which harm the daemon finds or
prevents, and which it cannot, so that the law is the client's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.client import Demand, KvCache, OpaqueLayout, SessionExpired
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.kvcache.conftest import Running

LAYOUT = OpaqueLayout(page_size=4, label="laws", page_bytes=64)
PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


@pytest.fixture
def client(daemon: Running) -> Iterator[KvCache]:
    yield from opened(daemon)


@pytest.fixture
def other(daemon: Running, client: KvCache) -> Iterator[KvCache]:
    yield from opened(daemon)


def opened(daemon: Running) -> Iterator[KvCache]:
    with KvCache.connect(str(daemon.config.listeners[0]), "laws", LAYOUT, pool_pages=4, ttl_s=600) as cache:
        yield cache


def begin(cache: KvCache, name: str, pages: int = 2) -> tuple[int, ...]:
    [grant] = cache.step([Demand.of_prompt(name, PROMPT, pages)])
    assert grant.error is None
    return grant.pages


def publish(cache: KvCache, name: str) -> None:
    assert [grant.error for grant in cache.step([Demand.of_step(name, 0, PROMPT, 2, 2)])] == [None]


def raw(cache: KvCache) -> Any:
    return cache.pages.numpy().raw


def violations(daemon: Running) -> list[str]:
    return list(daemon.stub.Fsck(pb.FsckRequest(deep=True)).violations)


def lost(daemon: Running) -> list[pb.LostSession]:
    return list(daemon.stub.GetStats(pb.GetStatsRequest()).lost_sessions)


def lose(daemon: Running) -> None:
    daemon.now += 601
    daemon.sweep()


def test_a_write_into_a_published_page_is_found_and_the_page_withdrawn(
    daemon: Running, client: KvCache, other: KvCache
) -> None:
    first, _ = begin(client, "a")
    raw(client)[first] = 7
    publish(client, "a")
    assert violations(daemon) == []
    raw(other)[first] = 8  # it was granted to somebody else
    assert len(violations(daemon)) == 1
    [grant] = other.step([Demand.of_prompt("b", PROMPT, 2)])
    assert grant.cached_tokens == 0, "nobody finds what was overwritten"


def test_tokens_that_are_reported_before_their_step_is_over_are_shared_as_they_are(
    daemon: Running, client: KvCache, other: KvCache
) -> None:
    """Nobody can know better than who computes. What is written late is found, if the checksum was taken before."""
    first, _ = begin(client, "a")
    publish(client, "a")
    [grant] = other.step([Demand.of_prompt("b", PROMPT, 2)])
    assert grant.cached_tokens == 4 and not raw(other)[first].any(), "it reads what nobody has written"
    assert violations(daemon) == []
    raw(client)[first] = 7
    assert len(violations(daemon)) == 1


def test_pages_of_a_client_that_stopped_calling_go_to_nobody_while_it_lives(
    daemon: Running, client: KvCache, other: KvCache
) -> None:
    pages = begin(client, "a")
    publish(client, "a")  # one whole page, and one that is unfinished
    lose(daemon)
    other.reopen()
    [grant] = other.step([Demand.of_prompt("b", [9] * 16, 4)])
    assert grant.error is not None and grant.error.reason == "NO_PAGES", "the unfinished page is in quarantine"
    [grant] = other.step([Demand.of_prompt("c", [9] * 12, 3)])
    assert pages[1] not in grant.pages, "so what the client writes late hurts nobody"
    assert pages[0] in grant.pages, "a published page may be evicted: what it reads late may be of others"
    with pytest.raises(SessionExpired):
        client.step([])
    client.reopen()  # it vouches that nothing writes any more
    assert lost(daemon) == []
    [grant] = other.step([Demand.of_prompt("d", [9], 1)])
    assert grant.pages == (pages[1],)


def test_a_client_that_vouches_and_still_writes_writes_into_the_pages_of_others(
    daemon: Running, client: KvCache, other: KvCache
) -> None:
    """The daemon believes it: nothing but the client's own word says that its work is over."""
    pages, late = begin(client, "a"), raw(client)
    lose(daemon)
    client.close()  # too early: something of it still has the pages
    other.reopen()
    [grant] = other.step([Demand.of_prompt("b", [9] * 16, 4)])
    raw(other)[list(grant.pages)] = 5
    late[pages[0]] = 7
    assert raw(other)[pages[0]].tolist() == [7] * 64
