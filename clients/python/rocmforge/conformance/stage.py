"""Where a law is tried: a pool of its own, a proxy before the daemon, the client, and a session that looks on."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from rocmforge.client import ClientTls, Demand, DevicePages, KvCache, OpaqueLayout
from rocmforge.client.errors import KvCacheDown
from rocmforge.client.transport.channel import channel_to
from rocmforge.conformance.proxy import Proxy
from rocmforge.conformance.subject import Failed, Refused, Subject
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc

LAYOUT = OpaqueLayout(page_size=4, label="conformance", page_bytes=64)
SLOT_BYTES = LAYOUT.page_bytes // LAYOUT.page_size
POOL_PAGES = 12
#: Of a prompt of one whole page and a half.
PROMPT = [11, 12, 13, 14, 15, 16]
TTL_S = 600.0
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon: its address, what it is called with over TCP, and the ordinal of the GPU that has the pages."""

    address: str
    tls: ClientTls | None = None
    gpu: int | None = None

    def channel(self) -> grpc.Channel:
        """A channel to it."""
        return channel_to(self.address, self.tls)


class Stage:
    """``client`` is the one under test; it calls through ``proxy``, and ``watcher`` does not."""

    def __init__(self, daemon: Daemon, client: Subject, proxy: Proxy, watcher: KvCache, folder: Path) -> None:
        self.client, self.proxy, self.watcher, self.folder = client, proxy, watcher, folder
        self.daemon = daemon

    def open(self, ttl_s: float = TTL_S) -> None:
        """Have the client open its session."""
        values = {"page_size": LAYOUT.page_size, "label": LAYOUT.label, "page_bytes": LAYOUT.page_bytes}
        pool = {"pool_id": self.watcher.pool_id, "pool_pages": POOL_PAGES}
        where = {"address": self.proxy.address} | ({} if self.daemon.gpu is None else {"gpu": self.daemon.gpu})
        opened = self.client.do("open", **where, **pool, **values, ttl_s=ttl_s)
        self.check(opened.get("total_pages") == POOL_PAGES, f"it reports a pool of {opened.get('total_pages')} pages")

    def begin(self, name: str, pages: int, prompt: Sequence[int] = PROMPT) -> list[int]:
        """Have the client begin a sequence; returns its block table."""
        return self.table(self.again("begin", sequence=name, prompt=list(prompt), pages=pages), pages)

    def step(self, name: str, tokens: Sequence[int], pages: int) -> list[int]:
        """Have the client report tokens of a sequence and grow; returns the block table."""
        one = {"sequence": name, "tokens": list(tokens), "pages": pages}
        [result] = self.again("step", steps=[one])["results"]
        if "error" in result:
            raise Refused("step", str(result["error"]), str(result.get("message", "")))
        return self.table(result, pages)

    def again(self, command: str, **values: Any) -> dict[str, Any]:
        """Have the client do something; it may say once that nobody answers."""
        try:
            return self.client.do(command, **values)
        except Refused as refused:
            if refused.reason != KvCacheDown.reason:
                raise
        return self.client.do(command, **values)

    def table(self, answer: dict[str, Any], pages: int) -> list[int]:
        """The block table of an answer, which has to have so many pages."""
        table = answer.get("table")
        valid = isinstance(table, list) and all(isinstance(page, int) and 0 <= page < POOL_PAGES for page in table)
        self.check(valid and len(table or ()) == pages, f"its block table is {table}; {pages} pages were asked for")
        return list(table or ())

    def write(self, name: str, positions: range, byte: int) -> None:
        """Have the client write its K and V: ``byte`` for the first position, one more for each after it."""
        for at, position in enumerate(positions):
            self.client.do("write", sequence=name, position=position, byte=byte + at)

    def refused(self, command: str, **values: Any) -> str:
        """The reason for which the client refuses something; it has to."""
        try:
            self.client.do(command, **values)
        except Refused as refused:
            return refused.reason
        raise Failed(f"{command} {values} was done")

    def bytes_at(self, page: int, slot: int) -> set[int]:
        """The values of the bytes of a token's K and V."""
        return set(self.arena()[page, slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].tolist())

    def arena(self) -> NDArray[np.uint8]:
        """The bytes of all pages, as they are now."""
        pages: Any = self.watcher.pages.array
        copied: NDArray[np.uint8] = pages.copy() if self.daemon.gpu is None else pages.get()
        return copied

    def gpu_copy(self, size: int) -> bytes:
        """Copy the arena on its GPU; returns the IPC handle of the copy, which lasts as long as this process."""
        pages = self.watcher.pages
        if not isinstance(pages, DevicePages):
            raise Failed("the pages are not on a GPU")
        copy = pages.gpu.allocate(size)
        pages.gpu.write(copy, pages.gpu.read(pages.pointer, size))
        return pages.gpu.export(copy)

    def cached(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt somebody else would find cached."""
        name = secrets.token_hex(4)
        [grant] = self.watcher.step([Demand.of_prompt(name, prompt, 0)])
        self.watcher.step([], removed=[name])
        return grant.cached_tokens

    def take_all(self) -> None:
        """Have another client get every page, while none is held, and fill them."""
        [grant] = self.watcher.step([Demand.of_prompt("all", [0], POOL_PAGES)])
        self.check(grant.error is None, f"not all pages are free: {grant.error}")
        pages = self.watcher.pages.array
        for page in grant.pages:
            pages[page] = 0xEE

    def give_back(self) -> None:
        """Have it give them back."""
        self.watcher.step([], removed=["all"])

    def pool(self) -> pb.PoolStats:
        """The pool's counts."""
        with self.daemon.channel() as channel:
            return _pool(kvcache_pb2_grpc.KvCacheServiceStub(channel), self.watcher.pool_id)

    def until(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            self.check(time.monotonic() < deadline, otherwise)
            time.sleep(0.02)

    @staticmethod
    def check(holds: bool, otherwise: str) -> None:
        """Raise Failed unless something is so."""
        if not holds:
            raise Failed(otherwise)


@contextlib.contextmanager
def stage(daemon: Daemon, command: Sequence[str]) -> Iterator[Stage]:
    """Set one up, and take it down. Raises Failed when the client cannot be started."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        pool_id = f"conformance-{secrets.token_hex(6)}"
        watcher = KvCache.connect(
            daemon.address,
            pool_id,
            LAYOUT,
            pool_pages=POOL_PAGES,
            client_name="conformance suite",
            tls=daemon.tls,
            gpu=daemon.gpu,
        )
        stack.callback(_drop, daemon, pool_id)
        stack.callback(watcher.close)
        proxy = Proxy(f"unix:{folder}/proxy.sock", daemon.channel())
        stack.callback(proxy.close)
        client = Subject(command)
        stack.callback(client.end)
        yield Stage(daemon, client, proxy, watcher, folder)


def _pool(stub: kvcache_pb2_grpc.KvCacheServiceStub, pool_id: str) -> pb.PoolStats:
    """The counts of the pool that was asked for as ``pool_id``; the daemon may append to that."""
    return next(pool for pool in stub.GetStats(pb.GetStatsRequest()).pools if pool.pool_id.startswith(pool_id))


def _drop(daemon: Daemon, pool_id: str) -> None:
    """Give the pool's memory back, if this caller may; otherwise it is evicted when it is needed."""
    with daemon.channel() as channel, contextlib.suppress(grpc.RpcError, StopIteration):
        stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        stub.DropPool(pb.DropPoolRequest(pool_id=_pool(stub, pool_id).pool_id))
