"""Nodes: a daemon with lower tiers and an engine on it, each a process. Two of them share a redis-server."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests.e2e.conftest import MODEL
from tests.generation import collect, request
from tests.kvcache.outer.servers import RedisServer
from tests.processes import Service, engine, kvcache

PAGE = 16
POOL_PAGES = 192
PATIENCE_S = 60.0
#: Every page is stored, and an engine that does not say how fast it prefills is taken to be slow.
EAGER = ("--tier-admission", "all", "--tier-prefill-speed", "500")
#: Of whole pages and a bit. No two prompts of different seeds share a page.
PROMPT_TOKENS = 56 * PAGE + 5


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Tokens of the bundled model's vocabulary."""
    return [1 + (seed * 7919 + at * at * 31 + at * 17) % 1000 for at in range(tokens)]


@dataclass(frozen=True)
class Served:
    """What a request got."""

    tokens: list[int]
    cached_tokens: int
    first_token_s: float


@dataclass
class Node:
    """A daemon and an engine. The engine can be killed and started again, and so can the daemon."""

    directory: Path
    daemon_flags: tuple[str, ...]
    engine_flags: tuple[str, ...] = ()
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> Node:
        """Start both."""
        self.directory.mkdir(exist_ok=True)
        self.start_daemon()
        self.start_engine()
        return self

    def start_daemon(self) -> None:
        """Start the daemon, where it was before."""
        self.daemon: Service = self._stack.enter_context(
            kvcache(self.directory, "--memory", "64MiB", *self.daemon_flags, *(EAGER if self.daemon_flags else ()))
        )
        until(lambda: all(tier.available for tier in self.stats().tiers), "a tier is not available")

    def start_engine(self) -> None:
        """Start an engine."""
        # Steps too small to be measured, and slow: fetching pays, however busy the machine.
        shape = ("--max-batch", "8", "--max-step-tokens", "32")
        flags = ("--pool-pages", str(POOL_PAGES), *shape, *self.engine_flags)
        self.engine: Service = self._stack.enter_context(
            engine(self.directory, self.daemon.address, *flags, model=MODEL)
        )

    def close(self) -> None:
        """End both."""
        self._stack.close()

    @property
    def cache(self) -> Any:
        return kvcache_pb2_grpc.KvCacheServiceStub(self.daemon.channel)

    @property
    def stub(self) -> Any:
        return engine_pb2_grpc.EngineServiceStub(self.engine.channel)

    def generate(self, tokens: list[int], max_tokens: int = 8, **fields: Any) -> Served:
        """Generate, greedily."""
        _, generated, finish = collect(self.stub.Generate(request(tokens, max_tokens, **fields), timeout=PATIENCE_S))
        usage = finish.usage
        return Served(generated, usage.cached_tokens, usage.time_to_first_token.ToNanoseconds() / 1e9)

    def stats(self) -> pb.GetStatsResponse:
        stats: pb.GetStatsResponse = self.cache.GetStats(pb.GetStatsRequest())
        return stats

    def tier(self, tier: pb.Tier) -> pb.TierStats:
        [found] = [one for one in self.stats().tiers if one.tier == tier]
        return found

    def until_moved(self) -> None:
        """Wait until nothing is queued or on its way between tiers."""
        until(lambda: not (self.stats().mover.queued_pages or self.stats().mover.moving_pages), "pages still move")

    def until_stored(self, tier: pb.Tier, pages: int) -> None:
        """Wait until so many pages were stored in a tier since its start."""
        until(lambda: self.tier(tier).stored_pages >= pages, f"{pages} pages are not stored in time")
        self.until_moved()

    def evict(self) -> None:
        """Take everything cached out of the pool."""
        [pool] = self.stats().pools
        self.cache.EvictPages(pb.EvictPagesRequest(pool_id=pool.pool_id, include_retained=True))
        [pool] = self.stats().pools
        assert pool.cached_pages == 0

    def tiers_of(self, tokens: list[int], salt: str = "") -> list[pb.Tier]:
        """The tier of each page of a prompt."""
        [pool] = self.stats().pools
        asked = pb.ExplainPrefixRequest(pool_id=pool.pool_id, prompt=tokens, salt=salt)
        return [page.tier for page in self.cache.ExplainPrefix(asked).pages]

    def mover(self) -> int:
        """The pid of the mover."""
        pid: int = until(lambda: mover_of(self.daemon.pid), "there is no mover")
        return pid

    def until_awaited(self, waited_openings: int) -> None:
        """Wait until one more opening waits for the mover."""
        until(lambda: self.stats().mover.waited_openings > waited_openings, "nobody waits for the mover")

    def until_restarted(self, restarts: int) -> None:
        """Wait until a mover runs after one more restart."""
        until(lambda: self.stats().mover.restarts > restarts and self.stats().mover.running, "no mover comes after it")

    def assert_clean(self) -> None:
        """Nothing is held, filling or lost, and nothing is violated."""

        def settled() -> bool:
            [pool] = self.stats().pools
            return not (pool.held_pages or pool.filling_pages or pool.quarantined_pages or pool.active_sequences)

        until(settled, "pages stay held, filling or quarantined")
        [pool] = self.stats().pools
        assert pool.free_pages + pool.cached_pages == pool.total_pages
        assert not self.cache.Fsck(pb.FsckRequest(deep=True)).violations


def mover_of(daemon: int) -> int | None:
    """The pid of a daemon's mover, None while there is none."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == daemon and b"services.kvcache.mover" in Path(f"/proc/{name}/cmdline").read_bytes():
                return int(name)
    return None


def until_gone(pid: int) -> None:
    """Wait for the end of a process that is not a child."""
    until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} lives on")


def until(found: Callable[[], Any], otherwise: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait until something is true; returns it."""
    deadline, pause = time.monotonic() + patience_s, threading.Event()
    while not (value := found()):
        assert time.monotonic() < deadline, otherwise
        pause.wait(0.01)
    return value


@contextlib.contextmanager
def node(directory: Path, *daemon_flags: str, engine_flags: tuple[str, ...] = ()) -> Iterator[Node]:
    """A node that serves."""
    one = Node(directory, daemon_flags, engine_flags)
    try:
        yield one.start()
    finally:
        one.close()


@contextlib.contextmanager
def redis(directory: Path, *arguments: str) -> Iterator[RedisServer]:
    """A redis-server."""
    server = RedisServer(directory / "redis", *arguments)
    try:
        yield server
    finally:
        server.kill()


def key_file(directory: Path, name: str = "key", byte: str = "5a") -> Path:
    """A key for the outer tier."""
    path = directory / name
    path.write_text(byte * 32 + "\n")
    path.chmod(0o600)
    return path


def outer(server: RedisServer, key: Path) -> tuple[str, ...]:
    """The flags of a daemon on a server."""
    return ("--outer", f"valkey://127.0.0.1:{server.port}", "--outer-key", str(key))
