"""The product as it is run: a daemon and engines as processes, the bundled model, clients over real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from tests.processes import ROOT, Service, engine, kvcache

MODEL = ROOT / "models" / "shakespeare"


@dataclass
class Pair:
    """One daemon, one engine."""

    daemon: Service
    engine: Service
    directory: Path

    @property
    def cache(self) -> Any:
        return kvcache_pb2_grpc.KvCacheServiceStub(self.daemon.channel)

    @property
    def stub(self) -> Any:
        return engine_pb2_grpc.EngineServiceStub(self.engine.channel)

    def pool(self) -> kvcache_pb2.PoolStats:
        [pool] = self.cache.GetStats(kvcache_pb2.GetStatsRequest()).pools
        return pool

    def assert_clean(self) -> None:
        """Nothing is held, and the ledger balances; the engine knows no request."""
        pool = self.pool()
        assert pool.active_sequences == pool.held_pages == pool.quarantined_pages == 0
        assert pool.free_pages + pool.cached_pages == pool.total_pages
        stats = self.stub.GetStats(engine_pb2.GetStatsRequest())
        assert (stats.running_requests, stats.queued_requests, stats.held_pages) == (0, 0, 0)
        assert not self.cache.Fsck(kvcache_pb2.FsckRequest()).violations


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory; the path of a socket has a limit, which pytest's own may be beyond."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Shared by the tests of a module; each leaves it clean."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        directory = Path(name)
        tcp = ["--listen", "127.0.0.1:0"]
        with (
            kvcache(directory, *tcp, "--allow", "viewer=anyone") as daemon,
            engine(directory, daemon.address, *tcp, model=MODEL) as one,
        ):
            yield Pair(daemon, one, directory)
