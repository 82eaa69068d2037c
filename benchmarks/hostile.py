"""What the others notice while one caller does its worst against a daemon.

For each trick: a daemon of its own with its default limits, a hostile process that repeats the trick as fast as it can,
and a well-behaved client that asks Health and steps a batch of its own. Printed are their latencies, the daemon's peak
of resident memory, and how long the daemon itself says that its loop was held.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import mmap
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.parts.stand import ROOT, process
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.kvcache.arena.host import default_directory

#: What a hostile client sends may be as large as it likes.
CHANNEL = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SERVICE = "/rocmforge.kvcache.v1.KvCacheService"

#: The bar: milliseconds of Health, 99 of 100.
HEALTH_P99_MS = 50.0

#: Four bytes a page: a million of them take less memory than one picture.
TINY = pb.PageLayout(page_size=1, layers=1, kv_heads=1, head_dim=1, data_type=pb.DATA_TYPE_F16)
SMALL = pb.PageLayout(page_size=16, layers=1, kv_heads=1, head_dim=8, data_type=pb.DATA_TYPE_F16)
MIB = 1 << 20


class Caller:
    """A client with its calls. Refusals are answers, and counted."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=CHANNEL)
        self.stub = kvcache_pb2_grpc.KvCacheServiceStub(self.channel)
        self.refused: dict[str, int] = {}

    def call(self, name: str, **fields: Any) -> Any:
        """The reply; None when refused."""
        return self.attempt(lambda: getattr(self.stub, name)(getattr(pb, f"{name}Request")(**fields)))

    def raw(self, name: str, message: bytes) -> None:
        """Send bytes as they are."""
        send = self.channel.unary_unary(f"{SERVICE}/{name}", request_serializer=bytes, response_deserializer=bytes)
        self.attempt(lambda: send(message))

    def attempt(self, ask: Callable[[], Any]) -> Any:
        """What is answered; None when refused."""
        try:
            return ask()
        except grpc.RpcError as failure:
            said = f"{failure.code().name}: {failure.details()}"[:200]
            self.refused[said] = self.refused.get(said, 0) + 1
            return None

    def attached(self, pool_id: str, layout: pb.PageLayout, pages: int | None = None, ttl_s: int = 600) -> str | None:
        """A session that has proved its mapping; None when it is refused."""
        ttl = duration_pb2.Duration(seconds=ttl_s)
        opened = self.call("OpenSession", pool_id=pool_id, layout=layout, pool_pages=pages, ttl=ttl)
        if opened is None:
            return None
        with open(opened.arena.file_path, "r+b") as file, mmap.mmap(file.fileno(), opened.arena.size_bytes) as arena:
            at = opened.arena.canary_offset
            canary = arena[at : at + 32]
            arena[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
        self.call("AttachSession", session_id=opened.session_id, seen=canary)
        return str(opened.session_id)

    def open_many(self, session: str, names: list[str], tokens: int = 1, pages: int = 1) -> None:
        """Open sequences and have them report that many tokens, 1000 a call."""
        for at in range(0, len(names), 1000):
            some = names[at : at + 1000]
            openings = [
                pb.SequenceOpening(sequence_id=name, prompt=pb.Prompt(tokens=[hash(name) & 0xFFFF]), total_pages=pages)
                for name in some
            ]
            self.call("AllocatePages", session_id=session, demands=[pb.Demand(opening=one) for one in openings])
            told = [number for name in some for number in (hash(name) & 0x7FFFFFFF, *range(tokens - 1))]
            steps = pb.SequenceSteps(
                sequence_ids=some, starts=[0] * len(some), token_counts=[tokens] * len(some), tokens=told
            )
            self.call("AppendTokens", session_id=session, steps=steps)


# --- tricks: each prepares, says so, and then yields for ever, once for each repetition -------------------------------


def empty_demands(caller: Caller) -> Iterator[None]:
    """A message of 30 MiB, all of it demands of two bytes."""
    message = b"\x1a\x00" * (15 * MIB)
    while True:
        yield
        caller.raw("AllocatePages", message)


def empty_names(caller: Caller) -> Iterator[None]:
    """A step of 15 million sequences without a name."""
    inner = b"\x0a\x00" * (15 * MIB)

    def wrapped(tag: bytes, content: bytes) -> bytes:
        size, out = len(content), bytearray()
        while size > 0x7F:
            out.append(size & 0x7F | 0x80)
            size >>= 7
        return tag + bytes([*out, size]) + content

    message = wrapped(b"\x1a", wrapped(b"\x0a", inner))
    while True:
        yield
        caller.raw("AllocatePages", message)


def long_prompt(caller: Caller) -> Iterator[None]:
    """Opens a prompt of eight million tokens again and again."""
    session = caller.attached("tiny", TINY, 1 << 16)
    opening = pb.SequenceOpening(sequence_id="a", prompt=pb.Prompt(tokens=range(1 << 23)), total_pages=1)
    while True:
        yield
        caller.call("AllocatePages", session_id=session, demands=[pb.Demand(opening=opening)])


def explain(caller: Caller) -> Iterator[None]:
    """Asks why eight million tokens are not cached."""
    caller.attached("tiny", TINY, 1 << 16)
    request = pb.ExplainPrefixRequest(pool_id="tiny", prompt=range(1 << 23))
    smaller = pb.ExplainPrefixRequest(pool_id="tiny", prompt=range(1 << 20))
    while True:
        yield
        caller.attempt(lambda: caller.stub.ExplainPrefix(request))
        caller.attempt(lambda: caller.stub.ExplainPrefix(smaller))


def fsck(caller: Caller) -> Iterator[None]:
    """Has a million pages checked."""
    caller.attached("tiny", TINY, 1 << 20)
    while True:
        yield
        caller.call("Fsck")


def pools(caller: Caller) -> Iterator[None]:
    """Makes pools of a million tiny pages; each drops the one before."""
    for number in itertools.count():
        yield
        if session := caller.attached(f"tiny-{number}", TINY, 1 << 20):
            caller.call("CloseSession", session_id=session)


def large_pools(caller: Caller) -> Iterator[None]:
    """Makes pools of all the memory there is; each drops the one before."""
    page = 2 * MIB
    layout = pb.PageLayout(page_size=64, layers=32, kv_heads=4, head_dim=64, data_type=pb.DATA_TYPE_F16)
    for number in itertools.count():
        yield
        if session := caller.attached(f"large-{number}", layout, 220 * MIB // page):
            caller.call("CloseSession", session_id=session)


def cached(caller: Caller) -> str | None:
    """Fill a pool with cached pages."""
    session = caller.attached("tiny", TINY, 1 << 18)
    filled(caller, session, range(64))
    return session


def filled(caller: Caller, session: str | None, numbers: range) -> None:
    """Have four thousand pages cached for each number."""
    for number in numbers if session is not None else ():
        names = [f"{number}-{at}" for at in range(1000)]
        caller.open_many(session or "", names, tokens=4, pages=4)
        caller.call("RemoveSequences", session_id=session, sequence_ids=names)


def watch(caller: Caller) -> Iterator[None]:
    """Begins to watch events, of a large cache, and leaves."""
    cached(caller)
    while True:
        yield
        stream = caller.stub.WatchEvents(pb.WatchEventsRequest())
        caller.attempt(lambda: [next(stream) for _ in range(2)])  # noqa: B023
        stream.cancel()


def drop(caller: Caller) -> Iterator[None]:
    """Has a large cache evicted, and drops its pool; fills it again, as far as it gets in a moment."""
    session, fill = caller.attached("tiny", TINY, 1 << 18), range(64)
    while True:
        filled(caller, session, fill)
        yield
        caller.call("EvictPages", pool_id="tiny")
        caller.call("CloseSession", session_id=session)
        caller.call("DropPool", pool_id="tiny")
        # To fill all of it takes longer than the trick is played for.
        session, fill = caller.attached("tiny", TINY, 1 << 18), range(8)


def sequences(caller: Caller) -> str | None:
    """A session with as many sequences as it may have."""
    session = caller.attached("tiny", TINY, 1 << 18)
    if session is not None:
        caller.open_many(session, [f"sequence-{at}" for at in range(65536)])
    return session


def listing(caller: Caller) -> Iterator[None]:
    """Lists the last of very many sequences."""
    sequences(caller)
    while True:
        yield
        caller.call("ListSequences", cursor="65000", limit=1000)


def closing(caller: Caller) -> Iterator[None]:
    """Closes a session with very many sequences, and opens them again."""
    while True:
        session = sequences(caller)
        yield
        caller.call("CloseSession", session_id=session)


def expiring(caller: Caller) -> Iterator[None]:
    """Has very many sequences expired, whose pages then wait in quarantine, and removes some to open others."""
    session, names = sequences(caller), [f"sequence-{at}" for at in range(4000)]
    for number in itertools.count():
        yield
        caller.call("ExpireSequences", older_than=duration_pb2.Duration())
        caller.call("RemoveSequences", session_id=session, sequence_ids=names)
        names = [f"{number}-{at}" for at in range(4000)]
        caller.open_many(session or "", names)


def looking(caller: Caller) -> Iterator[None]:
    """Looks at a sequence of a quarter million pages, with their tokens."""
    session = caller.attached("tiny", TINY, 1 << 18)
    long = pb.SequenceOpening(sequence_id="long", prompt=pb.Prompt(tokens=[1]), total_pages=(1 << 18) - 1)
    caller.call("AllocatePages", session_id=session, demands=[pb.Demand(opening=long)])
    steps = pb.SequenceSteps(sequence_ids=["long"], starts=[0], token_counts=[1 << 17], tokens=range(1 << 17))
    caller.call("AppendTokens", session_id=session, steps=steps)
    while True:
        yield
        caller.call("GetSequence", session_id=session, sequence_id="long", include_tokens=True)


def forks(caller: Caller) -> Iterator[None]:
    """Forks of a long sequence, each a copy of its tokens and its block table."""
    session = caller.attached("small", SMALL, 8192)
    long = pb.SequenceOpening(sequence_id="long", prompt=pb.Prompt(tokens=[1]), total_pages=8000)
    caller.call("AllocatePages", session_id=session, demands=[pb.Demand(opening=long)])
    steps = pb.SequenceSteps(sequence_ids=["long"], starts=[0], token_counts=[80000], tokens=range(80000))
    caller.call("AppendTokens", session_id=session, steps=steps)
    for number in itertools.count():
        yield
        openings = [pb.SequenceOpening(sequence_id=f"{number}-{at}", parent_sequence_id="long") for at in range(16)]
        caller.call("AllocatePages", session_id=session, demands=[pb.Demand(opening=one) for one in openings])


def removals(caller: Caller) -> Iterator[None]:
    """Has ids remembered as removed, each as long as it may be, in session after session."""
    for number in itertools.count():
        session = caller.attached("tiny", TINY, 1 << 16)
        for call in range(16):
            names = [f"{number}-{call}-{at}".ljust(128, "\U0001f600") for at in range(4096)]
            yield
            caller.call("RemoveSequences", session_id=session, sequence_ids=names)


TRICKS: dict[str, Callable[[Caller], Iterator[None]]] = {
    trick.__name__.replace("_", "-"): trick
    for trick in (
        *(empty_demands, empty_names, long_prompt, explain, fsck, pools, large_pools, watch, drop, listing, closing),
        *(expiring, looking, forks, removals),
    )
}


def repeat(name: str, address: str) -> None:
    """Be the hostile process: prepare, say so, and repeat until ended."""
    caller = Caller(address)
    trick = TRICKS[name](caller)
    next(trick)
    print("ready", flush=True)
    for _ in trick:
        print(json.dumps(caller.refused), flush=True)


# --- the well-behaved client ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """Milliseconds; resident MiB of the daemon at its peak; how often the trick was played, and how it was refused."""

    trick: str
    health_p50: float
    health_p99: float
    step_p50: float
    step_p99: float
    worst: float
    sessions_lost: int
    peak_mib: float
    plays: int
    refused: str


def measure(trick: str | None, seconds: float) -> Row:
    """One trick against one daemon; None is nobody's."""
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent))
        address = f"unix:{name}/k.sock"
        words = ["--listen", address, "--arena-dir", f"{name}/arena"]
        daemon = stack.enter_context(process("services.kvcache", address, *words, log=Path(name) / "log"))
        stack.callback(daemon.kill)  # one that is kept busy takes its time to stop
        good = Caller(address)
        stack.callback(good.channel.close)
        session = good.attached("good", SMALL, 4096, ttl_s=5)
        if session is None:
            raise RuntimeError(f"the daemon serves nobody: {good.refused}")
        plays: list[str] = []
        if trick is not None:
            stack.enter_context(hostile(trick, address, plays, lambda: good.call("RenewSession", session_id=session)))
        health, steps = latencies(good, session, seconds)
        lost = good.refused.get("FAILED_PRECONDITION: the session has ended", 0) or int("SESSION" in str(good.refused))
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        refusals = json.loads(plays[-1]) if plays else {}
        return Row(
            trick or "nothing",
            round(at(health, 50), 1),
            round(at(health, 99), 1),
            round(at(steps, 50), 1),
            round(at(steps, 99), 1),
            round(max(health + steps), 1),
            lost or int("has ended" in str(good.refused)),
            round(int(peak.group(1)) / 1024, 0) if peak else 0.0,
            len(plays),
            "; ".join(refusals)[:120],
        )


