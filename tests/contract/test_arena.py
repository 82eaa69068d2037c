"""What a pool asks of any arena: a file's, a fake GPU's, and a real one's where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocmforge.client.arena.gpu_ipc import HANDLE_BYTES, Gpu
from services.common.errors import ExceedsBudget
from services.kvcache.arena.device import DeviceArena
from services.kvcache.arena.host import FileArena
from services.kvcache.pool.arena import Arena
from services.kvcache.pool.budget import CANARY_SLOT_BYTES
from services.kvcache.pool.layout import PageLayout
from tests.fakegpu import Machine
from tests.gpus import ROOT, environment, gpu_or_skip

LAYOUT = PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, dtype="f16")
PAGES, SLOTS = 5, 3

#: Another process: opens a handle on a GPU, writes bytes at an offset, prints what was there.
PEER = """
import sys
from rocmforge.client.arena.gpu_ipc import Runtime
gpu = Runtime.load().gpu(int(sys.argv[1]))
pointer = gpu.open(bytes.fromhex(sys.argv[2]))
at, data = pointer + int(sys.argv[3]), bytes.fromhex(sys.argv[4])
print(gpu.read(at, len(data)).hex())
gpu.write(at, data)
gpu.close(pointer)
"""


@dataclass
class Kind:
    """A kind of arena, and an engine's view of it: ``swap`` reads bytes at an offset and writes others there."""

    name: str
    make: Callable[[int], Arena]
    swap: Callable[[Arena, int, bytes], bytes]


@pytest.fixture(params=["file", "fake", "gpu"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kind]:
    """Each kind; the last needs a GPU."""
    if request.param == "file":
        yield Kind("file", lambda pages: FileArena(tmp_path, f"{pages}", LAYOUT, pages, SLOTS), swap_in_file)
        return
    if request.param == "fake":
        machine = Machine(total=1 << 16)
        gpu, peer = machine.process().gpu(1), machine.process().gpu(1)

        def swap(arena: Arena, at: int, data: bytes) -> bytes:
            return swap_on_gpu(peer, arena, at, data)

        yield Kind("fake", lambda pages: DeviceArena(gpu, LAYOUT, pages, SLOTS), swap)
        assert machine.used(1) == 0, "everything was given back"
        return
    real = gpu_or_skip()
    yield Kind("gpu", lambda pages: DeviceArena(real, LAYOUT, pages, SLOTS), swap_in_process)


def swap_in_file(arena: Arena, at: int, data: bytes) -> bytes:
    with open(arena.file_path, "r+b") as file:
        file.seek(at)
        before = file.read(len(data))
        file.seek(at)
        file.write(data)
    return before


def swap_on_gpu(gpu: Gpu, arena: Arena, at: int, data: bytes) -> bytes:
    assert arena.device
    pointer = gpu.open(arena.device.handle)
    before = gpu.read(pointer + at, len(data))
    gpu.write(pointer + at, data)
    gpu.close(pointer)
    return before


def swap_in_process(arena: Arena, at: int, data: bytes) -> bytes:
    assert arena.device
    words = [str(arena.device.ordinal), arena.device.handle.hex(), str(at), data.hex()]
    done = subprocess.run(
        [sys.executable, "-c", PEER, *words],
        cwd=ROOT,
        env=environment(os.environ),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return bytes.fromhex(done.stdout)


def test_canaries_travel_both_ways(kind: Kind) -> None:
    arena = kind.make(PAGES)
    slots = [arena.canary_offset(slot) for slot in range(SLOTS)]
    assert slots == [PAGES * LAYOUT.page_bytes + slot * CANARY_SLOT_BYTES for slot in range(SLOTS)]
    assert arena.size_bytes == slots[-1] + CANARY_SLOT_BYTES
    for slot in (2, 0):
        arena.write_canary(slot, bytes([slot + 1]) * 32)
    assert arena.read_answer(2) == arena.read_answer(0) == bytes(32)
    assert kind.swap(arena, slots[2], bytes([9]) * 64) == bytes([3]) * 32 + bytes(32)
    assert arena.read_answer(2) == bytes([9]) * 32
    assert arena.read_answer(0) == bytes(32), "the slot of another session is untouched"
    arena.write_canary(2, bytes([4]) * 32)
    assert arena.read_answer(2) == bytes(32), "a new canary clears the old answer"
    arena.close()


def test_pages_keep_what_an_engine_wrote(kind: Kind) -> None:
    arena = kind.make(PAGES)
    last = (PAGES - 1) * LAYOUT.page_bytes
    data = bytes(range(LAYOUT.page_bytes))
    kind.swap(arena, last, data)
    arena.write_canary(0, bytes(range(32)))
    assert kind.swap(arena, last, bytes(len(data))) == data
    arena.close()


def test_it_says_where_it_is(kind: Kind) -> None:
    arena = kind.make(PAGES)
    if kind.name == "file":
        assert Path(arena.file_path).stat().st_size == arena.size_bytes and arena.device is None
    else:
        assert arena.file_path == "" and arena.device is not None
        assert len(arena.device.handle) == HANDLE_BYTES and arena.device.id.count(":") == 2
    arena.close()


def test_one_that_does_not_fit_is_refused_with_the_numbers(kind: Kind) -> None:
    pages = 1 << 46
    with pytest.raises(ExceedsBudget) as caught:
        kind.make(pages)
    assert str(pages * LAYOUT.page_bytes + SLOTS * CANARY_SLOT_BYTES) in caught.value.message
    assert caught.value.field == "pool_pages"
    arena = kind.make(PAGES)  # and it left nothing behind
    arena.close()
