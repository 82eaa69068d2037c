"""Real processes under faults: nothing is found, and what a test breaks itself is."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2

from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from tests.chaos import __main__ as program
from tests.chaos.cluster import POOL_PAGES, Cluster
from tests.chaos.run import Run
from tests.chaos.schedule import DAEMON, faults
from tests.kvcache.conftest import attached

#: .ci/run has `make chaos` go on for 3 minutes, with a seed of its own.
SECONDS, SEED = 25.0, 2
PAGE_BYTES = 81920


@pytest.mark.timeout(900)
def test_under_faults_no_token_changes_and_nothing_is_left_behind(tmp_path: Path) -> None:
    status = program.main(["--seconds", f"{SECONDS}", "--seed", f"{SEED}", "--report", str(tmp_path)])
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert (report["findings"], status) == ([], 0)
    assert report["faults"] == [str(fault) for fault in faults(SEED, SECONDS)]
    # Each client sees what it has begun to its end, however little the machine does meanwhile.
    assert report["counts"]["streams whole"] > 3 and report["counts"]["tokens"] > 100
    for name in ("chaos-memory.svg", "chaos-pages.svg"):
        assert (tmp_path / name).read_text().startswith("<svg ")


def flip(cluster: Cluster) -> None:
    """Flip the sign of every number in the pool's pages, without the services' knowledge."""
    [arena] = (cluster.directory / "arena").iterdir()
    pages = np.memmap(arena, np.uint32, "r+", shape=(POOL_PAGES * PAGE_BYTES // 4,))
    pages ^= np.uint32(1 << 31)


@pytest.mark.timeout(600)
def test_pages_that_change_are_found_in_the_tokens_and_by_their_checksums() -> None:
    verdict = Run(3, 8.0, [], count=6, workers=4, tamper=flip).go().verdict
    # Those in use are read as they are; those that are cached are verified before they are used again, or at the end.
    assert {finding.what for finding in verdict.findings} >= {"wrong tokens", "corrupted"}
    assert verdict.told().startswith("seed 3, ")


def kill_and_leak(cluster: Cluster) -> None:
    """Kill an engine that nobody ordered to end, and open a session that nobody closes."""
    with grpc.insecure_channel(f"unix:{cluster.nodes[DAEMON].socket}") as channel:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        [pool] = stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
        lease = duration_pb2.Duration(seconds=600)
        attached(stub, pool.pool_id, layout=pool.layout, ttl=lease, pool_pages=pool.total_pages)
    service = cluster.nodes["engine-1"].service
    assert service is not None
    os.kill(service.pid, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_a_process_that_dies_and_a_session_that_stays_are_found() -> None:
    verdict = Run(4, 6.0, [], count=6, workers=2, tamper=kill_and_leak, settle_s=8.0).go().verdict
    assert {finding.what for finding in verdict.findings} == {"died", "leak"}
