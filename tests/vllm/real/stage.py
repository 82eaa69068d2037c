"""What tests with the real vLLM share: a daemon, engines by name, and the tokens of an engine without either."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from tests.processes import Service, kvcache
from tests.vllm.real.peers import Peer

VOCABULARY = 1024
HITS = "vllm:external_prefix_cache_hits_total"
#: The blocks of the engine without a connector: as many as all requests of a test need, so it does not preempt.
PLAIN_BLOCKS = 512


def tokens(draw: random.Random, count: int) -> list[int]:
    """Tokens of the bundled model, at random."""
    return [draw.randrange(1, VOCABULARY) for _ in range(count)]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of 20 to 300 tokens, most of which begin like others."""
    draw = random.Random(seed)
    roots = [tokens(draw, length) for length in (0, 64, 130, 220)]
    return [draw.choice(roots) + tokens(draw, draw.randint(20, 80)) for _ in range(count)]


@dataclass
class Stage:
    """The daemon now running and the engines, by name. Starting a vLLM takes longest, so each serves several tests.

    ``extra`` is the connector's configuration, ``options`` are vLLM's, and ``connected`` those with a connector alone.
    """

    directory: Path
    stack: contextlib.ExitStack
    daemon: Service
    extra: dict[str, Any]
    connected: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    peers: dict[str, Peer] = field(default_factory=dict)
    expected: dict[int, list[list[int]]] = field(default_factory=dict)

    def start(self, name: str) -> Peer:
        """The engine of that name, which may not serve yet; ``plain`` has no connector."""
        if name not in self.peers:
            plain = name == "plain"
            made = Peer(
                self.directory,
                name,
                "" if plain else self.daemon.address,
                extra={"ttl_s": 3, **self.extra},
                alone=self.alone,
                **{**self.options, **({"num_gpu_blocks_override": PLAIN_BLOCKS} if plain else self.connected)},
            )
            self.stack.callback(made.close)
            self.peers[name] = made
        return self.peers[name]

    def peer(self, name: str) -> Peer:
        """The same, serving."""
        return self.start(name).wait_ready()

    def right(self, seed: int, count: int, length: int) -> list[list[int]]:
        """The tokens of vLLM without a connector."""
        if seed not in self.expected:
            self.expected[seed] = self.peer("plain").generate(prompts(seed, count), length)
        return self.expected[seed]

    def restart_daemon(self) -> None:
        """Another daemon at the same address."""
        self.daemon = self.stack.enter_context(kvcache(self.directory))

    @property
    def stub(self) -> kvcache_pb2_grpc.KvCacheServiceStub:
        """The daemon's calls."""
        return kvcache_pb2_grpc.KvCacheServiceStub(self.daemon.channel)

    def stats(self) -> kvcache_pb2.GetStatsResponse:
        """The daemon's counts."""
        return self.stub.GetStats(kvcache_pb2.GetStatsRequest())

    def check_clean(self) -> None:
        """Fsck finds nothing, and nothing is held once no request runs."""
        assert not self.stub.Fsck(kvcache_pb2.FsckRequest(deep=True)).violations
        until = time.monotonic() + 60
        while any(pool.held_pages or pool.quarantined_pages or pool.active_sequences for pool in self.stats().pools):
            assert time.monotonic() < until, self.stats()


@contextlib.contextmanager
def staged(
    directory: Path,
    extra: dict[str, Any],
    connected: dict[str, Any],
    *,
    options: dict[str, Any] | None = None,
    alone: bool = False,
) -> Iterator[Stage]:
    """A stage with a daemon and no engine yet."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(kvcache(directory))
        yield Stage(directory, stack, daemon, extra, connected, options or {}, alone)
