"""vLLM's scheduler, block pool and model, small enough to run anywhere: they call the connector's halves in the order
that vLLM does.

The model is arithmetic: the K and V of a token depend on all tokens before it, and the next token on every K and V of
the context, read from blocks. So a block that holds anything else changes the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rocmforge.vllm.plan import Plan, Report
from rocmforge.vllm.scheduler import Scheduled, SchedulerHalf
from rocmforge.vllm.worker import WorkerHalf

VOCABULARY = 997
MODULUS = 1 << 20
#: Layers, k and v, heads, dimension: what a page's layout says.
LAYERS, HEADS, DIM = 2, 1, 2


@dataclass(eq=False)
class Block:
    """One block of the pool."""

    block_id: int
    ref_cnt: int = 0
    key: tuple[object, ...] | None = None


class BlockPool:
    """vLLM's pool: reference counts, a queue of free blocks, and a cache of complete ones by their tokens. Block 0 is
    never handed out.
    """

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.blocks[0].ref_cnt = 1
        self._free: OrderedDict[int, Block] = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self._cached: dict[tuple[object, ...], Block] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[Block]:
        """Take the first free ones; what they cached is forgotten."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if block.key is not None:
                self._cached.pop(block.key, None)
                block.key = None
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        """Let go of blocks. Those that cache nothing are reused first."""
        first: list[Block] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                if block.key is None:
                    first.append(block)
                else:
                    self._free[block.block_id] = block
        for block in reversed(first):
            self._free[block.block_id] = block
            self._free.move_to_end(block.block_id, last=False)

    def cache(self, key: tuple[object, ...], block: Block) -> None:
        """Find a complete block by its tokens from now on."""
        if block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def cached(self, key: tuple[object, ...]) -> Block | None:
        """The block of these tokens."""
        return self._cached.get(key)

    def reset(self) -> None:
        """Cache nothing."""
        for block in self._cached.values():
            block.key = None
        self._cached.clear()


@dataclass(eq=False)
class Request:
    """One request."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    salt: str | None = ""
    output: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    loading: bool = False

    @property
    def all_token_ids(self) -> list[int]:
        """The tokens that are known."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return len(self.prompt) + len(self.output)


