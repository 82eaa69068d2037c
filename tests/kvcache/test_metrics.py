"""The daemon's metrics: each documented one is there, is fed, and says what GetStats says."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import urllib.error
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import structlog
from google.protobuf import duration_pb2
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration
from services.common.prometheus import Endpoint
from services.kvcache.config import Config
from services.kvcache.metrics import PREFIX
from tests.kvcache.clients.messages import opening, report
from tests.kvcache.conftest import Running, identity_of
from tests.kvcache.ongpus import OnGpus
from tests.scraping import NOTHING, Scrape, read, scrape, until

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ENDPOINT = ("--metrics", "127.0.0.1:0")


def documented() -> set[str]:
    return set(re.findall(rf"^\| `({PREFIX}\w+)` \|", DOCS.read_text(), re.MULTILINE))


class Watched:
    """A daemon, its metrics, and an engine's calls."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.sessions: list[str] = []

    def look(self) -> Scrape:
        bound = self.running.daemon.metrics_bound
        assert bound
        return scrape(bound)

    def open(self, pool_id: str = "pool") -> None:
        self.sessions.append(self.running.session(pool_id))

    def demand(self, name: str, pages: int, prompt: list[int], tokens: int = 0, retention: int = 0) -> None:
        kept = pb.Retention(ttl=duration_pb2.Duration(seconds=retention), priority=1) if retention else None
        self.send(demands=[opening(name, prompt, pages, retention=kept)])
        if tokens:
            steps = report(name, 0, prompt[:tokens])
            self.running.stub.AppendTokens(pb.AppendTokensRequest(session_id=self.sessions[0], steps=steps))

    def send(self, **fields: object) -> None:
        self.running.stub.AllocatePages(pb.AllocatePagesRequest(session_id=self.sessions[0], **fields))  # type: ignore[arg-type]

    def end(self, *names: str) -> None:
        self.send(remove_sequence_ids=names)

    def starve(self) -> None:
        memory = self.running.daemon.cache.memory
        limit, memory.limit = memory.limit, memory.used
        self.demand("n", 1, [9])
        memory.limit = limit

    def evict(self) -> None:
        self.running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", include_retained=True))

    def expire(self) -> None:
        self.running.stub.ExpireSequences(pb.ExpireSequencesRequest(older_than=duration_pb2.Duration()))

    def pass_time(self, seconds: float) -> None:
        self.running.now += seconds
        self.running.sweep()

    def verify(self) -> None:
        self.running.stub.Fsck(pb.FsckRequest(deep=True))

    def damage(self) -> None:
        self.verify()
        for path in self.running.config.arena_dir.glob("*.arena"):
            with path.open("r+b") as file:
                file.write(b"x" * 4096)
        self.verify()

    def drop(self) -> None:
        self.running.stub.DropPool(pb.DropPoolRequest(pool_id="other"))


PROMPT = list(range(1, 10))  # two whole pages and a token

