"""The overhead of the daemon's own work per RPC, and the cost per page as the pool grows.

RPCs: each RPC at a given batch size, alternately against the daemon and against a bare gRPC server, also in its own
process, that parses the same request and returns the same response. Pages: the state object alone, full of cached
pages, so that every allocation evicts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from benchmarks.parts.stand import daemon
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common.serving import MAX_MESSAGE_BYTES
from services.kvcache.arena.host import default_directory
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.limits import Limits
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.pool.layout import PageLayout

ROOT = Path(__file__).resolve().parents[1]
PAGE = 16
OPS: dict[str, tuple[type[Message], type[Message]]] = {
    "AllocatePages": (pb.AllocatePagesRequest, pb.AllocatePagesResponse),
    "AppendTokens": (pb.AppendTokensRequest, pb.AppendTokensResponse),
    "RemoveSequences": (pb.RemoveSequencesRequest, pb.RemoveSequencesResponse),
}
BARS = {1: 1.3, 256: 2.0}
FLAT, PAGE_BYTES = 1.5, 400
CHANNEL = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


@dataclasses.dataclass(frozen=True)
class CallRow:
    """Microseconds of a round trip; ``ratio`` of the medians."""

    op: str
    batch: int
    p50_us: float
    p99_us: float
    echo_p50_us: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class PageRow:
    """The cost per page of opening, filling and removing; resident bytes per cached page, including its tokens."""

    pages: int
    us_per_page: float
    bytes_per_page: float


# --- the echo ----------------------------------------------------------------------------------------------------


async def serve_echo(address: str) -> None:
    """Answers each op with the response last sent to ``Prime<op>``."""
    primed: dict[str, Message] = {}
    handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add(name: str, request: type[Message], response: type[Message]) -> None:
        async def echo(message: Any, context: Any) -> Message:
            return primed[name]

        async def prime(message: Any, context: Any) -> Message:
            primed[name] = message
            return message

        handlers[name] = grpc.unary_unary_rpc_method_handler(echo, request.FromString, response.SerializeToString)
        handlers[f"Prime{name}"] = grpc.unary_unary_rpc_method_handler(
            prime, response.FromString, response.SerializeToString
        )

    for name, (request, response) in OPS.items():
        add(name, request, response)
    server = grpc.aio.server(options=CHANNEL)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


class Echo:
    """The echo's client."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._calls = {
            f"{prefix}{name}": channel.unary_unary(
                f"/bench.Echo/{prefix}{name}",
                request_serializer=(response if prefix else request).SerializeToString,
                response_deserializer=response.FromString,
            )
            for name, (request, response) in OPS.items()
            for prefix in ("", "Prime")
        }

    def prime(self, op: str, response: Message) -> None:
        """Set the response to calls of an op."""
        self._calls[f"Prime{op}"](response)

    def call(self, op: str, request: Message) -> None:
        """One round trip."""
        self._calls[op](request)


