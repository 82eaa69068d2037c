# mypy: disable-error-code="misc"
"""Many clients at once against a real daemon: calls are cancelled, run out of time, lose their connection."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from tests.kvcache.cache.stateful.known_sequence import Ledger
from tests.kvcache.clients.calls import Tally
from tests.kvcache.clients.load import PAGES, POOL, Client
from tests.kvcache.clients.watchdog import Watchdog
from tests.kvcache.clients.watcher import Watcher
from tests.polling import until
from tests.processes import kvcache

CLIENTS = 32
OPERATIONS = int(os.environ.get("LOAD_OPERATIONS", "1000"))
SEED = int(os.environ.get("LOAD_SEED", "1"))
STALL_S = 30.0


def raise_first(dog: Watchdog, log: Any, *workers: Any) -> None:
    """Fail with what went wrong first: no progress, or a worker's error."""
    if dog.report:
        pytest.fail(f"{dog.report}\n--- the daemon ---\n{log()[-20000:]}")
    for worker in workers:
        if worker.error is not None:
            raise AssertionError(f"{worker.name} failed") from worker.error


def test_thirty_two_clients_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    ledger, tally = Ledger(), Tally()
    # All of one user, who opens more sessions at once than attach: replies of many an opening are lost.
    flags = ("--memory", "1MiB", "--drain", "1", "--identity-unattached", "256", "--identity-sessions", "256")
    with kvcache(tmp_path, *flags) as daemon, Watchdog(STALL_S, daemon.pid) as dog:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
        clients = [
            Client(number, daemon.address, OPERATIONS, SEED, ledger, tally, lambda n=number: dog.beat(f"client-{n}"))
            for number in range(CLIENTS)
        ]
        watcher = Watcher(daemon.channel, POOL)
        watcher.start()
        began = time.monotonic()
        for client in clients:
            client.start()
        for number, client in enumerate(clients):
            client.join()
            dog.done(f"client-{number}")
        elapsed = time.monotonic() - began
        raise_first(dog, daemon.log, *clients, watcher)
        with capsys.disabled():
            # Beside pytest's own output: this is the one place that tells what a call costs under such a load.
            print(f"\n{CLIENTS} clients x {OPERATIONS} operations, seed {SEED}: {tally.line(elapsed)}")

        # Every sequence was removed and every session is open: nothing that was given up came back.
        # Those that no client ever heard of end with their lease of 1 s.
        until(lambda: stub.GetStats(pb.GetStatsRequest()).pools[0].sessions <= CLIENTS)
        stats = stub.GetStats(pb.GetStatsRequest())
        pool = stats.pools[0]
        assert (pool.sessions, pool.active_sequences, pool.total_tokens) == (CLIENTS, 0, 0)
        assert (pool.held_pages, pool.quarantined_pages) == (0, 0)
        assert pool.free_pages + pool.cached_pages == pool.total_pages == PAGES
        assert pool.never_used_pages + pool.recycled_pages == pool.free_pages
        assert not stub.ListSequences(pb.ListSequencesRequest()).sequences
        fsck = stub.Fsck(pb.FsckRequest())
        assert not fsck.violations
        assert (fsck.checked_pages, fsck.checked_sequences) == (PAGES, 0)
        assert fsck.checked_index_entries == pool.cached_pages
        assert tally.counts["lookup_least"] <= pool.lookup_tokens <= tally.counts["lookup_most"]
        assert pool.hit_tokens >= tally.counts["hits"] > 0

        # What the events told of the cache is what is in it.
        number, snapshot = snapshot_of(stub, pool.cached_pages)
        assert watcher.read_to(number, STALL_S) == snapshot
        watcher.close()

        for client in clients:
            client.close_session()
        stats = stub.GetStats(pb.GetStatsRequest())
        pool = stats.pools[0]
        assert (pool.sessions, pool.held_pages, pool.quarantined_pages, stats.expired_sequences) == (0, 0, 0, 0)
        assert not stub.Fsck(pb.FsckRequest()).violations
        # Those that no client ever heard of are taken for mapped until a drain of 1 s is over.
        until(lambda: dropped(stub))
        assert stub.GetStats(pb.GetStatsRequest()).arena_bytes == 0
        assert daemon.events("rpc_failed") == daemon.events("sweep_failed") == []
        assert daemon.stop() == 0
    # It was a test: things did come to grief.
    assert tally.counts["given_up"] > CLIENTS * OPERATIONS // 20
    assert all(tally.counts[what] > 0 for what in ("dropped", "too_late", "NO_PAGES", "QUOTA_EXCEEDED"))


def dropped(stub: Any) -> bool:
    try:
        stub.DropPool(pb.DropPoolRequest(pool_id=POOL))
    except grpc.RpcError as failure:
        assert rpc.error_from(failure).reason == "POOL_IN_USE"
        return False
    return True


def snapshot_of(stub: Any, cached: int) -> tuple[int, set[int]]:
    """The number of the last event, and the hashes of so many cached pages."""
    stream = stub.WatchEvents(pb.WatchEventsRequest(pool_id=POOL), timeout=STALL_S)
    number, hashes = next(stream).sequence_number, set[int]()
    while len(hashes) < cached:
        answer = next(stream)
        assert answer.sequence_number == number
        hashes.update(answer.stored.hashes)
    stream.cancel()
    return number, hashes


def test_the_watchdog_tells_where_everybody_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    with kvcache(tmp_path) as daemon:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
        os.kill(daemon.pid, signal.SIGSTOP)
        began, ended = threading.Event(), threading.Event()

        def hang() -> None:
            began.set()
            with contextlib.suppress(grpc.RpcError):
                stub.GetStats(pb.GetStatsRequest())
            ended.set()

        with Watchdog(0.5, daemon.pid) as dog:
            threading.Thread(target=hang, name="hanging", daemon=True).start()
            assert began.wait(60)
            dog.beat("client-0")
            assert ended.wait(60), "the call did not end with the daemon"
        assert "no progress of client-0 for 0.5 s" in dog.report and "in hang" in dog.report
        assert daemon.process.wait(60) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in daemon.log() and "services/kvcache" in daemon.log()


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process that may be ended."""
    child = subprocess.Popen(["sleep", "infinity"])
    yield child.pid
    child.kill()
    child.wait(60)


def test_the_watchdog_lets_those_be_that_get_on(bystander: int) -> None:
    now = [0.0]
    looked, here = threading.Semaphore(0), threading.get_ident()

    def clock() -> float:
        if threading.get_ident() != here:
            looked.release()
        return now[0]

    with Watchdog(1.0, bystander, clock) as dog:
        for worker in ("ends", "goes on"):
            dog.beat(worker)
        dog.done("ends")
        for _ in range(3):
            now[0] += 0.9
            dog.beat("goes on")
            while looked.acquire(blocking=False):
                pass
            assert looked.acquire(timeout=60) and looked.acquire(timeout=60)  # a whole look at it, and the next begun
    assert dog.report == ""
