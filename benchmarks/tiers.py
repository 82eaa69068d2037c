"""Seconds to the first token of a prompt that the pool, the host tier or the outer tier holds, or nobody; the bytes per
second of each way; and the tokens per second that an engine decodes while pages are stored.

Real processes on this machine: a daemon with a host tier, one on a redis-server of its own, and an engine with the
bundled model's shape and a longer context, so that prompts of 32k tokens can be asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.parts.rows import Row, as_json, line, plot
from benchmarks.parts.stand import PAGE_SIZE, process
from rocmforge.client import Demand, KvCache, OpaqueLayout
from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.engine.config import BUNDLED_MODEL
from services.kvcache.arena.host import default_directory

LENGTHS = (1024, 2048, 4096, 8192)
CONTEXT = 40960
LIMIT_S = 600.0
STREAMS, DECODED = 4, 200
#: What is published beside decoding, to be stored: pages of 80 KiB.
STORED_PAGES_PER_S = 200
#: The daemon takes what a lookup found, or did not, as true for a second.
ANSWER_S = 1.1
TIERS = {"host": pb.TIER_HOST, "outer": pb.TIER_OUTER}


def longer_model(folder: Path) -> Path:
    """The bundled model with a context of `CONTEXT` tokens: its text is nonsense there, its arithmetic the same."""
    copy = folder / "model"
    shutil.copytree(BUNDLED_MODEL, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}), encoding="utf-8")
    return copy


def prompt(length: int, seed: int) -> list[int]:
    """A prompt that shares no page with one of another seed."""
    return random.Random(seed).choices(range(1, 1000), k=length)


@dataclass
class Node:
    """A daemon and an engine that serve."""

    cache: Any
    engine: Any
    address: str

    def first_token_s(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a prompt, and how many of its tokens were cached."""
        began, first = time.perf_counter(), 0.0
        for response in self.engine.Generate(request(tokens, 1), timeout=LIMIT_S):
            first = first or time.perf_counter() - began
            usage = response.finish.usage
        return first, usage.cached_tokens

    def stats(self) -> pb.GetStatsResponse:
        """The daemon's counts."""
        stats: pb.GetStatsResponse = self.cache.GetStats(pb.GetStatsRequest())
        return stats

    def tier(self, name: str) -> pb.TierStats:
        """The counts of a tier."""
        [found] = [tier for tier in self.stats().tiers if tier.tier == TIERS[name]]
        return found

    def evict(self) -> None:
        """Take everything out of the pool."""
        for pool in self.stats().pools:
            self.cache.EvictPages(pb.EvictPagesRequest(pool_id=pool.pool_id, include_retained=True))

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is true. Raises TimeoutError."""
        deadline = time.perf_counter() + LIMIT_S
        while not holds():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"not so after {LIMIT_S:g} s: {self.stats()}")
            time.sleep(0.002)


def request(tokens: list[int], count: int) -> engine_pb2.GenerateRequest:
    """A greedy request for ``count`` tokens."""
    return engine_pb2.GenerateRequest(
        prompt=engine_pb2.Prompt(tokens=engine_pb2.TokenIds(ids=tokens)),
        stopping=engine_pb2.Stopping(max_tokens=count, ignore_eos=True),
    )


@contextlib.contextmanager
def node(folder: Path, name: str, model: Path, pool_pages: int, *flags: str) -> Iterator[Node]:
    """A daemon with these flags, and an engine on it."""
    daemon, engine = f"unix:{folder}/{name}-k.sock", f"unix:{folder}/{name}-e.sock"
    pages = ["--listen", daemon, "--arena-dir", f"{folder}/{name}-arena", "--memory", "2GiB", *flags]
    words = ["--listen", engine, "--kvcache", daemon, "--model", str(model), "--pool-pages", str(pool_pages)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(process("services.kvcache", daemon, *pages))
        stack.enter_context(process("services.engine", engine, *words))
        cache = kvcache_pb2_grpc.KvCacheServiceStub(stack.enter_context(grpc.insecure_channel(daemon)))
        channel = stack.enter_context(
            grpc.insecure_channel(engine, options=[("grpc.max_send_message_length", 1 << 26)])
        )
        yield Node(cache, engine_pb2_grpc.EngineServiceStub(channel), daemon)


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A redis-server on a free port; the port, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.perf_counter() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            if time.perf_counter() > deadline:
                raise TimeoutError("redis-server does not answer")
            time.sleep(0.01)
        yield port, started
    finally:
        started.kill()
        started.wait()


def tier_flags(folder: Path, port: int) -> dict[str, tuple[str, ...]]:
    """The flags of a daemon with one tier, by its name."""
    key = folder / "key"
    key.write_text(secrets.token_hex(32), encoding="ascii")
    key.chmod(0o600)
    every = ("--tier-admission", "all", "--tier-queue", str(CONTEXT // PAGE_SIZE))
    return {
        "host": ("--host-cache", "1GiB", *every),
        "outer": ("--outer", f"valkey://127.0.0.1:{port}", "--outer-key", str(key), *every),
    }


def first_tokens(one: Node, tier: str, lengths: list[int], rounds: int) -> Iterator[Row]:
    """Rows for cold, pool and a tier, medians of the rounds; and the bytes per second to the tier and from it."""
    one.first_token_s(prompt(1024, 9999))  # the engine then knows how fast it prefills
    page_bytes = one.stats().pools[0].page_bytes
    stored, fetched = list[float](), list[float]()
    for length in lengths:
        times: dict[str, list[float]] = {"cold": [], "pool": [], tier: []}
        waited = 0
        for nth in range(rounds):
            tokens, pages = prompt(length, length + nth), (length - 1) // PAGE_SIZE
            before = one.tier(tier).stored_pages
            seconds, cached = one.first_token_s(tokens)
            began = time.perf_counter()
            check(cached, 0)
            times["cold"].append(seconds)
            one.until(lambda least=before + pages: one.tier(tier).stored_pages >= least)  # type: ignore[misc]
            stored.append(pages * page_bytes / (time.perf_counter() - began))
            seconds, cached = one.first_token_s(tokens)
            check(cached, pages * PAGE_SIZE)
            times["pool"].append(seconds)
            one.evict()
            if tier == "outer":
                time.sleep(ANSWER_S)
            openings = one.stats().mover.waited_openings
            seconds, cached = one.first_token_s(tokens)
            times[tier].append(seconds)
            waited += cached
            if one.stats().mover.waited_openings > openings and cached:
                fetched.append(cached * page_bytes / PAGE_SIZE / max(1e-6, seconds - times["pool"][-1]))
            one.evict()
        cold = statistics.median(times["cold"])
        for source, found in times.items():
            middle = statistics.median(found)
            share = waited / rounds / length if source == tier else float(source == "pool")
            detail = f"of cold; {share:.0%} cached; {min(found):.3f} to {max(found):.3f} s"
            yield Row("tiers", f"{length} tokens, {source}", middle * 1e3, "ms", middle / cold, detail=detail)
    yield Row("tiers", f"pool to {tier}", statistics.median(stored) / 1e6, "MB/s", detail="from the first token on")
    if fetched:
        yield Row("tiers", f"{tier} to pool", statistics.median(fetched) / 1e6, "MB/s", detail="over a hit in the pool")


def hanging(one: Node, server: subprocess.Popen[bytes], length: int, rounds: int) -> Iterator[Row]:
    """Rows for prompts that nobody has while the server is stopped: the first, and those after it."""
    cold = statistics.median(one.first_token_s(prompt(length, 30000 + nth))[0] for nth in range(rounds))
    server.send_signal(signal.SIGSTOP)
    try:
        times = [one.first_token_s(prompt(length, 31000 + nth))[0] for nth in range(1 + rounds)]
    finally:
        server.send_signal(signal.SIGCONT)
    for name, seconds in (("first", times[0]), ("later", statistics.median(times[1:]))):
        detail = f"of computing while it answers, {cold:.3f} s"
        yield Row("tiers", f"{length} tokens, outer hangs, {name}", seconds * 1e3, "ms", seconds / cold, detail=detail)


def check(cached: int, expected: int) -> None:
    """Raise RuntimeError if other tokens were cached than what is measured needs."""
    if cached != expected:
        raise RuntimeError(f"{cached} tokens were cached, not {expected}: nothing would be measured")


@contextlib.contextmanager
def storing(one: Node, pages_per_s: int) -> Iterator[None]:
    """Publish pages at this rate, which are then stored, while the block runs."""
    over = threading.Event()
    layout = OpaqueLayout(PAGE_SIZE, "bench", 81920)

    def publish() -> None:
        with KvCache.connect(one.address, "bench-writer", layout, pool_pages=1024) as cache:
            nth, began, seed = 0, time.perf_counter(), secrets.randbits(48)
            while not over.is_set():
                name, tokens = f"w{nth}", prompt(8 * PAGE_SIZE, seed + nth)
                [grant] = cache.step([Demand.of_prompt(name, [*tokens, 1], 9)])
                if grant.error is None:
                    for page in grant.pages:
                        cache.pages.array[page] = nth % 251
                    cache.step([Demand.of_step(name, 0, tokens, 9, 9)])
                cache.step([], removed=[name])
                nth += 1
                over.wait(max(0.0, began + nth * 8 / pages_per_s - time.perf_counter()))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def decode_rate(one: Node, seed: int) -> float:
    """Tokens per second of all streams together, from the last first token on."""
    moments = [list[float]() for _ in range(STREAMS)]

    def read(into: list[float], tokens: list[int]) -> None:
        for response in one.engine.Generate(request(tokens, DECODED), timeout=LIMIT_S):
            into.extend([time.perf_counter()] * len(response.token_ids))

    threads = [threading.Thread(target=read, args=(into, prompt(32, seed + at))) for at, into in enumerate(moments)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    began, ended = max(into[0] for into in moments), min(into[-1] for into in moments)
    return sum(began < moment <= ended for into in moments for moment in into) / (ended - began)


def decoding(plain: Node, one: Node, tier: str, rounds: int) -> Iterator[Row]:
    """Rows for decoding while pages are published that are stored in a tier, against a daemon without tiers."""
    rates = list[tuple[float, float]]()  # without tiers, and with
    stored = one.tier(tier).stored_pages
    for nth in range(2 * rounds + 2):
        pair = []
        for which in (plain, one) if nth % 2 else (one, plain):
            with storing(which, STORED_PAGES_PER_S):
                pair.append(decode_rate(which, 20000 + 10 * nth))
        rates.append((pair[0], pair[1]) if nth % 2 else (pair[1], pair[0]))
    stored = one.tier(tier).stored_pages - stored
    without, rate = (statistics.median(some) for some in zip(*rates, strict=True))
    ratios = [after / before for before, after in rates]
    detail = f"of {without:.1f} without tiers, pairs {min(ratios):.2f} to {max(ratios):.2f}; {stored} pages stored"
    yield Row("tiers", f"decode while {tier} stores", rate, "tokens/s", statistics.median(ratios), detail=detail)


def measure(lengths: list[int], rounds: int) -> Iterator[Row]:
    """All rows."""
    pages = 2 * (max(lengths) // PAGE_SIZE + 64)
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as name:
        folder = Path(name)
        model = longer_model(folder)
        with redis(folder) as (port, server):
            for tier, flags in tier_flags(folder, port).items():
                with node(folder, tier, model, pages, *flags) as one:
                    yield from first_tokens(one, tier, lengths, rounds)
                    with node(folder, "plain", model, pages) as plain:
                        yield from decoding(plain, one, tier, rounds)
                    if tier == "outer":
                        yield from hanging(one, server, min(lengths), rounds)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length (default 5)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens, at most 32768")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the rows into a PNG there")
    flags = parser.parse_args(arguments)
    if min(flags.lengths) < PAGE_SIZE or max(flags.lengths) > 32768 or flags.rounds < 1:
        parser.error(f"--lengths: {PAGE_SIZE} to 32768 tokens; --rounds: at least 1")
    found = list[Row]()
    for row in measure(flags.lengths, flags.rounds):
        found.append(row)
        print(as_json(row) if flags.json else line(row), flush=True)
    if flags.plot is not None:
        plot(found, flags.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