@contextlib.contextmanager
def hostile(trick: str, address: str, plays: list[str], renew: Callable[[], Any]) -> Iterator[None]:
    """The hostile process, ready to play; each time it has, a line is added to ``plays``."""
    command = [sys.executable, "-m", "benchmarks.hostile", "--play", trick, address]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    ready = threading.Event()

    def read() -> None:
        for line in child.stdout or ():
            if line == "ready\n":
                ready.set()
            else:
                plays.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not ready.wait(0.5):
            if child.poll() is not None:
                raise RuntimeError(f"{trick} could not be prepared")
            renew()
        yield
    finally:
        child.kill()
        child.wait()
        reader.join()


def latencies(good: Caller, session: str, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds of Health, and of a step of 64 sequences, both asked for all the while."""
    names = [f"good-{at}" for at in range(64)]
    good.open_many(session, names)
    asks = health_pb2_grpc.HealthStub(good.channel)
    until = time.monotonic() + seconds
    health: list[float] = []
    steps: list[float] = []

    def ask(kept: list[float], call: Callable[[], Any]) -> None:
        while time.monotonic() < until:
            began = time.perf_counter()
            good.attempt(call)
            kept.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.005)

    def step() -> Any:
        columns = pb.SequenceSteps(
            sequence_ids=names, starts=[0] * 64, token_counts=[0] * 64, total_pages=[1] * 64, known_pages=[1] * 64
        )
        return good.stub.AllocatePages(
            pb.AllocatePagesRequest(session_id=session, demands=[pb.Demand(steps=columns)]), timeout=120
        )

    stepping = threading.Thread(target=ask, args=(steps, step))
    stepping.start()
    ask(health, lambda: asks.Check(health_pb2.HealthCheckRequest(), timeout=120))
    stepping.join()
    return health, steps


def at(values: list[float], percent: int) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> int:
    """Returns the exit status: 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each trick (default 8)")
    parser.add_argument("--tricks", nargs="+", choices=sorted(TRICKS), default=list(TRICKS))
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")
    parser.add_argument("--play", nargs=2, metavar=("TRICK", "ADDRESS"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.play:
        repeat(*flags.play)
        return 0
    if not flags.json:
        print(
            f"{'trick':14} {'Health p50':>10} {'p99 ms':>8} {'step p50':>9} {'p99 ms':>8} {'worst':>8} {'lost':>4} "
            f"{'peak MiB':>8} {'plays':>6}  refused"
        )
    missed: list[str] = []
    for trick in [None, *flags.tricks]:
        row = measure(trick, flags.seconds)
        text = (
            f"{row.trick:14} {row.health_p50:10.1f} {row.health_p99:8.1f} {row.step_p50:9.1f} {row.step_p99:8.1f} "
            f"{row.worst:8.1f} {row.sessions_lost:4} {row.peak_mib:8.0f} {row.plays:6}  {row.refused}"
        )
        print(json.dumps(dataclasses.asdict(row)) if flags.json else text, flush=True)
        if row.health_p99 > HEALTH_P99_MS:
            missed.append(f"{row.trick}: Health takes {row.health_p99} ms, and the bar is {HEALTH_P99_MS}")
        if row.sessions_lost:
            missed.append(f"{row.trick}: a session that kept its lease was lost")
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
