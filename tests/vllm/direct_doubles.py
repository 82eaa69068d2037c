"""vLLM's scheduler around `BlockTables`, with the arithmetic model of `doubles`.

It asks for blocks, preempts, and drops what a step computed whose blocks were invalid, in the order that vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rocmforge.client import KvCache, OpaqueLayout
from rocmforge.vllm.direct.link import Link
from rocmforge.vllm.direct.tables import BlockTables
from rocmforge.vllm.direct.window import Window
from tests.vllm import doubles

SIZE = 8
PAGE_BYTES = doubles.LAYERS * 2 * doubles.HEADS * SIZE * doubles.DIM * 4


@dataclass(eq=False)
class Request(doubles.Request):
    """One request, with a chain of hashes as vLLM has."""

    table: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def block_hashes(self) -> Sequence[Any]:
        """Of whole blocks."""
        tokens = self.all_token_ids
        return [(self.salt, *tokens[: at + SIZE]) for at in range(0, len(tokens) - SIZE + 1, SIZE)]


class Memory(doubles.Cache):
    """K and V in a window's blocks."""

    def __init__(self) -> None:
        self.block_size = SIZE
        self.window: Window | None = None

    def attach(self, pages: Any) -> None:
        """Have the pages of a session there."""
        if self.window is None or self.window.pages != pages.total_pages:
            self.window = Window(pages.total_pages, PAGE_BYTES)
            shape = (-1, doubles.LAYERS, 2, doubles.HEADS, SIZE, doubles.DIM)
            self.rows = self.window.blocks.reshape(-1).view(np.float32).reshape(shape)
        self.window.attach(pages.array)

    def detach(self) -> None:
        """Have private memory there."""
        if self.window is not None:
            self.window.detach()


class Engine:
    """One engine with a session. ``between`` is called when a step is scheduled and not computed yet."""

    def __init__(self, session: KvCache, *, budget: int = 64, most: int = 8, longest: int = 512) -> None:
        self.memory, self.link = Memory(), Link(session)
        self.tables = BlockTables(
            self.link,
            self.memory,
            page_size=SIZE,
            most_tokens=longest,
            most_running=most,
            salt_of=lambda request: request.salt,
        )
        self.tables.start()
        self._budget, self._most = budget, most
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: dict[str, Request] = {}
        self.hits = self.preempted = self.steps = self.dropped = self.calls = self.waits = 0
        self.between: Callable[[], None] = lambda: None
        send, receive = self.link.send, self.link.receive

        def counted(demands: Any, removed: Any) -> None:
            self.calls += 1
            send(demands, removed)

        def received(*, wait: bool) -> Any:
            self.waits += wait
            return receive(wait=wait)

        self.link.send, self.link.receive = counted, received  # type: ignore[method-assign]

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)
        self.tables.add(request)

    def abort(self, request_id: str) -> None:
        """Cancel it; nothing if it is over."""
        for queue in (self.waiting, self.running):
            for request in [one for one in queue if one.request_id == request_id]:
                queue.remove(request)
                self._finish(request)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.running or self.tables.pending)

    def step(self) -> None:
        """Schedule, compute, and take what came of it."""
        self.steps += 1
        self.tables.begin()
        step = self._schedule()
        self.tables.flush()
        self.between()
        if step:
            self.tables.fence()
        sampled = [(request, self._compute(request, start, stop)) for request, start, stop in step]
        if step and self.tables.fence():
            self.dropped += sum(1 for _, start, _ in step if start)
            sampled = [(one, token) for (one, token), (_, start, _) in zip(sampled, step, strict=True) if not start]
            for request in self.running:
                if request not in [one for one, _ in sampled]:
                    request.num_computed_tokens = 0
        elif not step and self.tables.unanswered:
            self.tables.wait(0.01)
        for request, token in sampled:
            if token is not None:
                request.output.append(token)
                if len(request.output) == request.max_tokens:
                    self.running.remove(request)
                    self._finish(request)

    def close(self) -> None:
        """End the session."""
        self.tables.close()

    def _schedule(self) -> list[tuple[Request, int, int]]:
        step: list[tuple[Request, int, int]] = []
        left, preempted = self._budget, False
        for request in list(self.running):
            if request not in self.running:
                continue
            stop = min(request.num_tokens, request.num_computed_tokens + left)
            while self.tables.lacking(request.request_id, stop):
                victim = self.running.pop()
                self._free(victim)
                victim.num_computed_tokens = 0
                self.waiting.insert(0, victim)
                self.preempted, preempted = self.preempted + 1, True
                step = [one for one in step if one[0] is not victim]
                if victim is request:
                    break
            if request not in self.running:
                break
            self._take(request, stop)
            step.append((request, request.num_computed_tokens, stop))
            left -= stop - request.num_computed_tokens
        if not preempted:
            self._admit(step, left)
        for request, _, stop in step:
            assert stop <= len(request.table) * SIZE
        return step

    def _admit(self, step: list[tuple[Request, int, int]], left: int) -> None:
        for request in list(self.waiting):
            if len(self.running) == self._most or not left:
                break
            found = self.tables.matched(request)
            if found is None:
                continue
            stop = min(request.num_tokens, found + left)
            if self.tables.lacking(request.request_id, request.num_tokens):
                break
            self._take(request, found)
            self._take(request, stop)
            self.hits += found
            request.num_computed_tokens = found
            self.waiting.remove(request)
            self.running.append(request)
            step.append((request, found, stop))
            left -= stop - found

    def _take(self, request: Request, tokens: int) -> None:
        request.table += self.tables.take(request.request_id, tokens)

    def _compute(self, request: Request, start: int, stop: int) -> int | None:
        request.num_computed_tokens = stop
        blocks, tokens = [doubles.Block(page + 1) for page in request.table], request.all_token_ids
        for at in range(start, stop):
            before = self.memory.read(blocks, at - 1) if at else 0
            self.memory.write(blocks, at, doubles.chained(before, tokens[at]))
        if stop < request.num_tokens:
            return None
        return sum(self.memory.read(blocks, at) for at in range(stop)) % doubles.VOCABULARY

    def _free(self, request: Request) -> None:
        self.tables.free(request.request_id)
        request.table = []

    def _finish(self, request: Request) -> None:
        self.done[request.request_id] = request
        self._free(request)


def engine(address: str, *, pool_pages: int = 256, ttl_s: float = 10, pool_id: str = "direct", **more: Any) -> Engine:
    """An engine on a daemon's pool."""
    layout = OpaqueLayout(SIZE, "doubles", PAGE_BYTES)
    return Engine(KvCache(address, pool_id, layout, pool_pages=pool_pages, ttl_s=ttl_s), **more)
