"""A daemon in this process, over its real socket, with the clock in the test's hands."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.kvcache.config import Config
from services.kvcache.server import Daemon

LAYOUT_PB = pb.PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, data_type=pb.DATA_TYPE_F32)


def attached(stub: kvcache_pb2_grpc.KvCacheServiceStub, pool_id: str = "pool", **fields: Any) -> str:
    """Open a session of eight pages and attach as an engine does; the session id."""
    fields.setdefault("pool_pages", 8)
    fields.setdefault("layout", LAYOUT_PB)
    opened = stub.OpenSession(pb.OpenSessionRequest(pool_id=pool_id, **fields))
    with open(opened.arena.file_path, "r+b") as file, mmap.mmap(file.fileno(), opened.arena.size_bytes) as arena:
        at = opened.arena.canary_offset
        canary = arena[at : at + 32]
        arena[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
    stub.AttachSession(pb.AttachSessionRequest(session_id=opened.session_id, seen=canary))
    return str(opened.session_id)


def myself() -> pb.ProcessIdentity:
    """This process, as an engine names itself."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> pb.ProcessIdentity:
    """A process of this namespace."""
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return pb.ProcessIdentity(pid=pid, start_time=start, pid_namespace=os.readlink("/proc/self/ns/pid"))


class Running:
    """The daemon's loop runs in a thread; ``now`` is its clock; ``options`` are its others: what gives it GPUs."""

    def __init__(self, directory: Path, *flags: str, **options: Any) -> None:
        self.now = 1000.0
        self._options = options
        listen = f"unix:{directory}/k.sock"
        arguments = ["--listen", listen, "--arena-dir", str(directory / "arena"), "--memory", "1MiB", *flags]
        self.config = Config.read(arguments, {})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.daemon = self.call(self._make)
        self.call(self.daemon.start)
        self.channel = grpc.insecure_channel(listen)
        self.stub = kvcache_pb2_grpc.KvCacheServiceStub(self.channel)

    async def _make(self) -> Daemon:
        return Daemon(self.config, clock=lambda: self.now, **self._options)

    def call(self, coroutine: Callable[[], Any]) -> Any:
        """Run on the daemon's loop and wait."""
        return asyncio.run_coroutine_threadsafe(coroutine(), self._loop).result(30)

    def sweep(self) -> None:
        async def body() -> None:
            self.daemon.cache.sweep()

        self.call(body)

    def session(self, pool_id: str = "pool", **fields: Any) -> str:
        """Open and attach as an engine does; the session id."""
        return attached(self.stub, pool_id, **fields)

    def session_ids(self) -> list[str]:
        """The ids of the open sessions, which no call returns."""

        async def body() -> list[str]:
            return [session.id for session in self.daemon.cache._sessions.all()]

        found: list[str] = self.call(body)
        return found

    async def drain(self) -> None:
        self.daemon._servicer.drain()

    def close(self) -> None:
        self.channel.close()

        async def body() -> None:
            await self.daemon.stop(0)

        self.call(body)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A daemon with a budget of 1 MiB."""
    one = Running(tmp_path)
    yield one
    one.close()