#: What is done, and the families that it alone has to move; in this order. Pages: 8 of 4 tokens.
ACTIONS: list[tuple[Callable[[Watched], None], set[str]]] = [
    (
        Watched.open,
        {"pages", "sessions", "sessions_opened_total", "page_bytes", "arena_bytes", "rpc_handled_total"}
        | {"rpc_handling_seconds", "host_memory_bytes"},
    ),
    (
        lambda w: w.demand("a", 3, PROMPT, tokens=8),
        {"pages", "sequences", "pages_granted_total", "pages_published_total", "prefix_cache_queries_total"},
    ),
    (lambda w: w.demand("b", 3, PROMPT), {"prefix_cache_hits_total", "sequences"}),
    (lambda w: w.demand("c", 8, [7]), {"demands_refused_total"}),
    (lambda w: w.end("a", "b"), {"pages", "sequences"}),
    (lambda w: w.demand("d", 8, [8]), {"pages_evicted_total"}),
    (lambda w: w.end("d"), {"sequences"}),
    (lambda w: w.demand("e", 3, PROMPT, tokens=8, retention=100), {"pages_published_total"}),
    (lambda w: w.end("e"), {"pages_retained", "pages"}),
    (Watched.evict, {"pages_evicted_total", "pages_retained"}),
    (lambda w: w.demand("f", 2, PROMPT, tokens=4), {"pages_published_total"}),
    (lambda w: w.end("f"), {"pages"}),
    (lambda w: w.pass_time(6), {"pages_evicted_total"}),
    (lambda w: w.demand("x", 3, PROMPT, tokens=8), {"pages_published_total"}),
    (Watched.damage, {"pages_verified_total", "pages_withdrawn_total"}),
    (Watched.starve, {"host_memory_refused_total"}),
    (lambda w: w.end("x"), {"sequences"}),
    (lambda w: w.demand("g", 2, PROMPT), {"sequences"}),
    (Watched.expire, {"sequences_expired_total", "pages"}),
    (lambda w: w.pass_time(100), {"sessions_expired_total", "sessions", "sessions_lost"}),
    (lambda w: w.open("other"), {"sessions_opened_total"}),
    (lambda w: w.pass_time(100), {"sessions_expired_total"}),
    (lambda w: w.pass_time(100), set()),
    (Watched.drop, {"pools_dropped_total", "page_bytes", "arena_bytes"}),
]
#: Known from the start on.
CONSTANT = {"budget_bytes", "host_memory_limit_bytes", "run_info", "build_info"}
#: GPU memory is what this is for; zeroing pages; engines that may be killed; and routers.
ELSEWHERE = {"attach_turns_total", "pages_zeroed_total", "engines_killed_total"} | {
    "kv_event_batches_total",
    "kv_event_replays_total",
}
#: There are none of these without lower tiers; test_tiered_daemon has some.
TIERED = {
    *("tier_available", "tier_pages_total", "tier_bytes_total", "tier_seconds", "tier_pages_moving"),
    *("host_cache_pages", "host_cache_bytes", "host_cache_limit_bytes", "host_cache_evicted_pages_total"),
    *("mover_running", "mover_restarts_total", "mover_lost_pages_total", "fills_total", "openings_waited_total"),
    *("spills_queued", "spills_dropped_total", "spills_outdated_total", "fetch_regret_seconds_total"),
}


def test_every_documented_metric_is_scraped_and_fed(tmp_path: Path) -> None:
    running = Running(tmp_path, *ENDPOINT, "--cache-ttl", "5")
    with contextlib.closing(running):
        watched = Watched(running)
        before = watched.look()
        moved = before.moved_since(NOTHING) & {PREFIX + name for name in CONSTANT}
        for at, (action, names) in enumerate(ACTIONS):
            action(watched)
            after = watched.look()
            changed = after.moved_since(before)
            assert {PREFIX + name for name in names} <= changed, f"action {at}"
            moved |= changed
            before = after
            stats = running.stub.GetStats(pb.GetStatsRequest())
            check_against(after, stats)
        below = {PREFIX + name for name in TIERED}
        assert below < documented() and after.own() == documented() - below
        assert documented() - below - moved == {PREFIX + name for name in ELSEWHERE}
        assert after.value(f"{PREFIX}budget_bytes") == 1 << 20
        assert after.labels(f"{PREFIX}run_info") == [{"epoch": f"{running.daemon.epoch:016x}", "eviction": "lru"}]
        assert after.value("process_resident_memory_bytes") > 0


