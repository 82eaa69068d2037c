"""The connector in the real vLLM, on a real daemon. Starting a vLLM takes longest, so few are started and each serves
several tests, which run in the order of this file.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from tests.processes import Service, kvcache
from tests.vllm.real.peers import Peer

pytestmark = pytest.mark.timeout(900)
VOCABULARY = 1024
HITS = "vllm:external_prefix_cache_hits_total"


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1, VOCABULARY) for _ in range(count)]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of 20 to 300 tokens, most of which begin like others."""
    draw = random.Random(seed)
    roots = [tokens(draw, length) for length in (0, 64, 130, 220)]
    return [draw.choice(roots) + tokens(draw, draw.randint(20, 80)) for _ in range(count)]


@dataclass
class Stage:
    """What the tests of this file share: the daemon now running and the engines, by name."""

    directory: Path
    stack: contextlib.ExitStack
    daemon: Service
    peers: dict[str, Peer] = field(default_factory=dict)
    expected: dict[int, list[list[int]]] = field(default_factory=dict)

    def peer(self, name: str) -> Peer:
        """The engine of that name; ``plain`` has no connector. The others have few blocks, so they preempt."""
        if name not in self.peers:
            plain = name == "plain"
            made = Peer(
                self.directory,
                name,
                "" if plain else self.daemon.address,
                extra={"ttl_s": 3},
                num_gpu_blocks_override=512 if plain else 56,
                **({} if plain else {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}),
            )
            self.stack.callback(made.close)
            self.peers[name] = made
        return self.peers[name].wait_ready()

    def right(self, seed: int, count: int, length: int) -> list[list[int]]:
        """The tokens of vLLM without a connector."""
        if seed not in self.expected:
            self.expected[seed] = self.peer("plain").generate(prompts(seed, count), length)
        return self.expected[seed]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("vllm")
    with contextlib.ExitStack() as stack:
        yield Stage(directory, stack, stack.enter_context(kvcache(directory)))


def clean(daemon: Service) -> None:
    """Fsck finds nothing, and nothing is held when no request runs."""
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not stub.Fsck(kvcache_pb2.FsckRequest(deep=True)).violations
    until = time.monotonic() + 60
    while any(
        pool.held_pages or pool.quarantined_pages or pool.active_sequences
        for pool in stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
    ):
        assert time.monotonic() < until, stub.GetStats(kvcache_pb2.GetStatsRequest())


def test_tokens_are_those_of_vllm_without_it(stage: Stage) -> None:
    one, right = stage.peer("one"), stage.right(1, 64, 40)
    assert one.generate(prompts(1, 64), 40) == right
    assert one.metric("vllm:num_preemptions_total") > 0
    one.forget()
    before = one.metric(HITS)
    cancels = [nth % 30 if nth % 4 == 0 else None for nth in range(64)]
    for said, whole, cancel in zip(one.generate(prompts(1, 64), 40, cancel_after=cancels), right, cancels, strict=True):
        assert said == whole[: len(said)] and len(said) >= (cancel or 0)
    assert one.metric(HITS) > before
    clean(stage.daemon)


def test_a_second_engine_takes_the_prefixes_of_the_first(stage: Stage) -> None:
    two = stage.peer("two")
    assert two.generate(prompts(1, 64), 40) == stage.right(1, 64, 40)
    assert two.metric(HITS) >= 64 * 32
    # vLLM counts the hits of requests that were preempted elsewhere.
    assert two.metric("vllm:rocmforge_loaded_tokens_total") >= two.metric(HITS)
    assert two.metric("vllm:rocmforge_connected") == 1
    before = two.metric(HITS)
    two.generate(prompts(1, 16), 4, salt="another tenant")
    assert two.metric(HITS) == before
    two.forget(external=True)
    assert two.generate(prompts(1, 16), 4) == [said[:4] for said in stage.right(1, 64, 40)[:16]]
    assert two.metric(HITS) == before
    clean(stage.daemon)


def test_vllm_is_killed_and_the_next_start_is_warm(stage: Stage) -> None:
    one, right = stage.peer("one"), stage.right(3, 16, 60)
    saved = one.metric("vllm:rocmforge_saved_tokens_total")
    one.ask(prompts=prompts(3, 16), max_tokens=60)
    until = time.monotonic() + 60
    while one.metric("vllm:rocmforge_saved_tokens_total") < saved + 1000:
        assert time.monotonic() < until, one.log()
    one.kill()
    del stage.peers["one"]
    clean(stage.daemon)
    again = stage.peer("again")
    assert again.generate(prompts(3, 16), 60) == right
    assert again.metric(HITS) > 500
    clean(stage.daemon)


def test_the_daemon_is_killed_and_comes_back(stage: Stage) -> None:
    again, right = stage.peer("again"), stage.right(4, 16, 60)
    again.forget()
    under_way = again.ask(prompts=prompts(4, 16), max_tokens=60)
    saved = again.metric("vllm:rocmforge_saved_tokens_total")
    until = time.monotonic() + 60
    while again.metric("vllm:rocmforge_saved_tokens_total") < saved + 300:
        assert time.monotonic() < until, again.log()
    stage.daemon.kill()
    assert again.answer(under_way)["tokens"] == right
    again.forget()
    assert again.generate(prompts(4, 16), 60) == right  # without a daemon
    stage.daemon = stage.stack.enter_context(kvcache(stage.directory))
    while again.metric("vllm:rocmforge_connected") != 1:
        assert time.monotonic() < until + 300, again.log()
        again.generate([[1, 2, 3]], 2)
    again.generate(prompts(4, 16), 60)
    again.forget()
    before = again.metric(HITS)
    assert again.generate(prompts(4, 16), 60) == right
    assert again.metric(HITS) > before
    clean(stage.daemon)
