"""What checksums and zeroing cost: bytes per second, the step call with and without, and a grant with and without.

Everything is compared within one run, in turns; times are medians. With --gpu also on GPU 0.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from services.kvcache.arena.device import DeviceArena
from services.kvcache.arena.host import FileArena
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.limits import Limits
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.pool.arena import Arena
from services.kvcache.pool.layout import Layout, PageLayout
from services.kvcache.scrub.scrubber import Scrubber

#: Pages of 80 KiB, the bundled model's, and of 1.75 and 2 MiB: 16 tokens of 0.6 and 8 G parameters, f32 and bf16.
LAYOUTS = {
    "80 KiB": PageLayout(page_size=16, layers=5, kv_heads=2, head_dim=64, dtype="f32"),
    "1.75 MiB": PageLayout(page_size=16, layers=28, kv_heads=8, head_dim=128, dtype="bf16"),
    "2 MiB": PageLayout(page_size=16, layers=32, kv_heads=8, head_dim=128, dtype="bf16"),
}
BATCH, STEPS, ROUNDS, GRANTED = 256, 64, 7, 16


def seconds(call: Callable[..., object], *arguments: object, times: int = 9) -> float:
    """The median time of a call."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call(*arguments)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def copied(size: int) -> float:
    """Bytes per second of a copy of that size by the interpreter."""
    source, target = bytearray(b"x" * size), bytearray(size)

    def copy() -> None:
        target[:] = source

    return size / seconds(copy)


