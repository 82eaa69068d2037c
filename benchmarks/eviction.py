"""Replay a request trace through the daemon's state object: the hit rate by eviction policy and pool size.

    python -m benchmarks.eviction --trace FILE --pages 1000,3000 --policy lru,density --json
    python -m benchmarks.eviction --agents 12000 --block-tokens 2048 --pages 300,500,1000,2000

A trace is a JSON Lines file, one request per line, with ``hash_ids``: the ids of the request's blocks, each of which
identifies the block's content and everything before it (the format of the Mooncake traces: Qin et al., FAST 2025). One
block is one page. A request opens a sequence, which matches the longest cached prefix, allocates and records the
remaining blocks, and is removed. Requests run one after another. The hit rate is matched blocks over all blocks. If a
request has more blocks than the pool, the first ones that fit are replayed and the others count as misses.

``--agents N`` replays N calls of agentic traffic instead (`benchmarks.parts.agents`). Its callers say what they know of
when they return, in so far as they are ``--right``: the policy ``hinted`` is ``density`` with these hints. A trace has
none.

Two further policies are computed here as bounds: ``belady`` evicts the block whose next use is furthest away (Belady,
1966), at a tie the deeper block; ``unbounded`` never evicts.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.parts.agents import Agents, hints
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.limits import Limits
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.hints import ReuseHint
from services.kvcache.eviction.policy import POLICIES
from services.kvcache.pool.budget import CANARY_BYTES
from services.kvcache.pool.layout import Layout, PageLayout

Trace = list[list[int]]
Hints = Sequence[ReuseHint | None] | None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. ``seconds`` is the time the whole replay took."""

    policy: str
    pages: int
    hit_rate: float
    seconds: float


def read_trace(path: Path) -> Trace:
    """The blocks of each request. Raises ValueError naming the line that is not a request."""
    trace: Trace = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                blocks = json.loads(line)["hash_ids"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: expected a JSON object with hash_ids") from error
            if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
                raise ValueError(f"{path}:{number}: hash_ids is not a list of integers")
            trace.append(blocks)
    return trace


class _NoArena:
    """An arena without memory: only decisions are replayed, and no page is ever written."""

    file_path = ""
    device = None

    def __init__(self, layout: Layout, pages: int, slots: int, device: int | None) -> None:
        self.size_bytes = pages * layout.page_bytes
        self._canary = b""

    def admit(self, owner: str) -> None:
        """Nobody else is here."""

    def dismiss(self, owner: str) -> None:
        """Nobody else is here."""

    def canary_offset(self, slot: int) -> int:
        """Overrides."""
        return 0

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Overrides."""
        self._canary = canary

    def read_answer(self, slot: int) -> bytes:
        """Overrides; pretends that the engine saw every canary."""
        return bytes(byte ^ 0xFF for byte in self._canary)

    def checksums(self, pages: list[int]) -> list[int]:
        """Of no bytes."""
        return [0] * len(pages)

    def zero(self, pages: list[int]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Overrides."""


def replay(trace: Trace, pages: int, policy: str, said: Hints = None) -> int:
    """Blocks that hit, through the state object."""
    return sum(hits(trace, pages, policy))


def hinted(trace: Trace, pages: int, policy: str, said: Hints = None) -> int:
    """Blocks that hit when callers say what they know."""
    return sum(hits(trace, pages, "density", said))


def hits(trace: Trace, pages: int, policy: str, said: Hints = None) -> Iterator[int]:
    """Blocks of each request that hit, through the state object. ``said`` has what each caller says of its return."""
    # A page holds one token, the block's id renumbered: the trace's ids may be of any size.
    layout = PageLayout(page_size=1, layers=1, kv_heads=1, head_dim=1, dtype="f32")
    cache = KvCache(
        Limits(budget_bytes=1 << 62, eviction=policy),
        epoch=1,
        clock=lambda: 0.0,
        random_bytes=bytes,
        make_arena=_NoArena,
        observe=lambda process: None,
    )
    session = cache.open_session("replay", "trace", layout, pool_pages=pages)
    cache.attach_session(session.id, bytes(CANARY_BYTES))
    tokens: dict[int, int] = {}
    for number, request in enumerate(trace):
        blocks = [tokens.setdefault(block, len(tokens)) for block in request[:pages]]
        name = str(number)
        # One more token, because a prompt's last token is never matched.
        prompt = array("I", (*blocks, 0))
        opening = Opening(name, Prompt(prompt, reuse_hint=None if said is None else said[number]), len(blocks))
        [(_, grant)], _ = cache.calls.allocate(session.id, [opening], [])
        if not isinstance(grant, Grant):
            raise grant
        computed = prompt[grant.cached_tokens : -1]
        cache.calls.append(session.id, Steps([name], [grant.cached_tokens], [len(computed)], computed, [], []))
        cache.calls.remove(session.id, [name])
        yield grant.cached_tokens


def unbounded(trace: Trace, pages: int, policy: str, said: Hints = None) -> int:
    """Blocks that hit when nothing is ever evicted; ``pages`` does not matter."""
    seen: set[int] = set()
    hits = 0
    for request in trace:
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, request))
        seen.update(request)
    return hits