@contextlib.contextmanager
def servers() -> Iterator[tuple[Any, Echo]]:
    """The daemon's stub and the echo's client; each server is a process."""
    shm = default_directory().parent
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=shm) as name, contextlib.ExitStack() as stack:
        cache, echo = stack.enter_context(daemon()), f"unix:{name}/e.sock"
        command = [sys.executable, "-m", "benchmarks.cache", "--serve-echo", echo]
        other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        stack.callback(stop, other)
        if other.stdout is None or other.stdout.readline() != b"ready\n":
            raise RuntimeError("the echo did not start")
        channels = [stack.enter_context(grpc.insecure_channel(at, options=CHANNEL)) for at in (cache, echo)]
        yield kvcache_pb2_grpc.KvCacheServiceStub(channels[0]), Echo(channels[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a child process."""
    process.terminate()
    process.wait(30)


# --- calls ---------------------------------------------------------------------------------------------------------


class Session:
    """An attached session whose sequences step like an engine's: each reports the token it computed, and grows when the
    next one needs a page. They are staggered, so that in every call one in sixteen completes a page.
    """

    def __init__(self, stub: Any) -> None:
        self.stub = stub
        layout = pb.PageLayout(page_size=PAGE, layers=1, kv_heads=1, head_dim=8, data_type=pb.DATA_TYPE_F16)
        opened = stub.OpenSession(pb.OpenSessionRequest(pool_id="bench", layout=layout, pool_pages=200_000))
        arena = opened.arena
        with open(arena.file_path, "r+b") as file, mmap.mmap(file.fileno(), arena.size_bytes) as memory:
            at = arena.canary_offset
            canary = memory[at : at + 32]
            memory[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
        self.id = opened.session_id
        stub.AttachSession(pb.AttachSessionRequest(session_id=self.id, seen=canary))
        self._numbers = itertools.count()
        self.names: list[str] = []
        self._step = 0

    def open(self, batch: int, pages: int = 0) -> None:
        """Open a new batch of sequences with this many pages each, or as many as their first step needs."""
        number = next(self._numbers)
        self.names = [f"{number}-{at}" for at in range(batch)]
        openings = [
            pb.SequenceOpening(
                sequence_id=name,
                prompt=pb.Prompt(tokens=[number, at]),
                total_pages=pages or (at % PAGE + 1) // PAGE + 1,
            )
            for at, name in enumerate(self.names)
        ]
        demands = [pb.Demand(opening=opening) for opening in openings]
        self.stub.AllocatePages(pb.AllocatePagesRequest(session_id=self.id, demands=demands))
        steps = pb.SequenceSteps(
            sequence_ids=self.names,
            starts=[0] * batch,
            token_counts=[at % PAGE + 1 for at in range(batch)],
            tokens=[token for at in range(batch) for token in (number, *range(at % PAGE))],
        )
        self.stub.AppendTokens(pb.AppendTokensRequest(session_id=self.id, steps=steps))
        self._step = 0

    def remove(self) -> None:
        """Remove the batch and its cached pages, so that the next batch need not evict them."""
        self.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=self.id, sequence_ids=self.names))
        self.stub.EvictPages(pb.EvictPagesRequest(pool_id="bench"))

    def request(self, op: str) -> Message:
        """The next step's request."""
        step, self._step = self._step, self._step + 1
        if op == "RemoveSequences":
            return pb.RemoveSequencesRequest(session_id=self.id, sequence_ids=self.names)
        starts = [step + at % PAGE + 1 for at in range(len(self.names))]
        tokens = [step * 7 + at for at in range(len(self.names))]
        steps = pb.SequenceSteps(sequence_ids=self.names, starts=starts, token_counts=[1] * len(tokens), tokens=tokens)
        if op == "AppendTokens":
            return pb.AppendTokensRequest(session_id=self.id, steps=steps)
        steps.total_pages.extend((start + 1) // PAGE + 1 for start in starts)
        steps.known_pages.extend(start // PAGE + 1 for start in starts)
        return pb.AllocatePagesRequest(session_id=self.id, demands=[pb.Demand(steps=steps)])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns microseconds, and the call's result."""
    began = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - began) / 1e3, result


def measure_call(session: Session, echo: Echo, op: str, batch: int, calls: int) -> CallRow:
    """Alternate the daemon and the echo on the same requests; each goes first equally often."""
    ours, theirs = list[float](), list[float]()

    def their_turn(request: Message) -> None:
        theirs.append(timed(partial(echo.call, op, request))[0])

    steps = 1 if op == "RemoveSequences" else 40
    while len(ours) < calls + 20:
        session.open(batch, 1 + -(-(steps + PAGE) // PAGE) if op == "AppendTokens" else 0)
        for _ in range(steps):
            request, last = session.request(op), len(ours) % 2 == 0
            if not last:
                their_turn(request)
            took, response = timed(partial(getattr(session.stub, op), request))
            ours.append(took)
            if not theirs:
                echo.prime(op, response)
            if last:
                their_turn(request)
        session.remove()
    ours, theirs = ours[20:], theirs[20:]  # the first ones warm up
    p50, echo_p50 = statistics.median(ours), statistics.median(theirs)
    p99 = statistics.quantiles(ours, n=100)[98]
    return CallRow(op, batch, round(p50, 1), round(p99, 1), round(echo_p50, 1), round(p50 / echo_p50, 3))


# --- pages ---------------------------------------------------------------------------------------------------------


class NoArena:
    """An arena whose pages are never accessed."""

    file_path = ""
    device = None
    size_bytes = 0

    def admit(self, owner: str) -> None:
        """Nobody else is here."""

    def dismiss(self, owner: str) -> None:
        """Nobody else is here."""

    def canary_offset(self, slot: int) -> int:
        """Nowhere."""
        return 0

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Keep it, as the engine would answer it."""
        self.answer = bytes(byte ^ 0xFF for byte in canary)

    def read_answer(self, slot: int) -> bytes:
        """What the engine would have written."""
        return self.answer

    def checksums(self, pages: list[int]) -> list[int]:
        """Of no bytes."""
        return [0] * len(pages)

    def zero(self, pages: list[int]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to give back."""


def resident_bytes() -> int:
    """Of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def measure_pages(pages: int) -> PageRow:
    """Fill a pool with cached pages, then time allocations that evict. Run it in its own process."""
    empty = resident_bytes()
    cache = KvCache(
        Limits(budget_bytes=1 << 60, pool_pages=pages, default_ttl_s=600.0),
        epoch=1,
        clock=time.monotonic,
        random_bytes=bytes,
        make_arena=lambda *_: NoArena(),
        observe=lambda process: None,
    )
    layout = PageLayout(page_size=PAGE, layers=1, kv_heads=1, head_dim=8, dtype="f16")
    session = cache.open_session("bench", "bench", layout)
    cache.attach_session(session.id, session.canary)
    numbers, chunk = itertools.count(), 50

    def request() -> None:
        """Open, fill and remove a sequence of ``chunk`` pages."""
        number = next(numbers)
        name, tokens = str(number), array("I", (number & 0xFFFFFFFF, *range(chunk * PAGE - 1)))
        cache.calls.allocate(session.id, [Opening(name, Prompt(tokens[:1]), chunk)], [])
        cache.calls.allocate(session.id, [Steps([name], [0], [len(tokens)], tokens, [0], [chunk])], [])
        cache.calls.remove(session.id, [name])

    def five() -> None:
        """Time enough of them at once for the clock's resolution."""
        for _ in range(5):
            request()

    for _ in range(pages // chunk):
        request()
    [pool] = cache.pools
    if pool.table.cached_count < pages - chunk:
        raise RuntimeError(f"only {pool.table.cached_count} of {pages} pages are cached")
    per_page = (resident_bytes() - empty) / pages
    rounds: list[float] = []
    for _ in range(400):
        rounds.append(timed(five)[0] / (5 * chunk))
    return PageRow(pages, round(statistics.median(rounds), 3), round(per_page, 1))


def plot(rows: list[PageRow], path: Path) -> None:
    """Draw both costs against the pool's size. Needs matplotlib, which is in the extra ``bench``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    sizes = [row.pages for row in rows]
    time_axes.plot(sizes, [row.us_per_page for row in rows], "-o")
    time_axes.set_ylabel("us a page: granted, filled, cached, evicted")
    memory_axes.plot(sizes, [row.bytes_per_page for row in rows], "-o")
    memory_axes.set_ylabel("resident bytes a page")
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("pages in the pool, all of them cached")
        axes.grid(True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# --- both ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Returns the exit status: 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="batch sizes (default 1 64 256)")
    parser.add_argument("--pages", type=int, nargs="*", default=[1000, 100_000, 1_000_000], help="pool sizes")
    parser.add_argument("--calls", type=int, default=400, help="calls that count, each (default 400)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of tables")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the costs of a page too")
    parser.add_argument("--serve-echo", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--one-pool", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve_echo:
        asyncio.run(serve_echo(flags.serve_echo))
        return 0
    if flags.one_pool:
        print(json.dumps(dataclasses.asdict(measure_pages(flags.one_pool))))
        return 0
    missed: list[str] = []
    if not flags.json:
        print(f"{'op':16} {'batch':>5} {'p50 us':>8} {'p99 us':>8} {'echo p50':>9} {'ratio':>6}")
    with servers() as (stub, echo):
        session = Session(stub)
        for op, batch in itertools.product(OPS, flags.batch):
            row = measure_call(session, echo, op, batch, flags.calls)
            if row.ratio > BARS.get(batch, float("inf")):
                missed.append(f"{op} of {batch}: {row.ratio} times the echo, and the bar is {BARS[batch]}")
            text = f"{op:16} {batch:5} {row.p50_us:8.1f} {row.p99_us:8.1f} {row.echo_p50_us:9.1f} {row.ratio:6.3f}"
            print(json.dumps(dataclasses.asdict(row)) if flags.json else text, flush=True)
    costs: list[PageRow] = []
    if flags.pages and not flags.json:
        print(f"\n{'pages':>9} {'us/page':>8} {'bytes/page':>11}")
    for pages in flags.pages:
        # One process each: memory that an earlier pool freed would not be counted.
        command = [sys.executable, "-m", "benchmarks.cache", "--one-pool", str(pages)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        costs.append(PageRow(**json.loads(done.stdout)))
        one = costs[-1]
        text = f"{one.pages:9} {one.us_per_page:8.3f} {one.bytes_per_page:11.1f}"
        print(json.dumps(dataclasses.asdict(one)) if flags.json else text, flush=True)
    if costs and flags.plot is not None:
        plot(costs, flags.plot)
    if costs:
        flat = max(one.us_per_page for one in costs) / min(one.us_per_page for one in costs)
        if flat > FLAT:
            missed.append(f"a page costs {flat:.2f} times as much in one pool as in another, and the bar is {FLAT}")
        missed += [
            f"{one.bytes_per_page} bytes a page of {one.pages}, and the bar is {PAGE_BYTES}"
            for one in costs
            if one.bytes_per_page > PAGE_BYTES
        ]
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
