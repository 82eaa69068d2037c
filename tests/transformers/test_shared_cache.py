"""transformers' continuous batching on the daemon's pages, `examples/transformers`, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests.processes import ROOT, Service, kvcache

pytestmark = pytest.mark.timeout(900)
EXAMPLE = ROOT / "examples" / "transformers" / "shared_cache.py"
PAGE = 16
#: To import transformers takes most of it, on a busy machine.
ANSWER_S = 300.0
#: Five whole pages that all share, and an end that each has for itself.
PROMPTS = [[10 + at % 61 for at in range(5 * PAGE)] + Random(one).choices(range(1, 1024), k=9) for one in range(8)]
NEW = 24


class Peer:
    """A process of `peer.py`."""

    def __init__(self, daemon: Service, log: Path, **options: Any) -> None:
        self._log = log.open("ab")
        roots = f"{ROOT / 'clients' / 'python'}:{ROOT / 'protos'}"
        self.process = subprocess.Popen(
            [
                os.environ["ROCMFORGE_TRANSFORMERS"],
                str(Path(__file__).with_name("peer.py")),
                daemon.address,
                json.dumps(options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"},
        )
        self._path, self._answers = log, queue.SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def log(self) -> str:
        return self._path.read_text()[-4000:]

    def ask(self, do: str = "generate", **values: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **values}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        with contextlib.suppress(queue.Empty):
            if line := self._answers.get(timeout=ANSWER_S):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(self.log())

    def do(self, do: str = "generate", **values: Any) -> dict[str, Any]:
        self.ask(do, **values)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._log.close()


@contextlib.contextmanager
def peer(daemon: Service, name: str, **options: Any) -> Iterator[Peer]:
    one = Peer(daemon, daemon.log_path.with_name(f"{name}.log"), **options)
    try:
        assert one.answer()["ready"]
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(directory: Path) -> Iterator[Service]:
    with kvcache(directory, "--memory", "64MiB") as service:
        yield service


@pytest.fixture(scope="module")
def first(daemon: Service) -> Iterator[Peer]:
    with peer(daemon, "first", pool_pages=200) as one:
        yield one


@pytest.fixture(scope="module")
def second(daemon: Service) -> Iterator[Peer]:
    with peer(daemon, "second", pool_pages=200) as one:
        yield one


@pytest.fixture(scope="module")
def expected(first: Peer) -> list[list[int]]:
    """What transformers alone generates."""
    tokens: list[list[int]] = first.do("plain", prompts=PROMPTS, new_tokens=NEW)["tokens"]
    assert len(tokens) == len(PROMPTS) and len({tuple(one) for one in tokens}) > 2
    return tokens


def stub(daemon: Service) -> Any:
    return kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)


def until(daemon: Service, holds: Callable[[pb.PoolStats], bool]) -> pb.PoolStats:
    """The pool's counts, once they are as ``holds`` says."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for pool in stub(daemon).GetStats(pb.GetStatsRequest()).pools:
            if holds(pool):
                return pool
    raise AssertionError(str(stub(daemon).GetStats(pb.GetStatsRequest())))


def check_clean(daemon: Service) -> None:
    """Nothing is held, and every published page is what was published."""
    pool = until(daemon, lambda pool: pool.held_pages == 0)
    assert (pool.quarantined_pages, pool.active_sequences) == (0, 0)
    walked = stub(daemon).Fsck(pb.FsckRequest(deep=True))
    assert not walked.violations and walked.verified_pages > 0


def forget(daemon: Service) -> None:
    """Empty the prefix cache."""
    [pool] = stub(daemon).GetStats(pb.GetStatsRequest()).pools
    stub(daemon).EvictPages(pb.EvictPagesRequest(pool_id=pool.pool_id))


def test_it_is_a_page_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 170


