"""The engine in a hundred lines of docs/clients.md, as processes on a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests import polling
from tests.processes import ROOT, Service, kvcache

EXAMPLE = ROOT / "clients" / "python" / "examples" / "toy_engine.py"


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="toy-") as name:
        yield Path(name)


def started(daemon: Service, tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), daemon.address, str(tokens)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[str, list[str], str]:
    """What was cached, the tokens, and what was said of errors."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    first, second = output.splitlines()
    return first, second.split(), errors


def test_it_has_about_a_hundred_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 110


def test_two_processes_share_a_prompt(directory: Path) -> None:
    with kvcache(directory, "--memory", "16MiB") as daemon:
        first, second = ended(started(daemon, 30)), ended(started(daemon, 30))
        assert first[0] == "0 of 18 prompt tokens were cached"
        assert second[0] == "16 of 18 prompt tokens were cached"
        assert first[1] == second[1] and len(set(first[1])) > 5
        one, other = started(daemon, 30), started(daemon, 30)  # at the same time
        assert ended(one)[1] == ended(other)[1] == first[1]
        pool = until(daemon, lambda pool: pool.sessions == 0)
        assert (pool.held_pages, pool.quarantined_pages) == (0, 0)


def test_what_a_killed_engine_published_stays(directory: Path) -> None:
    with kvcache(directory, "--memory", "16MiB") as daemon:
        process = started(daemon, 4000)
        until(daemon, lambda pool: pool.published_pages > 6)
        process.kill()
        process.communicate()
        assert until(daemon, lambda pool: pool.held_pages == 0).quarantined_pages == 0
        assert ended(started(daemon, 10))[0] == "16 of 18 prompt tokens were cached"


def until(daemon: Service, holds: Callable[[pb.PoolStats], bool]) -> pb.PoolStats:
    """The pool's counts, once they are as ``holds`` says."""
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    return polling.until(lambda: list(filter(holds, stub.GetStats(pb.GetStatsRequest()).pools)))[0]


def test_a_killed_daemon_changes_no_token(directory: Path) -> None:
    with kvcache(directory, "--memory", "16MiB") as daemon:
        expected = ended(started(daemon, 2000))[1]
    with kvcache(directory, "--memory", "16MiB", name="again") as daemon:
        process = started(daemon, 2000)
        until(daemon, lambda pool: pool.published_pages > 6)
        daemon.kill()
        with kvcache(directory, "--memory", "16MiB", name="again"):
            _, tokens, errors = ended(process)
    assert tokens == expected and "computing it again" in errors