def belady(trace: Trace, pages: int, policy: str, said: Hints = None) -> int:
    """Blocks that hit with knowledge of the future."""
    never = len(trace)
    upcoming: list[list[int]] = []
    seen_at: dict[int, int] = {}
    for number in range(len(trace) - 1, -1, -1):
        upcoming.append([seen_at.get(block, never) for block in trace[number]])
        seen_at.update(dict.fromkeys(trace[number], number))
    upcoming.reverse()

    # The next use of each cached block. The heap may also hold outdated entries, which are ignored.
    cached: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for request, following in zip(trace, upcoming, strict=True):
        blocks = request[:pages]
        matched = sum(1 for _ in itertools.takewhile(cached.__contains__, blocks))
        hits += matched
        for block in blocks[:matched]:
            del cached[block]  # held by the current request
        while len(cached) + len(blocks) > pages:
            use, _, block = heapq.heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
        for depth, (block, use) in enumerate(zip(blocks, following, strict=False)):
            cached[block] = use
            heapq.heappush(heap, (-use, -depth, block))
    return hits


POLICY: dict[str, Callable[[Trace, int, str, Hints], int]] = {
    **dict.fromkeys(POLICIES, replay),
    "hinted": hinted,
    "belady": belady,
    "unbounded": unbounded,
}


def measure(trace: Trace, pages: list[int], policies: list[str], said: Hints = None) -> list[Row]:
    """A row for each policy and size."""
    blocks = sum(map(len, trace))
    rows = []
    for policy, size in itertools.product(policies, pages):
        started = time.perf_counter()
        hits = POLICY[policy](trace, size, policy, said)
        rows.append(Row(policy, size, hits / blocks if blocks else 0.0, time.perf_counter() - started))
    return rows


def table(rows: list[Row]) -> str:
    """Rows of text: a line for each size, a column for each policy."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    rates = {(row.policy, row.pages): row.hit_rate for row in rows}
    lines = [f"{'pages':>8}" + "".join(f"{policy:>11}" for policy in policies)]
    for size in dict.fromkeys(row.pages for row in rows):
        lines.append(f"{size:8}" + "".join(f"{rates[policy, size]:11.4f}" for policy in policies))
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Draw hit rate against size. Needs matplotlib, which is in the extra ``bench``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for policy in dict.fromkeys(row.policy for row in rows):
        of_policy = [row for row in rows if row.policy == policy]
        style = "-o" if POLICY[policy] in (replay, hinted) else "--"
        axes.plot([row.pages for row in of_policy], [row.hit_rate for row in of_policy], style, label=policy)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pages in the pool")
    axes.set_ylabel("blocks that hit")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=(__doc__ or "").split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="requests, one JSON object a line")
    source.add_argument("--agents", type=int, metavar="N", help="N calls of agentic traffic")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of agentic traffic (%(default)s)")
    parser.add_argument("--block-tokens", type=int, default=512, metavar="N", help="its tokens a block (%(default)s)")
    parser.add_argument(
        "--right", type=float, default=1.0, metavar="SHARE", help="how often its callers are right (%(default)s)"
    )
    parser.add_argument("--no-estimates", action="store_true", help="its callers do not estimate when they return")
    parser.add_argument("--pages", default="1000,3000,10000,30000,100000", metavar="N,N", help="sizes (%(default)s)")
    parser.add_argument("--policy", default=",".join(POLICY), metavar="P,P", help="policies (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON array of rows")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows too")
    options = parser.parse_args(arguments)
    try:
        pages = [int(text) for text in options.pages.split(",")]
    except ValueError:
        parser.error(f"--pages {options.pages}: expected integers, separated by commas")
    if min(pages) < 1:
        parser.error(f"--pages {options.pages}: expected at least 1")
    policies = options.policy.split(",")
    if unknown := [policy for policy in policies if policy not in POLICY]:
        parser.error(f"--policy {unknown[0]}: expected some of {', '.join(POLICY)}")
    said: Hints = None
    if options.agents is None:
        try:
            trace = read_trace(options.trace)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    else:
        if options.agents < 1 or options.block_tokens < 1 or not 0 <= options.right <= 1:
            parser.error("--agents and --block-tokens: expected at least 1; --right: expected 0 to 1")
        calls = Agents(options.seed, options.block_tokens).calls(options.agents)
        trace = [call.blocks for call in calls]
        said = hints(calls, options.seed, options.right, not options.no_estimates)
    rows = measure(trace, pages, policies, said)
    if options.plot is not None:
        plot(rows, options.plot)
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
