"""A real mover with arenas in files, and what it said."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from services.kvcache.mover.orders import (
    Attached,
    AttachFile,
    Chain,
    Detached,
    Filled,
    Found,
    Health,
    Order,
    OuterTier,
    ReadDone,
    Reply,
    Stored,
)
from services.kvcache.mover.process import Mover

WAIT_S = 40.0
PAGE_BYTES, PAGES = 64 << 10, 32
ARENA, HOST = 1, 2

Kind = TypeVar("Kind", bound=Reply)


def chain_of(at: int) -> Chain:
    parent = hashlib.sha256(b"%d" % (at - 1)).digest()
    return Chain(hashlib.sha256(b"%d" % at).digest(), parent, at.to_bytes(4, "little") * 16)


class Arena:
    """A file of pages, which a test sees by reading it."""

    def __init__(self, path: Path, pages: int = PAGES) -> None:
        self.path = path
        self.path.touch(0o600)
        os.truncate(path, pages * PAGE_BYTES)

    def __getitem__(self, page: int) -> bytes:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), PAGE_BYTES, page * PAGE_BYTES)

    def __setitem__(self, page: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), data, page * PAGE_BYTES)

    def order(self, memory: int) -> AttachFile:
        return AttachFile(memory, str(self.path), PAGE_BYTES, PAGES)


class Rig:
    """``async with`` starts the mover and attaches an arena of random pages, and a host memory of zeros."""

    def __init__(
        self,
        folder: Path,
        outer: OuterTier | None = None,
        staging: int = 64 << 20,
        silence_s: float = 10.0,
        job_s: float = 10.0,
    ) -> None:
        self.arena, self.host = Arena(folder / "pages.arena"), Arena(folder / "host.arena")
        for page in range(PAGES):
            self.arena[page] = os.urandom(PAGE_BYTES)
        self.replies: list[Reply] = []
        self.lost: list[list[int]] = []
        self._changed = asyncio.Event()
        self.mover = Mover(outer, staging, self._replied, self._are_lost, silence_s=silence_s, job_s=job_s)

    async def __aenter__(self) -> Rig:
        await self.mover.start()
        self.mover.attach(self.arena.order(ARENA))
        self.mover.attach(self.host.order(HOST))
        for memory in (ARENA, HOST):
            assert (await self.reply(Attached, memory)).ok
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.mover.close()

    def _replied(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._changed.set()

    def _are_lost(self, jobs: Sequence[int]) -> None:
        self.lost.append(list(jobs))
        self._changed.set()

    async def until(self, done: object) -> None:
        """Wait until ``done()`` is true, looked at whenever the mover has said something, and now and then."""
        assert callable(done)
        async with asyncio.timeout(WAIT_S):
            while not done():
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.05)
                except TimeoutError:
                    continue

    def of(self, kind: type[Kind], number: int) -> list[Kind]:
        """What was said of a job, or of a memory."""
        return [
            reply
            for reply in self.replies
            if isinstance(reply, kind) and number == getattr(reply, "job", getattr(reply, "memory", None))
        ]

    async def reply(self, kind: type[Kind], number: int) -> Kind:
        await self.until(lambda: self.of(kind, number))
        return self.of(kind, number)[-1]

    async def healthy(self) -> None:
        await self.until(lambda: [reply for reply in self.replies if isinstance(reply, Health)][-1:] == [Health(True)])

    async def ready_again(self, restarts: int) -> None:
        """Wait for so many replacements, and for the last to have both memories."""
        await self.until(lambda: self.mover.restarts >= restarts and self.mover.running)
        await self.until(lambda: all(len(self.of(Attached, memory)) > restarts for memory in (ARENA, HOST)))

    async def read(self, order: Order, job: int) -> ReadDone:
        assert self.mover.send(order)
        return await self.reply(ReadDone, job)

    async def filled(self, order: Order, job: int) -> Filled:
        assert self.mover.send(order)
        return await self.reply(Filled, job)

    async def stored(self, order: Order, job: int) -> Stored:
        assert self.mover.send(order)
        return await self.reply(Stored, job)

    async def found(self, order: Order, job: int) -> Found:
        assert self.mover.send(order)
        return await self.reply(Found, job)

    async def detached(self, memory: int) -> None:
        self.mover.detach(memory)
        await self.reply(Detached, memory)