def check_against(seen: Scrape, stats: pb.GetStatsResponse) -> None:
    def value(name: str, **labels: str) -> float:
        return seen.value(PREFIX + name, **labels)

    assert value("host_memory_bytes") == stats.host_memory_bytes > 0
    assert value("host_memory_limit_bytes") == stats.host_memory_limit_bytes == 1 << 30
    assert value("sessions_expired_total") == stats.expired_sessions
    assert value("sequences_expired_total") == stats.expired_sequences
    assert value("engines_killed_total") == stats.killed_engines
    for fence in ("draining", "alive", "unseen", "killed"):
        number = pb.Fence.Value(f"FENCE_{fence.upper()}")
        assert value("sessions_lost", fence=fence) == sum(lost.fence == number for lost in stats.lost_sessions)
    assert {labels["pool"] for labels in seen.labels(f"{PREFIX}pages")} == {pool.pool_id for pool in stats.pools}
    for pool in stats.pools:
        name = pool.pool_id
        assert value("pages", pool=name, state="free") == pool.free_pages
        assert value("pages", pool=name, state="held") == pool.held_pages
        assert value("pages", pool=name, state="cached") == pool.cached_pages
        assert value("pages", pool=name, state="quarantined") == pool.quarantined_pages
        assert value("pages_verified_total", pool=name, outcome="corrupted") == pool.corrupted_pages
        intact = pool.verified_pages - pool.corrupted_pages
        assert value("pages_verified_total", pool=name, outcome="intact") == intact
        assert value("pages_withdrawn_total", pool=name) == pool.withdrawn_pages
        assert value("pages_retained", pool=name) == pool.retained_pages
        assert value("page_bytes", pool=name) == pool.page_bytes
        assert value("sessions", pool=name) == pool.sessions
        assert value("sequences", pool=name) == pool.active_sequences
        assert value("prefix_cache_queries_total", pool=name) == pool.lookup_tokens
        assert value("prefix_cache_hits_total", pool=name) == pool.hit_tokens
        assert value("pages_granted_total", pool=name) == pool.granted_pages
        assert value("pages_published_total", pool=name) == pool.published_pages
        assert value("demands_refused_total", pool=name) == pool.refused_demands
        evicted = [
            value("pages_evicted_total", pool=name, cause=cause) for cause in ("allocation", "request", "expiry")
        ]
        assert (evicted[0] + evicted[1], evicted[2]) == (pool.evicted_pages, pool.expired_pages)
    assert stats.arena_bytes == sum(value("arena_bytes", pool=pool.pool_id) for pool in stats.pools)


def test_evictions_are_told_by_cause(tmp_path: Path) -> None:
    running = Running(tmp_path, *ENDPOINT, "--cache-ttl", "5")
    with contextlib.closing(running):
        watched = Watched(running)
        for action, _ in ACTIONS[:13]:
            action(watched)
        seen = watched.look()
        counts = {
            cause: seen.value(f"{PREFIX}pages_evicted_total", pool="pool", cause=cause)
            for cause in ("allocation", "request", "expiry")
        }
        assert counts == {"allocation": 2, "request": 2, "expiry": 1}


def test_zeroed_pages_are_counted(tmp_path: Path) -> None:
    with contextlib.closing(Running(tmp_path, *ENDPOINT, "--zero", "pages")) as running:
        watched = Watched(running)
        watched.open()
        watched.demand("a", 8, PROMPT)
        watched.end("a")
        until(watched.look, f"{PREFIX}pages_zeroed_total", 8, pool="pool")


def test_turns_to_attach_are_counted(tmp_path: Path) -> None:
    running = OnGpus(tmp_path, *ENDPOINT)
    with contextlib.closing(running):
        running.attach(running.open(0))
        running.open(0)
        with pytest.raises(grpc.RpcError):
            running.open(0)
        seen = Watched(running).look()
        turns = {
            outcome: seen.value(f"{PREFIX}attach_turns_total", outcome=outcome) for outcome in ("taken", "refused")
        }
        assert turns == {"taken": 2, "refused": 1}
        refused = {"method": "OpenSession", "code": "RESOURCE_EXHAUSTED"}
        until(Watched(running).look, f"{PREFIX}rpc_handled_total", 1, **refused)