def speeds(directory: Path, names: Iterator[str]) -> None:
    """Checksums and zeroing of pages in a file."""
    for name, layout in LAYOUTS.items():
        count = max(1, (32 << 20) // layout.page_bytes)
        arena = FileArena(directory, next(names), layout, count, 1)
        pages, size = list(range(count)), count * layout.page_bytes
        arena.zero(pages)
        copy = copied(size)
        read, wrote = size / seconds(arena.checksums, pages), size / seconds(arena.zero, pages)
        print(
            f"host, pages of {name:8} checksum {read / 1e6:6.0f} MB/s, {read / copy:.2f} of a copy, "
            f"{layout.page_bytes / 16 / read * 1e6:.0f} us a token; zero {wrote / 1e6:6.0f} MB/s, {wrote / copy:.2f}"
        )
        arena.close()


class Loaded:
    """A cache whose batch decodes: each sequence reports a token a step, and one in sixteen completes a page."""

    def __init__(self, arena: Callable[[Layout, int, int, int | None], Arena], **limits: object) -> None:
        counter = itertools.count(1)
        self.cache = KvCache(
            Limits(budget_bytes=1 << 30, verify_share=0.0, **limits),  # type: ignore[arg-type]
            epoch=1,
            clock=time.monotonic,
            random_bytes=lambda n: next(counter).to_bytes(n, "big"),
            make_arena=arena,
            observe=lambda process: None,
        )
        self.made: list[str] = []

    def attach(self, layout: Layout, pages: int) -> str:
        """A session on a pool of so many pages."""
        session = self.cache.open_session("bench", "pool", layout, pool_pages=pages)
        session.attached = True
        return session.id

    def begin(self, session: str) -> None:
        """Open a batch of sequences that begin at every place of a page."""
        for at in range(BATCH):
            name = f"q{at}"
            prompt = array("I", [at] * (16 + at % 16))
            self.cache.calls.allocate(session, [Opening(name, Prompt(prompt), 8)], [])
            self.cache.calls.append(session, Steps([name], [0], [len(prompt)], prompt, [], []))
            self.made.append(name)

    def step(self, session: str, turn: int) -> None:
        """One token of each."""
        starts = [16 + at % 16 + turn for at in range(BATCH)]
        tokens = array("I", [turn] * BATCH)
        self.cache.calls.allocate(
            session, [Steps(self.made, starts, [1] * BATCH, tokens, [8] * BATCH, [8] * BATCH)], []
        )


class NoArena(FileArena):
    """Memory that nobody looks at: the step call itself is timed."""

    def checksums(self, pages: list[int]) -> list[int]:
        """Of no bytes."""
        return [0] * len(pages)


def step_call(directory: Path, names: Iterator[str]) -> None:
    """The transaction of a step of 256 sequences, with checksums and without; taking them is not part of it."""
    layout = PageLayout(page_size=16, layers=1, kv_heads=1, head_dim=8, dtype="f32")
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        worlds = {}
        for checksums in (True, False):
            worlds[checksums] = Loaded(
                lambda layout, pages, slots, device: NoArena(directory, next(names), layout, pages, slots),
                checksums=checksums,
            )
        sessions = {key: world.attach(layout, 8 * BATCH) for key, world in worlds.items()}
        for key, world in worlds.items():
            world.begin(sessions[key])
        for turn in range(STEPS):
            for key in (True, False) if turn % 2 else (False, True):
                began = time.perf_counter()
                worlds[key].step(sessions[key], turn)
                taken[key].append(time.perf_counter() - began)
        for world in worlds.values():
            world.cache.close()
    on, off = (statistics.median(taken[key]) for key in (True, False))
    print(f"step of {BATCH} sequences     {off * 1e6:.0f} us without checksums, {on / off:.3f} of it with them")


async def grants(directory: Path, names: Iterator[str]) -> None:
    """A grant until it may be told: pages as they are, zeroed ahead, and evicted and zeroed while the call waits."""
    layout, taken = LAYOUTS["1.75 MiB"], dict[str, list[float]]()
    for kind, zero in itertools.product(("free", "evicted"), (False, True)):
        work = asyncio.Event()
        world = Loaded(
            lambda layout, pages, slots, device: FileArena(directory, next(names), layout, pages, slots),
            zero_pages=zero,
            checksums=False,
        )
        session = world.attach(layout, GRANTED)
        [pool] = world.cache.pools
        scrubber = Scrubber(world.cache, work)
        for turn in range(12):
            prompt = array("I", [turn] * (16 * GRANTED + 1))
            began = time.perf_counter()
            world.cache.calls.allocate(session, [Opening(f"{turn}", Prompt(prompt), GRANTED)], [])
            await scrubber.zero_granted(pool)
            if turn:
                label = f"{kind}, " + ("zeroed" if zero else "as they are")
                taken.setdefault(label, []).append(time.perf_counter() - began)
            if kind == "evicted":
                told = prompt[: 16 * GRANTED]
                world.cache.calls.append(session, Steps([f"{turn}"], [0], [len(told)], told, [], []))
            world.cache.calls.remove(session, [f"{turn}"])
            await scrubber.zero_waiting(pool)
        scrubber.close()
        world.cache.close()
    for label, times in taken.items():
        print(f"grant of {GRANTED} pages of 1.75 MiB, {label:22} {statistics.median(times) * 1e6:8.0f} us")


def made_and_freed(gpu: Gpu, layout: Layout, pages: int) -> None:
    """An arena's life."""
    DeviceArena(gpu, layout, pages, 1).close()


def on_gpu() -> None:
    """Checksums and zeroing of pages in GPU memory, and an arena's first zeroing."""
    gpu = Runtime.load().gpu(0)
    for name, layout in LAYOUTS.items():
        count = min(2048, (512 << 20) // layout.page_bytes)
        arena = DeviceArena(gpu, layout, count, 1)
        pages, size = list(range(count)), count * layout.page_bytes
        arena.checksums(pages)  # compiles
        read, wrote = size / seconds(arena.checksums, pages), size / seconds(arena.zero, pages)
        print(f"GPU, {count} pages of {name:8} checksum {read / 1e9:7.0f} GB/s, zero {wrote / 1e9:7.0f} GB/s")
        arena.close()
    layout = LAYOUTS["2 MiB"]
    for count in (1024, 8192):
        taken = seconds(made_and_freed, gpu, layout, count, times=5)
        print(f"GPU, an arena of {count * layout.page_bytes >> 30} GiB made, zeroed and freed: {taken * 1e3:.1f} ms")


def main(arguments: list[str]) -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checksums", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="also on GPU 0")
    parser.add_argument("--arena-dir", default="/dev/shm", help="where files are made (default /dev/shm)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.arena_dir) as name:
        names = (str(number) for number in itertools.count())
        speeds(Path(name), names)
        step_call(Path(name), names)
        asyncio.run(grants(Path(name), names))
    if options.gpu:
        on_gpu()


if __name__ == "__main__":
    main(sys.argv[1:])