class Cache:
    """K and V in blocks, ``[block, layer, (k, v), head, slot, dim]``, and the copies to pages of the same units."""

    def __init__(self, count: int, block_size: int, page_size: int) -> None:
        self.rows = np.zeros((count, LAYERS, 2, HEADS, block_size, DIM), np.float32)
        self.block_size, self._page = block_size, page_size
        self._pages: Any = None

    order = "native"

    def attach(self, pages: Any) -> None:
        """Take the pages of a session."""
        self._pages = pages.array.view(np.float32).reshape(-1, LAYERS, 2, HEADS, self._page, DIM)

    def detach(self) -> None:
        """Keep nothing of them."""
        self._pages = None

    def mark(self) -> None:
        """Nothing to wait for."""

    def load(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: None) -> int:
        """Token by token, which is slow and plain."""
        for at in range(start, stop):
            block = blocks[at // self.block_size - start // self.block_size]
            page = self._pages[table[at // self._page], ..., at % self._page, :]
            self.rows[block, ..., at % self.block_size, :] = page
        return stop - start

    def save(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: None) -> int:
        """The other way."""
        for at in range(start, stop):
            block = blocks[at // self.block_size - start // self.block_size]
            row = self.rows[block, ..., at % self.block_size, :]
            self._pages[table[at // self._page], ..., at % self._page, :] = row
        return stop - start

    def write(self, blocks: Sequence[Block], at: int, value: int) -> None:
        """The K and V of the token at a position: V and the second layer differ by one."""
        row = self.rows[blocks[at // self.block_size].block_id, ..., at % self.block_size, :]
        row[0, 0], row[0, 1], row[1] = value, value + 1, value + 2

    def read(self, blocks: Sequence[Block], at: int) -> int:
        """What was written; 0 if K and V, or the layers, do not belong together."""
        row = self.rows[blocks[at // self.block_size].block_id, ..., at % self.block_size, :]
        value = int(row[0, 0, 0, 0])
        whole = np.all(row[0, 0] == value) and np.all(row[0, 1] == value + 1) and np.all(row[1] == value + 2)
        return value if whole else 0


def chained(value: int, token: int) -> int:
    """What stands for the K and V of a token after others."""
    return (value * 1103 + token * 7 + 5) % MODULUS


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says, computed without any cache."""
    tokens, value, total = list(prompt), 0, 0
    for at in range(len(prompt) + count - 1):
        value = chained(value, tokens[at])
        total += value
        if at >= len(prompt) - 1:
            tokens.append(total % VOCABULARY)
    return tokens[len(prompt) :]


class Engine:
    """vLLM's loop around the two halves of a connector; without ``half`` and ``worker``, vLLM without one.

    A step computes ``budget`` tokens at most, for ``most`` requests.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        half: SchedulerHalf | None = None,
        worker: WorkerHalf | None = None,
        budget: int = 64,
        most: int = 8,
    ) -> None:
        self.cache, self.half, self.worker = cache, half, worker
        self.pool = BlockPool(len(cache.rows))
        if half is not None:
            half.bind(self.pool)
        self._size, self._budget, self._most = cache.block_size, budget, most
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: dict[str, Request] = {}
        self._received: set[str] = set()
        self.external = 0  # tokens that the connector brought
        self.failed = 0  # tokens that it failed to bring
        self.preempted = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Cancel it, whatever it is at; nothing if it is over."""
        request = self.requests.get(request_id)
        if request is not None and request_id not in self.done:
            (self.waiting if request in self.waiting else self.running).remove(request)
            self._finish(request)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.requests and not (self.half is not None and self.half.pending)

    def step(self) -> None:
        """Schedule, compute, and take what came of it."""
        step = self._schedule()
        plan = Plan(idle=True) if self.half is None else self.half.plan(step)
        if self.worker is not None:
            self.worker.submit(plan, saves=False)
        sampled = [(self.requests[name], self._compute(self.requests[name], to)) for name, to in step.computed.items()]
        if self.worker is not None and self.half is not None:
            self.worker.submit(plan, saves=True)
            if plan.waits:
                self.worker.wait(0.01)
            self._take(self.worker.collect())
        for request, token in sampled:
            if token is not None:
                request.output.append(token)
                if len(request.output) == request.max_tokens:
                    self.running.remove(request)
                    self._finish(request)

    # --- scheduling -----------------------------------------------------------------------------------------------

    def _schedule(self) -> Scheduled:
        tables: dict[str, list[int]] = {}
        grown: dict[str, list[int]] = {}
        computed: dict[str, int] = {}
        counts: dict[str, int] = {}
        left, preempted = self._budget, False
        for request in list(self.running):
            if request not in self.running:
                continue
            stop = min(request.num_tokens, request.num_computed_tokens + left)
            while (new := self._grow(request, stop)) is None:
                victim = self.running.pop()
                self._free(victim)
                victim.num_computed_tokens = 0
                self.waiting.insert(0, victim)
                self.preempted, preempted = self.preempted + 1, True
                left += counts.pop(victim.request_id, 0)
                computed.pop(victim.request_id, None)
                if victim is request:
                    break
            if new is None:
                break
            grown[request.request_id] = new
            computed[request.request_id] = stop
            counts[request.request_id] = stop - request.num_computed_tokens
            left -= counts[request.request_id]
        if not preempted:
            self._admit(left, tables, computed)
        for name, stop in computed.items():
            self._keep(self.requests[name], stop)
        return Scheduled(tables, {name: new for name, new in grown.items() if name in computed}, computed)

    def _admit(self, left: int, tables: dict[str, list[int]], computed: dict[str, int]) -> None:
        for request in list(self.waiting):
            if len(self.running) == self._most or not left:
                break
            if request.loading and not self._arrived(request):
                continue
            local: list[Block] = []
            external, asynchronous = 0, False
            if not request.num_computed_tokens:
                local = self._hits(request)
                if self.half is not None:
                    found, asynchronous = self.half.matched(request, len(local) * self._size)
                    if found is None:
                        continue
                    external = found
            have = request.num_computed_tokens or len(local) * self._size + external
            stop = have if asynchronous else min(request.num_tokens, have + left)
            self.pool.touch(local)
            request.blocks += local
            # Those that wait for their loads hold blocks: what they lack is kept for them, or they might wait for ever.
            lacking = sum(self._lacking(one) for one in self.waiting if one.blocks or one is request)
            if (asynchronous and lacking > self.pool.free) or self._grow(request, stop) is None:
                if local:
                    self._free(request)
                break
            request.num_computed_tokens = have
            if self.half is not None:
                self.half.allocated(request, [block.block_id for block in request.blocks], external)
            self.external += external
            request.loading = asynchronous
            if not asynchronous:
                self.waiting.remove(request)
                self.running.append(request)
                tables[request.request_id] = [block.block_id for block in request.blocks]
                computed[request.request_id] = stop
                left -= stop - have

    def _lacking(self, request: Request) -> int:
        return max(0, -(-request.num_tokens // self._size) - len(request.blocks))

    def _arrived(self, request: Request) -> bool:
        if request.request_id not in self._received:
            return False
        self._received.remove(request.request_id)
        request.loading = False
        if request.num_computed_tokens:
            self._keep(request, request.num_computed_tokens)
        else:
            self._free(request)
        return True

    def _grow(self, request: Request, tokens: int) -> list[int] | None:
        missing = max(0, -(-tokens // self._size) - len(request.blocks))
        if missing > self.pool.free:
            return None
        new = self.pool.get_new_blocks(missing)
        request.blocks += new
        return [block.block_id for block in new]

    def _free(self, request: Request) -> None:
        self.pool.free_blocks(request.blocks[::-1])
        request.blocks = []

    def _finish(self, request: Request) -> None:
        self.done[request.request_id] = request
        if self.half is not None:
            self.half.finished(request, [block.block_id for block in request.blocks])
        if not request.loading or request.request_id in self._received:
            self._received.discard(request.request_id)
            self._free(request)
            del self.requests[request.request_id]

    def _take(self, report: Report) -> None:
        for request in self.waiting:
            if request.loading:
                for nth, block in enumerate(request.blocks):
                    if block.block_id in report.unloaded:
                        self.failed += request.num_computed_tokens - nth * self._size
                        request.num_computed_tokens = nth * self._size
                        break
        if self.half is not None:
            self.half.report(report)
        for name in report.loaded:
            if name in self.done:
                self._free(self.requests.pop(name))
            else:
                self._received.add(name)

    # --- prefix cache and model -----------------------------------------------------------------------------------

    def _key(self, request: Request, end: int) -> tuple[object, ...]:
        return (request.salt, *request.all_token_ids[:end])

    def _hits(self, request: Request) -> list[Block]:
        found: list[Block] = []
        while (end := (len(found) + 1) * self._size) < request.num_tokens:
            block = self.pool.cached(self._key(request, end))
            if block is None:
                break
            found.append(block)
        return found

    def _keep(self, request: Request, stop: int) -> None:
        for nth in range(stop // self._size):
            self.pool.cache(self._key(request, (nth + 1) * self._size), request.blocks[nth])

    def _compute(self, request: Request, stop: int) -> int | None:
        for at in range(request.num_computed_tokens, stop):
            before = self.cache.read(request.blocks, at - 1) if at else 0
            self.cache.write(request.blocks, at, chained(before, request.all_token_ids[at]))
        request.num_computed_tokens = stop
        if stop < request.num_tokens:
            return None
        return sum(self.cache.read(request.blocks, at) for at in range(stop)) % VOCABULARY