def test_tokens_are_those_of_transformers_alone_and_a_prefix_is_computed_once(
    daemon: Service, first: Peer, second: Peer, expected: list[list[int]]
) -> None:
    forget(daemon)
    cold = first.do(prompts=PROMPTS[:1], new_tokens=NEW)
    assert (cold["tokens"], cold["cached"]) == (expected[:1], 0)
    assert cold["computed"] == len(PROMPTS[0]) + NEW - 1
    warm = second.do(prompts=PROMPTS, new_tokens=NEW)
    assert warm["tokens"] == expected
    assert warm["cached"] == len(PROMPTS) * 5 * PAGE, "another process has computed these"
    assert warm["computed"] == sum(map(len, PROMPTS)) - warm["cached"] + len(PROMPTS) * (NEW - 1)
    again = first.do(prompts=PROMPTS, new_tokens=NEW)
    assert again["tokens"] == expected and again["cached"] == warm["cached"]
    # What was generated is published, too: a conversation goes on from there.
    longer = [prompt + tokens[:20] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    on = first.do(prompts=longer, new_tokens=2)
    assert on["cached"] == len(PROMPTS) * 6 * PAGE
    assert on["tokens"] == [tokens[20:22] for tokens in expected]
    check_clean(daemon)


def test_two_at_once_in_a_small_pool(daemon: Service, directory: Path, expected: list[list[int]]) -> None:
    """Requests that find no room wait, or begin anew: their tokens are the same."""
    with kvcache(directory, "--memory", "8MiB", name="small") as small:
        with peer(small, "one", pool_pages=24) as one, peer(small, "other", pool_pages=24) as other:
            for _ in range(3):
                one.ask(prompts=PROMPTS, new_tokens=NEW)
                tokens = one.answer()["tokens"]
                assert tokens == expected
            refused = stub(small).GetStats(pb.GetStatsRequest()).pools[0].refused_demands
            assert refused > 0, "there was room for all"
            assert other.do(prompts=PROMPTS[:2], new_tokens=NEW)["tokens"] == expected[:2]
            check_clean(small)


def test_it_stops_with_its_lease(daemon: Service, first: Peer, expected: list[list[int]]) -> None:
    """It looks before each step and after it, and computes nothing that it may not write, nor uses what was late."""
    for looks, steps in ((1, 0), (2, 1), (3, 1), (4, 2)):
        forget(daemon)
        answer = first.do("fenced", prompts=PROMPTS[:1], new_tokens=NEW, looks=looks)
        assert (answer.get("error"), answer["steps"]) == ("SESSION_EXPIRED", steps)
        # The prompt's step is published if it ended under the lease.
        found = first.do(prompts=PROMPTS[:1], new_tokens=NEW)
        assert found["tokens"] == expected[:1]
        assert found["cached"] == (5 * PAGE if looks > 2 else 0)
    check_clean(daemon)


def test_it_refuses_what_would_write_other_pages(daemon: Service, first: Peer) -> None:
    for setting, value in (
        ("use_async_batching", True),
        ("cuda_graph_booleans", (False, True)),
        ("varlen_compile_config", {"mode": "default"}),
        ("decode_compile_config", {"mode": "default"}),
        ("cpu_offload_space", 1.0),
    ):
        answer = first.do("refused", **{setting: value})
        assert (answer.get("error"), "are supported" in answer["message"]) == ("ValueError", True), setting
    answer = first.do("other_pages", page_size=32)
    assert (answer.get("error"), answer["steps"]) == ("ValueError", 0)
    assert "on pages of 32 tokens" in answer["message"]
    assert first.do(prompts=PROMPTS[:1], new_tokens=2)["steps"] == 2
    check_clean(daemon)


def test_a_kill_of_one_changes_nothing_for_the_other(daemon: Service, second: Peer, expected: list[list[int]]) -> None:
    with peer(daemon, "killed", pool_pages=200) as killed:
        forget(daemon)
        killed.ask(prompts=PROMPTS[:4], new_tokens=400)
        published = until(daemon, lambda pool: pool.held_pages > 20 and pool.published_pages > 0).published_pages
        second.ask(prompts=PROMPTS, new_tokens=NEW)
        until(daemon, lambda pool: pool.published_pages > published)
        killed.process.kill()
        killed.process.wait(60)
        answer = second.answer()
    assert answer["tokens"] == expected
    check_clean(daemon)
    assert second.do(prompts=PROMPTS, new_tokens=NEW)["cached"] == len(PROMPTS) * 5 * PAGE


def test_a_stop_beyond_the_lease_changes_no_token(daemon: Service, expected: list[list[int]]) -> None:
    with peer(daemon, "stopped", pool_pages=200, ttl_s=1) as stopped:
        expired = stub(daemon).GetStats(pb.GetStatsRequest()).expired_sessions
        stopped.ask(prompts=PROMPTS[:2], new_tokens=400)
        until(daemon, lambda pool: pool.held_pages > 12)
        stopped.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while stub(daemon).GetStats(pb.GetStatsRequest()).expired_sessions == expired:
            assert time.monotonic() < deadline
        stopped.process.send_signal(signal.SIGCONT)
        tokens = stopped.answer()["tokens"]
        assert [one[:NEW] for one in tokens] == expected[:2]
        assert "SESSION_EXPIRED: computing it again" in stopped.log()
    check_clean(daemon)


def test_a_killed_daemon_changes_no_token(directory: Path, expected: list[list[int]]) -> None:
    with kvcache(directory, "--memory", "64MiB", name="again") as daemon:
        with peer(daemon, "bereft", pool_pages=200) as one:
            one.ask(prompts=PROMPTS, new_tokens=NEW * 8)
            until(daemon, lambda pool: pool.published_pages > 10)
            daemon.kill()
            with kvcache(directory, "--memory", "64MiB", name="again") as restarted:
                tokens = one.answer()["tokens"]
                assert [each[:NEW] for each in tokens] == expected
                assert "computing it again" in one.log()
                check_clean(restarted)
