"""A daemon with tiers below its pools and a real mover, over its socket."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import BY_REASON
from services.kvcache.metrics import PREFIX
from tests.kvcache.conftest import LAYOUT_PB, Running
from tests.kvcache.outer.servers import until as wait_until
from tests.kvcache.test_metrics import ENDPOINT, TIERED, documented
from tests.scraping import scrape

PAGE = LAYOUT_PB.page_size
TOKENS = list(range(5 * PAGE + 1))


class Engine:
    """One session, which writes what it computes: pages full of the number of their first token."""

    def __init__(self, running: Running, pages: int = 8) -> None:
        self.stub = running.stub
        opened = self.stub.OpenSession(pb.OpenSessionRequest(pool_id="pool", pool_pages=pages, layout=LAYOUT_PB))
        self.id, self.page_bytes = opened.session_id, opened.arena.page_bytes
        with open(opened.arena.file_path, "r+b") as file:
            self.arena = mmap.mmap(file.fileno(), opened.arena.size_bytes)
        at = opened.arena.canary_offset
        canary = self.arena[at : at + 32]
        self.arena[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
        self.stub.AttachSession(pb.AttachSessionRequest(session_id=self.id, seen=canary))

    def open(self, name: str, tokens: list[int], wait_s: float | None = None) -> pb.SequenceGrant:
        opening = pb.SequenceOpening(
            sequence_id=name, prompt=pb.Prompt(tokens=tokens), total_pages=-(-len(tokens) // PAGE)
        )
        if wait_s is not None:
            opening.fill_wait.CopyFrom(duration_pb2.Duration(nanos=int(wait_s * 1e9) % 10**9, seconds=int(wait_s)))
        request = pb.AllocatePagesRequest(
            session_id=self.id, demands=[pb.Demand(opening=opening)], prefill_tokens_per_s=100.0
        )
        return self.stub.AllocatePages(request).grants[0]

    def serve(self, name: str, tokens: list[int]) -> None:
        """A request from its beginning to its end."""
        grant = self.open(name, tokens)
        for at, page in enumerate(grant.page_ids[: len(tokens) // PAGE]):
            self.write(page, tokens[at * PAGE] + 1)
        steps = pb.SequenceSteps(sequence_ids=[name], starts=[0], token_counts=[len(tokens)], tokens=tokens)
        self.stub.AppendTokens(pb.AppendTokensRequest(session_id=self.id, steps=steps))
        self.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=self.id, sequence_ids=[name]))

    def write(self, page: int, value: int) -> None:
        self.arena[page * self.page_bytes : (page + 1) * self.page_bytes] = bytes([value]) * self.page_bytes

    def read(self, page: int) -> set[int]:
        return set(self.arena[page * self.page_bytes : (page + 1) * self.page_bytes])

    def come_back(self, name: str, tokens: list[int]) -> pb.SequenceGrant:
        """As an engine that asks again for as long as it is told to."""
        grant = self.open(name, tokens, 20.0)
        until = time.monotonic() + 20
        while grant.error.code:
            assert rpc.error_from_status(grant.error).reason == "PAGES_FILLING" and time.monotonic() < until, grant
            grant = self.open(name, tokens, 20.0)
        return grant

    def forget(self) -> None:
        """Evict everything, and have other bytes where it was."""
        self.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))
        self.serve("other", [99] * (7 * PAGE))
        self.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path, "--host-cache", "1MiB", "--tier-admission", "all", *ENDPOINT)
    yield one
    one.close()


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, "it does not come")


def host_tier(running: Running) -> pb.TierStats:
    [stats] = running.stub.GetStats(pb.GetStatsRequest()).tiers
    return stats


def test_what_was_evicted_comes_back(running: Running) -> None:
    engine = Engine(running)
    engine.serve("a", TOKENS)
    until(lambda: host_tier(running).pages == 5)
    engine.forget()
    explained = running.stub.ExplainPrefix(pb.ExplainPrefixRequest(pool_id="pool", prompt=TOKENS)).pages
    assert [page.tier for page in explained] == [pb.TIER_HOST] * 5 + [pb.TIER_UNSPECIFIED]
    assert {page.outcome for page in explained[:5]} == {pb.PAGE_OUTCOME_EVICTED}
    grant = engine.come_back("b", TOKENS)
    assert grant.cached_tokens == 5 * PAGE
    assert [engine.read(page) for page in grant.page_ids[:5]] == [{at * PAGE + 1} for at in range(5)]
    explained = running.stub.ExplainPrefix(pb.ExplainPrefixRequest(pool_id="pool", prompt=TOKENS)).pages
    assert [page.tier for page in explained[:5]] == [pb.TIER_POOL] * 5
    stats = running.stub.GetStats(pb.GetStatsRequest())
    tier, mover, [pool] = stats.tiers[0], stats.mover, stats.pools
    assert tier.tier == pb.TIER_HOST and tier.available and tier.capacity_bytes == 1 << 20
    assert (tier.fetched_pages, tier.found_pages, tier.failed_pages) == (5, 5, 0)
    assert tier.fetched_bytes == 5 * engine.page_bytes and tier.used_bytes == tier.pages * engine.page_bytes
    assert mover.running and (mover.fills, mover.waited_openings, mover.restarts) == (1, 1, 0)
    assert (pool.filled_pages, pool.filling_pages) == (5, 0)
    assert not running.stub.Fsck(pb.FsckRequest(deep=True)).violations


def test_metrics_of_tiers(running: Running) -> None:
    engine = Engine(running)
    engine.serve("a", TOKENS)
    until(lambda: host_tier(running).pages == 5)
    engine.forget()
    engine.come_back("b", TOKENS)
    bound = running.daemon.metrics_bound
    assert bound is not None
    seen, tier = scrape(bound), host_tier(running)
    assert {PREFIX + name for name in TIERED} < seen.own() == documented()
    for event in ("stored", "fetched", "looked_up", "found", "failed"):
        counted = seen.value(f"{PREFIX}tier_pages_total", tier="host", event=event)
        assert counted == getattr(tier, f"{event}_pages")
    assert seen.value(f"{PREFIX}tier_bytes_total", tier="host", way="fetch") == tier.fetched_bytes > 0
    assert seen.value(f"{PREFIX}tier_bytes_total", tier="host", way="store") == tier.stored_bytes > 0
    assert seen.value(f"{PREFIX}host_cache_bytes") == tier.used_bytes
    assert seen.value(f"{PREFIX}host_cache_pages") == tier.pages
    assert seen.value(f"{PREFIX}host_cache_limit_bytes") == 1 << 20
    assert seen.value(f"{PREFIX}pages_filled_total", pool="pool") == 5
    assert seen.value(f"{PREFIX}pages", pool="pool", state="filling") == 0
    assert seen.value(f"{PREFIX}tier_available", tier="host") == seen.value(f"{PREFIX}mover_running") == 1
    assert seen.value(f"{PREFIX}fills_total") == seen.value(f"{PREFIX}openings_waited_total") == 1


def test_events_of_tiers(running: Running) -> None:
    """What the host tier stores and forgets is told to those who want it, and to nobody else."""
    engine = Engine(running)
    both = running.stub.WatchEvents(pb.WatchEventsRequest(include_tiers=True, include_tokens=True))
    alone = running.stub.WatchEvents(pb.WatchEventsRequest())
    assert next(both).HasField("reset") and next(alone).HasField("reset")
    engine.serve("a", TOKENS)
    until(lambda: host_tier(running).pages == 5)
    pool, below = list[int](), list[int]()
    while len(below) < 5:
        links = next(both).stored
        assert list(links.tokens) == TOKENS[: 5 * PAGE][-len(links.tokens) :] or links.tokens
        (below if links.tier == pb.TIER_HOST else pool).extend(links.hashes)
    assert sorted(below) == sorted(pool) and len(set(pool)) == 5
    running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))
    seen = [next(alone), next(alone)]
    assert [one.WhichOneof("event") for one in seen] == ["stored", "evicted"]
    assert {one.stored.tier for one in seen} == {pb.TIER_UNSPECIFIED}
    late = running.stub.WatchEvents(pb.WatchEventsRequest(include_tiers=True))
    assert next(late).HasField("reset")
    links = next(late).stored
    assert links.tier == pb.TIER_HOST and sorted(links.hashes) == sorted(below)


def test_who_does_not_wait_is_never_refused(running: Running) -> None:
    engine = Engine(running)
    engine.serve("a", TOKENS)
    until(lambda: host_tier(running).pages == 5)
    engine.forget()
    grant = engine.open("b", TOKENS)
    assert not grant.error.code and not grant.cached_tokens


def test_the_wait_is_bounded(running: Running) -> None:
    """By fill_wait, whatever becomes of the mover: the clock of this daemon stands still until it is moved."""
    engine = Engine(running)
    engine.serve("a", TOKENS)
    until(lambda: host_tier(running).pages == 5)
    engine.forget()
    mover = running.daemon.tiering
    assert mover is not None
    mover.mover.send = lambda order: True  # a mover that never answers
    assert rpc.error_from_status(engine.open("b", TOKENS, 0.1).error).reason == "PAGES_FILLING"
    assert rpc.error_from_status(engine.open("b", TOKENS, 0.1).error).reason == "PAGES_FILLING"
    running.now += 0.11
    grant = engine.open("b", TOKENS, 0.1)
    assert not grant.error.code and len(grant.page_ids) == 6 and not grant.cached_tokens


def test_a_pool_is_dropped_once_nothing_maps_it(running: Running) -> None:
    engine = Engine(running)
    engine.serve("a", TOKENS)
    until(lambda: host_tier(running).pages == 5)
    engine.stub.CloseSession(pb.CloseSessionRequest(session_id=engine.id))
    engine.stub.DropPool(pb.DropPoolRequest(pool_id="pool"))
    again = Engine(running)
    grant = again.come_back("b", TOKENS)
    assert grant.cached_tokens == 5 * PAGE, "what is stored outlives the pool"
    assert [again.read(page) for page in grant.page_ids[:5]] == [{at * PAGE + 1} for at in range(5)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda demand: demand.opening.fill_wait.FromSeconds(601), "demands[0].opening.fill_wait"),
        (lambda demand: demand.opening.fill_wait.FromSeconds(-1), "demands[0].opening.fill_wait"),
    ],
)
def test_a_wait_that_cannot_be(running: Running, change: Callable[[pb.Demand], None], field: str) -> None:
    engine = Engine(running)
    demand = pb.Demand(opening=pb.SequenceOpening(sequence_id="a", prompt=pb.Prompt(tokens=[1])))
    change(demand)
    with pytest.raises(grpc.RpcError) as failed:
        engine.stub.AllocatePages(pb.AllocatePagesRequest(session_id=engine.id, demands=[demand]))
    error = rpc.error_from(failed.value)
    assert isinstance(error, BY_REASON["FIELD_INVALID"]) and error.field == field


@pytest.mark.parametrize("speed", [-1.0, float("nan"), float("inf"), 1e10])
def test_a_speed_that_cannot_be(running: Running, speed: float) -> None:
    engine = Engine(running)
    with pytest.raises(grpc.RpcError) as failed:
        engine.stub.AllocatePages(pb.AllocatePagesRequest(session_id=engine.id, prefill_tokens_per_s=speed))
    assert rpc.error_from(failed.value).field == "prefill_tokens_per_s"