def test_engines_that_were_killed_are_counted(tmp_path: Path) -> None:
    running = Running(tmp_path, *ENDPOINT, "--fence", "kill", "--drain", "1")
    with contextlib.closing(running), subprocess.Popen(["sleep", "infinity"]) as engine:
        watched = Watched(running)
        running.session(process=identity_of(engine.pid))
        watched.pass_time(11)
        assert watched.look().value(f"{PREFIX}sessions_lost", fence="draining") == 1
        watched.pass_time(1)
        assert engine.wait(60) == -signal.SIGKILL
        watched.pass_time(0)
        seen = watched.look()
        check_against(seen, running.stub.GetStats(pb.GetStatsRequest()))
        assert seen.value(f"{PREFIX}engines_killed_total") == 1
        assert not running.stub.GetStats(pb.GetStatsRequest()).lost_sessions


def test_calls_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    running = Running(tmp_path, *ENDPOINT)
    with contextlib.closing(running):
        watched = Watched(running)
        for _ in range(3):
            running.stub.GetStats(pb.GetStatsRequest())
        with pytest.raises(grpc.RpcError):
            running.stub.DropPool(pb.DropPoolRequest(pool_id="none"))
        watching = running.stub.WatchEvents(pb.WatchEventsRequest())
        next(watching)
        watching.cancel()
        given_up = {"method": "WatchEvents", "code": "CANCELLED"}
        until(watched.look, f"{PREFIX}rpc_handled_total", 1, **given_up)
        seen = until(watched.look, f"{PREFIX}rpc_handled_total", 1, method="DropPool", code="NOT_FOUND")
        assert seen.value(f"{PREFIX}rpc_handled_total", method="GetStats", code="OK") == 3
        assert seen.value(f"{PREFIX}rpc_handling_seconds_count", method="GetStats") == 3
        assert seen.value(f"{PREFIX}rpc_handling_seconds_sum", method="GetStats") > 0


def test_it_is_off_unless_asked_for_and_gone_when_the_daemon_is(tmp_path: Path) -> None:
    off = Running(tmp_path)
    with contextlib.closing(off):
        assert off.daemon.metrics_bound is None
    on = Running(tmp_path, *ENDPOINT)
    bound = on.daemon.metrics_bound
    assert bound and read(bound)
    on.close()
    with pytest.raises(OSError, match="refused"):
        read(bound)


class Broken(Collector):
    """Raises."""

    def collect(self) -> list[Metric]:
        raise TimeoutError("the loop is stuck")


def test_what_cannot_be_collected_is_an_error_and_the_next_scrape_another_matter() -> None:
    endpoint = Endpoint(Listener.parse("127.0.0.1:0"), Broken())
    endpoint.start()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError, match="500"):
                read(endpoint.bound)
    endpoint.stop()
    endpoint.stop()
    assert [entry["event"] for entry in logs] == ["metrics_failed"] * 2


def test_a_caller_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.prometheus._Handler.timeout", 0.05)
    endpoint = Endpoint(Listener.parse("127.0.0.1:0"), Nothing())
    endpoint.start()
    host, _, port = endpoint.bound.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as silent:
        assert silent.recv(1) == b""  # closed from the other side
        monkeypatch.undo()  # who does say something has the time that it takes
        assert "python_info" in read(endpoint.bound)
    endpoint.stop()


class Nothing(Collector):
    """No metrics."""

    def collect(self) -> list[Metric]:
        return []


def test_an_address_that_cannot_be_had_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:9464"):
            endpoint = Endpoint(Listener.parse(address), Nothing())
            with pytest.raises(InvalidConfiguration, match=rf"--metrics {address}: cannot bind"):
                endpoint.start()
            endpoint.stop()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("unix:/run/m.sock", "expected host:port"),
        ("nonsense", "expected host:port"),
        ("127.0.0.1:65536", "expected host:port"),
        ("0.0.0.0:9464", "--insecure"),
    ],
)
def test_a_bad_address_is_refused(address: str, says: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        Config.read(["--metrics", address], {})
    assert f"--metrics {address}: " in caught.value.message and says in caught.value.message


def test_another_address_may_be_meant() -> None:
    config = Config.read(["--insecure"], {"ROCMFORGE_KVCACHE_METRICS": "0.0.0.0:9465"})
    assert str(config.metrics) == "0.0.0.0:9465"
    assert Config.read([], {}).metrics is None
